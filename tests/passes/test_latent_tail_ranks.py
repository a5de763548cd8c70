"""On two ranks, each with half of the experts, the op gives what one rank gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.mark.slow
@pytest.mark.tp
def test_two_ranks_with_holes_for_each_other_add_up_to_one(tmp_path):
    made = subprocess.run(
        [sys.executable, str(HELPERS / "tail_on_two_ranks.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    assert "summed over group 0" in made.stdout
