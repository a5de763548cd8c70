"""One thread a test process, and no network: results and times do not depend on the machine's load."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

torch.set_num_threads(1)

TESTS = Path(__file__).resolve().parent
# `python -m pytest` puts the root on the path, where our folder passes for the package named `kernels`
sys.path[:] = [p for p in sys.path if Path(p).resolve() != TESTS.parent]
sys.path.append(str(TESTS / "helpers"))  # tests import each other's helpers by name

# Looking for cycles among all that torch and ten thousand tests have made takes its time: a fourth of the
# collection, a twentieth of what compiles.
gc.set_threshold(20_000, 20, 20)


def pytest_collection_finish(session):
    """What is there by now stays to the end: no test waits while it is looked through."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write golden files anew instead of comparing"
    )


@pytest.fixture
def update_golden(request):
    """Whether golden files are to be written anew: look at the diff before you commit them."""
    return request.config.getoption("--update-golden")
