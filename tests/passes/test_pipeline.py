"""The order of the passes is written down."""

from k3compile.passes.pipeline import ATEN_PASSES, DYNAMO_PASSES


def test_the_passes_run_in_this_order():
    assert [p.name for p in DYNAMO_PASSES] == ["state_export"]
    assert [p.name for p in ATEN_PASSES] == [
        "canonicalize",
        "latent_tail",
        "fuse_norm",
        "read_bf16",
        "contiguous_views",
    ]


def test_every_pass_says_what_it_is():
    every = [*DYNAMO_PASSES, *ATEN_PASSES]
    assert {p.level for p in DYNAMO_PASSES} <= {"dynamo"}
    assert {p.level for p in ATEN_PASSES} == {"aten"}
    assert all(p.keeps in ("exact", "numeric") for p in every)
    assert len({p.name for p in every}) == len(every)
