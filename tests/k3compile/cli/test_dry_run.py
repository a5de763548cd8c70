"""`k3 dry-run`: the released model on eight ranks, without its weights, in seconds and under 8 GiB."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3compile.cli.dry_run import chosen
from k3compile.cli.main import main

CONFIG = "tests/data/kimi-k3-config.json"
GOLDEN = Path(__file__).parents[1] / "goldens" / "dry-run-kimi-k3-tp8.txt"
ALL = "all" if os.environ.get("K3_ACCEPT") else "0,3,7"
GIB, MINUTES = 2**30, 60


def k3(*arguments):
    """What the command prints, and its exit code, in a process of its own."""
    command = [sys.executable, "-m", "k3compile.cli.main", "dry-run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["dry-run", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def released():
    done = k3(CONFIG, "--tp", "8", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def step(found, measure):
    return tuple(found["step"][moment].get(measure, 0) for moment in ("before", "after"))


@pytest.mark.slow
def test_the_three_passes_fire_on_all_93_layers(released):
    assert released["layers"] == 93
    assert step(released, "rows") == (552, 0)  # 69 KDA layers x 8
    assert step(released, "finalizes") == (92, 0)
    assert step(released, "tails") == (0, 92)
    assert step(released, "exports") == (0, 138)  # a state and a window of each of 69 layers
    sites = {
        name: sum(part["applied"][name] * part["layers"] for part in released["parts"])
        for name in ("contiguous_views", "latent_tail", "state_export")
    }
    assert sites == {"contiguous_views": 552, "latent_tail": 92, "state_export": 138}
    assert not any(reasons for part in released["parts"] for reasons in part["missed"].values())


@pytest.mark.slow
def test_279_sums_and_a_gather_before_the_tails_take_theirs(released):
    assert step(released, "all_reduce") == (279, 95)
    assert step(released, "all_gather_into_tensor") == (1, 1)
    assert step(released, "collectives") == (280, 95 + 1 + 92 * 3)  # 64 rows: the tier that gathers


@pytest.mark.slow
def test_bytes_of_collectives_follow_from_the_widths(released):
    rows, latent, width, half = 64, 3584, 7168, 2
    logits = 33 * 163840 // 8 * half
    before, after = step(released, "collective_bytes")
    assert before == (187 * width + 92 * latent) * rows * half + logits
    gathered = 92 * rows * width // 8 * half  # the fused tier gathers what each rank projected
    assert after == before + gathered


@pytest.mark.slow
def test_every_cost_falls(released):
    for measure in ("launches", "allocations", "allocated_bytes", "bytes_read", "bytes_written"):
        before, after = step(released, measure)
        assert after < before, measure
    assert all(part["peak_bytes"][1] <= part["peak_bytes"][0] for part in released["parts"])


@pytest.mark.slow
def test_it_takes_minutes_at_most_and_far_less_than_8_gib(released):
    print(f"{released['seconds']:.1f} s, {released['peak_rss_bytes'] / GIB:.2f} GiB")
    assert released["peak_rss_bytes"] < 8 * GIB
    assert released["seconds"] < 10 * MINUTES


@pytest.mark.slow
def test_the_report_is_the_golden_one_and_ranks_are_alike(update_golden):
    done = k3(CONFIG, "--tp", "8", "--ranks", ALL)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = ", ".join(map(str, chosen(ALL, 8)))
    same = f"ok    ranks {ranks} run the same graphs of layers and make the same collectives\n"
    shown, evidence = done.stdout.split("\ngraph of ", 1)
    assert same in shown
    assert evidence.count("graph of ") == 5
    shown = shown.replace(same, "")
    if update_golden:
        GOLDEN.write_text(shown)
    assert shown == GOLDEN.read_text()


@pytest.mark.slow
def test_the_released_model_in_context_groups_of_eight():
    done = k3(CONFIG, "--tp", "8", "--dcp", "8", "--ranks", "0,7", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert step(found, "all_to_all_single") == (24, 24)
    assert step(found, "all_gather_into_tensor") == (25, 25)
    assert step(found, "rows") == (552, 0)


@pytest.mark.slow
def test_a_missing_rewrite_is_exit_code_1_unless_it_is_allowed():
    tiny = "k3compile/data/k3-tiny"
    broken = k3(tiny, "--tp", "2", "--disable", "latent_tail")
    assert broken.returncode == 1, broken.stderr
    assert "WRONG finalize kernels after: 8, expected 0" in broken.stdout
    assert k3(tiny, "--tp", "2", "--disable", "latent_tail", "--no-require").returncode == 0


def test_what_ranks_cannot_share_is_refused(capsys):
    said = refused(capsys, CONFIG, "--tp", "5")
    assert "num_attention_heads is 96, and 5 ranks need a multiple of 5" in said
    assert "moe_intermediate_size is 3072, and 5 ranks need a multiple of 160" in said
    assert "dcp is 3, and must divide tp 8" in refused(capsys, CONFIG, "--tp", "8", "--dcp", "3")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.json",), "there is no such file"),
        ((CONFIG, "--disable", "latent_tial"), "did you mean 'latent_tail'?"),
        ((CONFIG, "--verify", "3by8"), "--verify is '3by8'"),
        ((CONFIG, "--ranks", "0-7"), "--ranks is '0-7'"),
        ((CONFIG, "--tp", "8", "--ranks", "8"), "8 ranks are numbered 0 to 7"),
    ],
)
def test_a_slip_is_one_line(capsys, arguments, said):
    found = refused(capsys, *arguments)
    assert said in found
    assert len(found.splitlines()) == 1


def test_ranks_are_all_or_a_list():
    assert chosen("all", 3) == (0, 1, 2)
    assert chosen("7, 0,7", 8) == (7, 0)
