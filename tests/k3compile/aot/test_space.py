"""What ships is what is left of a space after pruning, and a space is pruned by what compilers made of it."""

import json

import pytest
from k3compile.kernels.jit_triton import recording
from k3compile.kernels.tiles_triton import SPACES, tiles

from k3compile.aot import space
from k3compile.aot.parts import PARTS

GOOD = {"spill": 0, "shared": 1000, "resident": 16, "found": {"wgmma": 4, "tcgen05": 4, "mfma": 4}}
RUN = [(name, target) for name in SPACES for target in PARTS if space.candidates(name, target)]


@pytest.mark.parametrize(("name", "target"), RUN)
def test_every_space_has_a_call_that_runs_its_kernel_with_any_candidate(name, target):
    cell, kernel = space.call_of(name)
    assert target in cell.targets
    for candidate in space.candidates(name, target):
        with space.trying({name: candidate}):
            (made,) = {l.num_warps for l in cell.launches(target) if l.kernel.fn.__name__ == kernel}
        assert made == candidate.warps


@pytest.mark.parametrize(("name", "target"), RUN)
def test_what_ships_is_the_first_that_every_version_leaves(name, target):
    with recording(target):
        assert tiles(name) == space.ships(name, target, space.committed())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"spill": 8}, "spills 8 bytes a thread"),
        ({"shared": 300_000}, "300000 bytes shared of 232448"),
        ({"resident": 8}, "8 warps a core, fewer than 12"),
        ({"found": {"mma_sync": 1}}, "no wgmma"),
    ],
)
def test_a_candidate_is_out_for_a_reason(change, why):
    assert space.fault("gate_up/few", "sm_90", GOOD | change) == why


def test_the_next_one_ships_where_one_version_is_against_the_first():
    first, second = space.candidates("gate_up/few", "sm_90")
    table = {"gate_up/few": {"sm_90": {first.label: GOOD, second.label: GOOD}}}
    assert space.ships("gate_up/few", "sm_90", {"1": table}) == first
    worse = {"gate_up/few": {"sm_90": {first.label: GOOD | {"spill": 4}, second.label: GOOD}}}
    assert space.ships("gate_up/few", "sm_90", {"1": table, "2": worse}) == second
    assert space.ships("gate_up/few", "sm_90", {"1": table, "2": {}}) is None
    said = space.shown({"1": table, "2": worse}, ["gate_up/few"], [PARTS["sm_90"]])
    assert [line.split(maxsplit=7)[7] for line in said] == ["Triton 2: spills 4 bytes a thread", "ships"]


def test_written_spaces_replace_their_own_and_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr(space, "FOLDER", tmp_path)
    space.write("1.0", {"a": {"t": {"l": {"spill": 0}}}, "b": {}})
    space.write("1.0", {"a": {"t": {}}})
    assert json.loads((tmp_path / "1.0.json").read_text()) == {"a": {"t": {}}, "b": {}}
    assert space.committed() == {"1.0": {"a": {"t": {}}, "b": {}}}
