"""The process behind :mod:`interpreted`: it calls implementations with Triton interpreted, one after another.

    stdin   pickled (module, attribute, args)      stdout  pickled (result, args as they are then, error)

New memory is NaN here, so that a kernel which leaves an element unwritten is seen.
"""

import pickle
import sys
import traceback
from importlib import import_module

import torch

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN, or with the largest integer
answers, sys.stdout = sys.stdout.buffer, sys.stderr


def answer(module, name, args):
    try:
        return getattr(import_module(module), name)(*args), args, None
    except Exception:  # told to the caller, which raises it
        return None, args, traceback.format_exc()


if __name__ == "__main__":
    import triton  # noqa: F401  before the shim
    import triton_shim  # noqa: F401

    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        pickle.dump(answer(*asked), answers)
        answers.flush()
