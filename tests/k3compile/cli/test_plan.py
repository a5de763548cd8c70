"""The verb's answers for the four GPUs, as they were last read, its exit codes and its JSON."""

import json
from pathlib import Path

import pytest

from k3compile.cli.main import main
from k3compile.cli.plan import bytes_of

GOLDENS = Path(__file__).parent.parent / "goldens"
RELEASED = str(Path(__file__).parent.parent.parent / "data" / "kimi-k3-config.json")
K3 = ("--model", "kimi-k3")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


@pytest.mark.parametrize(("gpu", "code"), [("b300", 0), ("b200", 1), ("h200", 1), ("mi355x", 0)])
def test_kimi_k3_with_its_draft_on_eight_gpus_is_answered_as_when_it_was_last_read(
    gpu, code, capsys, update_golden
):
    got, out, _ = run(capsys, *K3, "--gpu", gpu, "--tp", "8", "--draft", "released")
    lines = [line.rstrip() for line in out.splitlines()]
    assert got == code
    assert max(map(len, lines)) <= 100
    golden = GOLDENS / f"plan_{gpu}.txt"
    if update_golden:
        golden.write_text("\n".join(lines) + "\n")
    assert lines == golden.read_text().splitlines()


@pytest.mark.slow
def test_a_misfit_and_all_that_would_fit_are_answered_as_when_they_were_last_read(capsys, update_golden):
    code, out, _ = run(capsys, *K3, "--gpu", "b300", "--max-model-len", "1048576")
    lines = [line.rstrip() for line in out.splitlines()]
    assert code == 1
    golden = GOLDENS / "plan_long.txt"
    if update_golden:
        golden.write_text("\n".join(lines) + "\n")
    assert lines == golden.read_text().splitlines()
    for flags in ("--max-model-len 444544", "--dcp 4", "--tp 16"):
        assert flags in out
        asked = ["--gpu", "b300", "--max-model-len", "1048576", *flags.split()]
        assert run(capsys, *K3, *asked)[0] == 0


def test_json_says_the_same(capsys):
    code, out, _ = run(capsys, "--model", RELEASED, "--gpu", "b300", "--json")
    found = json.loads(out)
    assert (code, found["fits"], found["tp"]) == (0, True, 8)
    assert found["collectives"]["all_reduces"] == 279
    text = run(capsys, "--model", RELEASED, "--gpu", "b300")[1]
    for number in (found["pools"]["tokens"], found["pools"]["pages"], found["pools"]["checkpoints"]):
        assert f"{number:,}" in text
    assert str(found["memory"]["room"]) in text


def test_what_cannot_be_dealt_out_is_said_with_the_nearest_that_can(capsys):
    code, out, _ = run(capsys, *K3, "--gpu", "b300", "--tp", "7")
    assert code == 1
    assert "num_attention_heads is 96, and 7 ranks need a multiple of 7" in out
    assert "--tp 8" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*K3, "--gpu", "b30"), "no figures for gpu 'b30'"),
        (("--model", "kimi-k9", "--gpu", "b300"), "no model 'kimi-k9'"),
        ((*K3, "--gpu", "b300", "--reserve", "much"), "reserve is 'much'"),
        ((*K3, "--gpu", "b300", "--max-num-seqs", "0"), "max_num_seqs must be at least 1"),
        ((*K3, "--gpu", "b300", "--dtype", "float16"), "dtype is 'float16'"),
        ((*K3, "--gpu", "b300", "--draft", "released", "--num-drafts", "9"), "proposes 1 to 7"),
        ((*K3, "--gpu", "b300", "--features", "adaptive"), "unknown feature 'adaptive'"),
        (K3, "--gpu"),
    ],
)
def test_misuse_is_one_line_and_code_2(arguments, said, capsys):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_checkpoint_folder_brings_its_own_draft(capsys):
    from k3compile.cli.loading import SHIPPED

    _, plain, _ = run(capsys, "--model", str(SHIPPED), "--gpu", "h200", "--json")
    _, drafting, _ = run(capsys, "--model", str(SHIPPED), "--gpu", "h200", "--num-drafts", "3", "--json")
    assert (json.loads(plain)["draft"], json.loads(drafting)["draft"]) == (False, True)


def test_features_choose_the_budget_and_the_states_of_drafts(capsys):
    asked = ("--gpu", "b300", "--num-drafts", "7", "--json", "--max-num-seqs", "16")
    default = json.loads(run(capsys, *K3, *asked)[1])
    older = json.loads(run(capsys, *K3, *asked, "--features", "baseline")[1])
    assert (default["pools"]["slots_per_request"], older["pools"]["slots_per_request"]) == (1, 8)
    assert (default["budget"]["alone"], older["budget"]["alone"]) == (16384 - 6, 16384 - 16 * 6)


@pytest.mark.parametrize(
    ("text", "size"), [("8000", 8000), ("8GB", 8 * 10**9), ("7.5 GiB", 7.5 * 2**30), ("1mib", 2**20)]
)
def test_a_reserve_is_bytes_or_has_a_unit(text, size):
    assert bytes_of(text) == size
