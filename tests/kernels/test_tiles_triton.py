"""The tiles that ship for a part, and which of them a call takes."""

import pytest
from k3compile.kernels.jit_triton import recording
from k3compile.kernels.tiles_triton import (
    ANYWHERE,
    FAMILY,
    IN_FLOAT32,
    LATER,
    SPACES,
    Tiles,
    block_scaled,
    expert_tiles,
    tiles,
    trying,
)


def test_a_label_names_all_there_is():
    assert Tiles({"BM": 16, "BK": 64}, 4, 3).label == "BM16 BK64 w4 s3"
    for by_family in SPACES.values():
        for candidates in by_family.values():
            assert len({one.label for one in candidates}) == len(candidates)


def test_what_ships_is_a_candidate_of_the_part():
    for (name, target), at in LATER.items():
        assert 0 < at < len(SPACES[name][FAMILY[target]])
    with recording("sm_103"):
        assert tiles("gate_up_mxfp8/many") == SPACES["gate_up_mxfp8/many"]["blackwell"][1]
        assert tiles("down/few") == SPACES["down/few"]["blackwell"][0]


@pytest.mark.parametrize("name", SPACES)
def test_a_part_nobody_compiled_for_gets_small_tiles(name):
    with recording("sm_120"):
        assert tiles(name) == ANYWHERE[name]


@pytest.mark.parametrize(
    ("choices", "rows"), [(0, 16), (7 * 896, 16), (8 * 896, 64), (95 * 896, 64), (96 * 896, 128)]
)
def test_experts_with_more_rows_get_taller_blocks_and_both_products_the_same(choices, rows):
    for target in FAMILY:
        with recording(target):
            for form in ("scaled", "mxfp8") if block_scaled() else ("registers",):
                assert [one.constants["BM"] for one in expert_tiles(form, choices, 896)] == [rows, rows]
    assert expert_tiles("float32", choices, 896) == (IN_FLOAT32, IN_FLOAT32)


def test_candidates_can_be_tried():
    tried = Tiles({"BM": 16, "BN": 32, "BK": 32}, 1, 1)
    with trying({"down/few": tried}):
        assert tiles("down/few") == tried
        assert tiles("gate_up/few") != tried
    assert tiles("down/few") != tried


def test_parts_with_block_scaled_instructions_are_known():
    for target, able in {"sm_90": False, "sm_100": True, "sm_103": True, "gfx950": True}.items():
        with recording(target):
            assert block_scaled() == able
    assert not block_scaled()
