"""Dry runs in a process of their own, since they make process groups; a script for tests.

python dry_runs.py tiny no_views        prints {name: {"found": ..., "text": ...}} as JSON
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from k3compile.runtime.config import K3Config
from small_models import SMALL, SMALL_LINEAR

TINY = Path(__file__).parents[2] / "k3compile" / "data" / "k3-tiny"
HEADS = {"num_attention_heads": 8, "kda_num_heads": 8, "intermediate_size": 64}
THIN = dataclasses.replace(
    SMALL, num_hidden_layers=4, kda_layers=(0, 1, 2), moe_intermediate_size=256, **HEADS
)
LINEAR = dataclasses.replace(SMALL_LINEAR, num_hidden_layers=4, moe_intermediate_size=64, **HEADS)


def main(names: list[str]) -> None:
    from k3compile.dry_run.run import DryRun, dry_run
    from k3compile.dry_run.text import text

    every = tuple(range(8))
    cases = {
        "tiny": (K3Config.from_file(TINY), DryRun(8)),
        "tiny_some": (K3Config.from_file(TINY), DryRun(8, ranks=(0, 3, 7))),
        "tiny_all": (K3Config.from_file(TINY), DryRun(8, ranks=every)),
        "tiny_dcp_some": (K3Config.from_file(TINY), DryRun(8, 2, ranks=(0, 7))),
        "tiny_dcp_all": (K3Config.from_file(TINY), DryRun(8, 2, ranks=every)),
        "thin_dcp": (THIN, DryRun(8, 8, ranks=(0, 7))),
        "linear": (LINEAR, DryRun(4)),
        "no_views": (THIN, DryRun(8, disable=("contiguous_views",))),
        "no_tail": (THIN, DryRun(8, disable=("latent_tail",))),
        "no_export": (THIN, DryRun(8, disable=("state_export",))),
    }
    found = {name: dry_run(*cases[name]) for name in names}
    print(json.dumps({name: {"found": one.to_json(), "text": text(one)} for name, one in found.items()}))


def ran(*names: str) -> dict[str, dict]:
    """What ``main`` prints for these cases."""
    command = [sys.executable, __file__, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
