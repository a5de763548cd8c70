"""A plan in words: at most a hundred columns, and as it was when somebody last read it."""

import io

import pytest
from k3compile.runtime.engine_config import EngineConfig
from rich.console import Console

from k3compile.planning.gpus import GPUS
from k3compile.planning.plan import Question, make_plan
from k3compile.planning.released import read_model
from k3compile.planning.render import WIDTH, figure, flag, holders, show, text_of, wrapped
from k3compile.planning.report import as_values


def printed(tp: int, **engine) -> str:
    question = Question(read_model("kimi-k3"), GPUS["b300"], tp, EngineConfig(**engine))
    out = io.StringIO()
    show(Console(file=out, width=WIDTH, highlight=False), as_values(make_plan(question), [], "kimi-k3", {}))
    return out.getvalue()


def test_what_is_off_is_not_spoken_of():
    text, _, command = printed(8).partition("serve it with")
    assert "drafts" not in text
    assert "--num-drafts 0" in command  # a server may have a default of its own
    assert "prefixes" not in text
    assert "requests that fit whole" in text


def test_what_stands_in_the_way_comes_first_and_nothing_after_it_pretends():
    lines = printed(4).splitlines()
    assert lines[0].endswith("does not fit")
    assert "nothing is left for pools" in " ".join(lines[1:3])
    assert not [line for line in lines if "serve it with" in line or "requests that fit" in line]
    assert any(line.startswith("missing") for line in lines)


def test_a_step_that_has_no_row_for_all_says_how_many_run():
    text = printed(8, max_num_seqs=64, num_drafts=8, max_num_batched_tokens=256, long_prefill_tokens=16)
    assert "at most 32 requests run at once" in text


def test_a_command_is_cut_as_a_shell_takes_it():
    lines = wrapped(["torchrun", *[f"--flag-{n} value" for n in range(20)]])
    assert all(len(line) <= WIDTH for line in lines)
    assert all(line.endswith(" \\") for line in lines[:-1])
    joined = " ".join(line.rstrip(" \\").strip() for line in lines)
    assert joined == "torchrun " + " ".join(f"--flag-{n} value" for n in range(20))


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (27_650, "27.65 KB"), (56_171_520, "56.17 MB"), (27.3e9, "27.30 GB")]
)
def test_sizes_have_a_unit(size, text):
    assert text_of(size) == text


def test_small_figures_have_more_digits_and_holders_are_words():
    assert (figure(0.0123), figure(0), figure(1446.456)) == ("0.012", "0.00", "1,446.46")
    assert [holders(n, 8) for n in (1.0, 8.0, 1.46)] == [
        "dealt out",
        "every rank",
        "dealt out but for a part: 1.46 copies",
    ]
    assert flag("max_num_seqs", 3) == "--max-num-seqs 3"
    assert flag("state_replay", True) == "--features ...,state_replay"
