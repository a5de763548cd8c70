"""The peak is the peak of the block, not of the process."""

import json
import subprocess
import sys

SIZE = 64 << 20
SCRIPT = f"""
import json
from k3compile.bench.memory import peak_since
size = {SIZE}
bytes(b"x") * (4 * size)
with peak_since() as before:
    pass
with peak_since() as peak:
    bytes(b"x") * size
with peak_since() as after:
    pass
print(json.dumps([before.bytes, peak.bytes, after.bytes]))
"""


def test_memory_that_was_freed_still_counts_and_what_came_before_does_not():
    # In a process of its own: threads that other tests left behind free memory in the meantime.
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, peak, after = json.loads(done.stdout)
    assert SIZE * 0.9 < peak - before < SIZE * 1.5
    assert after < peak - SIZE * 0.9
