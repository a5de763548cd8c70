"""One thread a test process, and no network: results and times do not depend on the machine's load."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

torch.set_num_threads(1)

sys.path.append(str(Path(__file__).parent / "helpers"))  # tests import each other's helpers by name
