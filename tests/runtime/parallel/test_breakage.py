"""What a backend says of a collective that broke off, and what else a rank may say."""

import pytest
import torch
import torch.distributed as dist
from k3compile.runtime.parallel.breakage import broke_off, in_words


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:2"
        ),
        RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:425]\nop.preamble.length <= op.nbytes"),
        RuntimeError("Application timeout caused pair closure (ProcessGroupGloo)"),
        RuntimeError("Broken pipe\nat gloo/transport/tcp/pair.cc:425"),
        dist.DistBackendError("NCCL communicator was aborted on rank 0."),
        dist.DistNetworkError("recvValue failed on SocketImpl(fd=5, addr=[localhost]:1)"),
    ],
)
def test_a_backends_words_say_only_that_it_broke_off(error):
    assert broke_off(f"run failed on rank 0: {in_words(error)}")


@pytest.mark.parametrize(
    "said",
    [
        None,
        "run failed on rank 0: ValueError: use gloo",
        "run failed on rank 0: RuntimeError: no kernel",
        "rank 1 is gone: its process 7 has ended (run)",
        "run of 4 rows has taken 8.0 s on rank 0, last collective 3: allreduce_",
        in_words(torch.OutOfMemoryError("gloo has no part in it")),
    ],
)
def test_whatever_else_went_wrong_explains_itself(said):
    assert not broke_off(said)
