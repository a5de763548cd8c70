"""The export columns are read row by row, and everything that would spoil a state is refused by name."""

import pytest
import torch
from k3compile.kernels.exports import Export, exports_of


def columns(*pairs):
    """Both columns of (offset, slot) pairs."""
    offsets, slots = zip(*pairs) if pairs else ((), ())
    return torch.tensor(offsets, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)


def read(*pairs, slots=(1, 2, 3), bounds=(0, 5, 6, 80), count=9):
    return exports_of(*columns(*pairs), torch.tensor(slots, dtype=torch.int64), list(bounds), count)


def test_rows_with_an_offset_export_and_the_others_do_not():
    assert read((5, 4), (0, 99), (64, 8), (7, 7)) == [Export(0, 5, 4), Export(2, 64, 8)]


def test_entries_may_be_more_or_fewer_than_rows():
    assert read((2, 4)) == [Export(0, 2, 4)]
    assert read(*[(0, 0)] * 3, (999, 999)) == []
    assert read(slots=(), bounds=(0,)) == []
    assert read((3, 1), slots=(), bounds=(0,)) == []


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (((0, 0), (2, 4)), r"export_offset of row 1 is 2; the row has 1 tokens, so it must lie in 0\.\.1"),
        (((-1, 4),), r"export_offset of row 0 is -1; .* 0\.\.5"),
        (((1, 9),), r"export_slot of row 0 is 9; it must lie in 0\.\.8"),
        (((1, -1),), r"export_slot of row 0 is -1; it must lie in 0\.\.8"),
        (((1, 3),), "export_slot of row 0 is 3, where row 2 of this call keeps its state"),
        (((1, 1),), "export_slot of row 0 is 1, where row 0 of this call keeps its state"),
        (((1, 4), (0, 0), (9, 4)), "export_slot of row 2 is 4, to which row 0 exports as well"),
    ],
)
def test_what_would_spoil_a_state_is_refused_with_row_value_and_what_is_allowed(pairs, words):
    with pytest.raises(ValueError, match=words):
        read(*pairs)


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError, match="export_offset has 2 entries and export_slot 1"):
        exports_of(columns((1, 4), (1, 5))[0], columns((1, 4))[1], torch.tensor([1]), [0, 5], 9)
