"""The batch of a dry run: its sizes add up, and what is no batch is refused."""

import pytest

from k3compile.dry_run.mix import Mix, Rows, rows_of


def test_sizes_are_those_of_the_step():
    sizes = Mix(Rows(3, 8), 8, Rows(1, 32), context=4096, page_size=64).sizes(snapshots=2)
    assert [sizes[f"step.spans[{i}]"] for i in range(3)] == [24, 8, 32]
    assert sizes["p.0"] == sizes["step.tokens.0"] == 64
    assert (sizes["step.cu_verify.0"], sizes["step.cu_other.0"]) == (4, 10)
    assert sizes["step.pages.0"] == 12
    assert sizes["step.pages.1"] == 65  # 4096 tokens before and 32 rows
    assert sizes["hidden.0"] == 24 + 8 + 1
    assert sizes["blocks.0"] == 2


def test_a_class_may_be_empty():
    mix = Mix(Rows(0, 0), 256, Rows(0, 0))
    assert (mix.tokens, mix.requests, mix.drafts, mix.max_requests) == (256, 256, 0, 256)
    assert mix.sizes(0)["step.cu_verify.0"] == 1
    assert str(mix) == "256 rows: 256 decodes; each request has seen 4096 tokens"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decode": -1}, "decode is -1: give 0 or more"),
        ({"prefill": Rows(2, 1)}, "prefill is 2x1: a row alone is a decode"),
        ({"verify": Rows(-1, 8)}, "verify is -1x8"),
        ({"page_size": 0}, "page_size is 0: give 1 or more"),
        ({"verify": Rows(0, 0), "decode": 0, "prefill": Rows(0, 0)}, "the step holds no row"),
    ],
)
def test_what_is_no_batch_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Mix(**given)


@pytest.mark.parametrize(("text", "rows"), [("3x8", Rows(3, 8)), ("32", Rows(1, 32)), ("0", Rows(0, 0))])
def test_rows_are_read(text, rows):
    assert rows_of(text, "--verify") == rows


@pytest.mark.parametrize("text", ["", "x", "3x", "3x8x1", "-1", "3*8"])
def test_other_words_are_refused_by_the_options_name(text):
    with pytest.raises(ValueError, match=r"--verify is .* expected REQUESTSxROWS"):
        rows_of(text, "--verify")
