"""What a part holds of a kernel, and the time nothing can be under."""

import pytest

from k3compile.aot.parts import PARTS, parts, roofline_us, warps_resident


def test_parts_are_asked_for_by_target():
    assert [p.target for p in parts("gfx950, sm_90")] == ["gfx950", "sm_90"]
    assert [p.target for p in parts("")] == ["sm_90", "sm_100", "sm_103", "gfx950"]
    with pytest.raises(ValueError, match=r"not for 'sm_91' \(did you mean sm_90\?\)"):
        parts("sm_91")


@pytest.mark.parametrize(
    ("target", "registers", "shared", "warps", "resident"),
    [
        ("sm_90", 32, 0, 4, 64),  # nothing is short
        ("sm_90", 128, 0, 4, 16),  # 65536 registers of 128 x 32 a warp
        ("sm_90", 129, 0, 4, 12),  # handed out by 256 a warp
        ("sm_90", 32, 100_000, 8, 16),  # two programs of shared memory
        ("sm_90", 255, 0, 16, 0),  # more registers than there are
        ("gfx950", 64, 0, 4, 32),
        ("gfx950", 129, 0, 4, 12),  # 3 waves of 136 registers on each of four units
        ("gfx950", 64, 100_000, 4, 4),
    ],
)
def test_a_core_holds_what_its_registers_and_shared_memory_allow(target, registers, shared, warps, resident):
    assert warps_resident(PARTS[target], registers, shared, warps) == resident


def test_the_roofline_is_the_slower_of_memory_and_arithmetic():
    part = PARTS["sm_103"]
    assert roofline_us(part, int(part.bandwidth), 0, "bf16") == pytest.approx(1e6)
    assert roofline_us(part, 1, int(2 * part.fp4), "fp4") == pytest.approx(2e6)
