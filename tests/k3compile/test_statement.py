"""Whatever would make two ranks compute something else stands in what they compare."""

import shutil
from pathlib import Path

import pytest
import torch
from k3compile.passes.remarks import PassRecord, Remark
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.engine_config import EngineConfig
from k3compile.runtime.parallel.agreement import differences, flat
from k3compile.runtime.parallel.watch_config import WatchConfig
from k3compile.runtime.weights import load_model

from k3compile import statement as module
from k3compile.options import CompileOptions
from k3compile.report import Report
from k3compile.serving import plan
from k3compile.statement import computed_by, sources, statement, whole_weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made") / "k3-tiny", "tiny", 0)


def said(checkpoint, options=None, *, resident=None, compiled=True, draft=None, dcp=1, **engine):
    serving = plan(EngineConfig(**engine), options, draft=draft, ranks=4, context_ranks=dcp)
    return flat(statement(checkpoint, serving, "float32", resident, compiled, WatchConfig(), CPU))


def parted(first, second):
    """Names of what differs."""
    return {line.partition(":")[0] for line in differences([first, second])}


def test_the_same_start_says_the_same_wherever_the_files_are(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "elsewhere")
    assert not differences([said(tiny), said(tmp_path / "elsewhere")])


def test_settings_features_and_options_are_compared(tiny):
    assert parted(said(tiny), said(tiny, max_num_seqs=8)) == {"engine.max_num_seqs"}
    assert parted(said(tiny), said(tiny, resident="bfloat16")) == {"resident"}
    assert parted(said(tiny), said(tiny, CompileOptions(inner="eager"))) == {"compile.inner"}
    assert "features.latent_tail" in parted(said(tiny), said(tiny, CompileOptions(features="baseline")))
    assert {"dcp", "features.context_parallel"} <= parted(said(tiny), said(tiny, dcp=2))
    assert "compile.compiled" in parted(said(tiny), said(tiny, compiled=False))


def test_the_number_of_threads_rounds_sums_and_is_compared(tiny, monkeypatch):
    before = said(tiny)
    monkeypatch.setattr(torch, "get_num_threads", lambda: before["threads (OMP_NUM_THREADS)"] + 1)
    assert parted(before, said(tiny)) == {"threads (OMP_NUM_THREADS)"}


def test_the_switches_of_the_environment_change_graphs_and_are_compared(tiny, monkeypatch):
    before = said(tiny)
    monkeypatch.setenv("K3_DISABLE", "latent_tail")
    assert parted(before, said(tiny)) == {"compile.K3_DISABLE"}
    assert not parted(said(tiny, compiled=False), said(tiny, compiled=False)), (
        "and matter to what is compiled"
    )


def test_another_checkpoint_draft_or_source_is_seen(tiny, tmp_path, monkeypatch):
    other = make_checkpoint(tmp_path / "other", "tiny", 1)
    shards = {f"checkpoint.{file.name}" for file in tiny.glob("*.safetensors")}
    assert parted(said(tiny), said(other)) == {"checkpoint.make-checkpoint.json"} | shards
    for file in tiny.glob("*.safetensors"):
        shutil.copy(file, other)
    (other / "make-checkpoint.json").write_bytes((tiny / "make-checkpoint.json").read_bytes())
    config = other / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    assert parted(said(tiny), said(other)) == {"config.rms_norm_eps", "checkpoint.config.json"}
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    drafting = said(tiny, num_drafts=2, draft=tmp_path / "draft")
    assert parted(said(tiny, num_drafts=2), drafting) == {"draft.folder", "draft.config.json"}
    before = said(tiny)
    monkeypatch.setattr(module, "sources", lambda: sources()[1:])
    assert parted(before, said(tiny)) == {"versions.sources"}


def test_whole_parameters_are_hashed_and_shards_are_not(tiny, tmp_path):
    model = load_model(tiny)
    before = flat(whole_weights(model, None))
    assert "weights.norm.weight" in before
    assert "weights.layers.1.ffn.gate" in before
    assert "weights.layers.1.ffn.e_score_correction_bias" in before
    assert not [name for name in before if "experts.w1" in name or "lm_head" in name]
    with torch.no_grad():
        model.layers[1].ffn.e_score_correction_bias[0] += 1e-3
    after = flat(whole_weights(model, None))
    assert parted(before, after) == {"weights.layers.1.ffn.e_score_correction_bias"}


def test_large_parameters_are_left_out_and_any_dtype_is_hashed(tiny, monkeypatch):
    model = load_model(tiny, dtype=torch.bfloat16)
    every = flat(whole_weights(model, None))
    assert len(set(every)) > 20
    monkeypatch.setattr(module, "MOST_BYTES", 600)
    small = flat(whole_weights(model, None))
    assert set(small) < set(every)
    assert "weights.norm.weight" in small


def test_the_sources_are_those_of_all_four_folders():
    names = {str(Path(file).relative_to(Path(file).parents[1])) for file in sources()}
    assert {"cli/serve.py", "passes/latent_tail.py", "kernels/kda.py", "parallel/launch.py"} <= names
    assert not any("__pycache__" in name for name in names)


def test_what_computes_each_op_is_taken_from_the_reports():
    def report(*remarks):
        record = PassRecord("lower", 0.0, True, remarks, 1, 1)
        return Report("key", "compiled", "inductor", {}, (record,))

    said = [
        Remark("lower", "applied", "n", op, f"computed by {by}") for op, by in (("k3.a", "x"), ("k3.b", "y"))
    ]
    other = Remark("lower", "note", "m", "k3.a", "computed by its meaning")
    elsewhere = Remark("latent_tail", "applied", "m", "k3.c", "found")
    assert computed_by([report(*said), report(other, said[0], elsewhere)]) == {
        "k3.a": ["computed by its meaning", "computed by x"],
        "k3.b": ["computed by y"],
    }
