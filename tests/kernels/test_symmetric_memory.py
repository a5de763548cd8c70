"""What torch's symmetric memory is asked for; its kernels themselves need GPUs."""

import torch
from k3compile.kernels import symmetric_memory


def test_a_buffer_is_made_and_mapped_once_and_again_for_another_size(monkeypatch):
    calls = []
    monkeypatch.setattr(
        symmetric_memory.symm_mem,
        "empty",
        lambda n, dtype, device: calls.append(("empty", n)) or torch.empty(n, dtype=dtype, device=device),
    )
    monkeypatch.setattr(
        symmetric_memory.symm_mem,
        "rendezvous",
        lambda made, group: calls.append(("rendezvous", made.numel(), group)),
    )
    symmetric_memory.shared_buffer.cache_clear()
    try:
        first = symmetric_memory.shared_buffer("tp", 8, torch.bfloat16, torch.device("cpu"))
        assert symmetric_memory.shared_buffer("tp", 8, torch.bfloat16, torch.device("cpu")) is first
        symmetric_memory.shared_buffer("tp", 9, torch.bfloat16, torch.device("cpu"))
    finally:
        symmetric_memory.shared_buffer.cache_clear()
    assert calls == [("empty", 8), ("rendezvous", 8, "tp"), ("empty", 9), ("rendezvous", 9, "tp")]


def test_torch_has_the_kernel_under_this_name_with_these_arguments():
    schema = str(torch.ops.symm_mem.one_shot_all_reduce.default._schema)
    assert schema == "symm_mem::one_shot_all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor"
