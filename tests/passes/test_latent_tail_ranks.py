"""On several ranks, each with a part of the experts, every tier gives what one gives, under any compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
BY_ROWS = "computed by tiers, tier by token count: fused <= 128, overlap <= 256, column beyond"


def said_on(ranks, inner, folder):
    """What rank 0 was told: (dtype, the tier that was asked for) -> reasons."""
    made = subprocess.run(
        [sys.executable, str(HELPERS / "tail_on_ranks.py"), str(ranks), inner, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    lines = (json.loads(line) for line in made.stdout.splitlines() if line.startswith("["))
    return {(dtype.removeprefix("torch."), tier): said for dtype, tier, said in lines}


@pytest.mark.slow
@pytest.mark.tp
@pytest.mark.parametrize(("ranks", "inner"), [(2, "aot_eager"), (4, "eager")])
def test_ranks_with_holes_for_each_other_add_up_to_one(ranks, inner, tmp_path):
    said = said_on(ranks, inner, tmp_path)
    assert len(said) == 6
    for (_, tier), reasons in said.items():
        assert reasons == [BY_ROWS if tier == "auto" else f"computed by {tier}"]


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.tp
def test_under_inductor_the_op_stays_one_call_on_two_ranks(tmp_path):
    assert said_on(2, "inductor", tmp_path) == {("float32", "auto"): [BY_ROWS]}
