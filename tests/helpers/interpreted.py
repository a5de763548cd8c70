"""Run Triton implementations under Triton's interpreter, in a process of their own.

    returned, args = interpreted("k3compile.kernels.norm_triton", "rms_norm_triton", x, w, 1e-5)

TRITON_INTERPRET is read where a kernel is declared and changes Triton for its whole process, so this one is
left alone. The process starts at the first call and lives as long as the tests.
"""

import atexit
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import torch
from k3compile.kernels import OPS

HERE = Path(__file__).resolve().parent


class KernelFailed(Exception):
    """What went wrong on the other side, with its traceback."""


@functools.cache
def process():
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    started = subprocess.Popen(
        [sys.executable, str(HERE / "interpreter_process.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
    )
    atexit.register(end, started)
    return started


def end(started):
    started.stdin.close()
    started.wait(timeout=10)


def interpreted(module, name, *args):
    """What ``module.name(*args)`` returns and its arguments afterwards; ours are not changed."""
    other = process()
    pickle.dump((module, name, args), other.stdin)
    other.stdin.flush()
    returned, after, error = pickle.load(other.stdout)
    if error:
        raise KernelFailed(error)
    return returned, after


def double(args):
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


def flat(returned):
    return [] if returned is None else list(returned) if isinstance(returned, tuple) else [returned]


def outcome_of(name, args):
    """The Triton implementation of op ``name``: (what it returns, the written arguments)."""
    fn = OPS[name].implementations["triton"].fn
    returned, after = interpreted(fn.__module__, fn.__name__, *args)
    return flat(returned), written(name, after)


def written(name, args):
    parameters = [a.name for a in OPS[name].overload._schema.arguments]
    return [args[parameters.index(w)] for w in OPS[name].writes]


def meaning_of(name, args):
    """The same by the meaning, in float64."""
    wide = [a.clone() if isinstance(a, torch.Tensor) else a for a in double(args)]
    return flat(OPS[name].meaning(*wide)), written(name, wide)


def assert_close(name, got, want, dtype):
    """Every result within the op's own tolerance of the float64 one; integers are equal."""
    bound = OPS[name].tolerance.of(dtype)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        if not g.is_floating_point():
            assert torch.equal(g, w)
        elif g.numel():
            assert torch.isfinite(g).all(), "a value that was never written, or read where nothing is"
            error, size = (g.double() - w).abs().max(), w.abs().max()
            assert error <= bound * size, f"{name}: off by {error:.3g} of {size:.3g}"


def check_op(name, dtype, args):
    """One call against the float64 meaning: results, what it writes, and memory that is not its own."""
    got, left = outcome_of(name, args)
    want, expected = meaning_of(name, args)
    assert_close(name, [*got, *left], [*want, *expected], dtype)
    return got, left


def check_samples(name, dtype):
    """Every sample of an op."""
    for args in OPS[name].each_sample(dtype):
        check_op(name, dtype, args)
