"""The table of GPUs."""

import pytest

from k3compile.planning.gpus import GPUS, gpu_named


def test_the_four_gpus_have_the_memory_of_their_makers():
    sizes = {name: gpu.memory // 10**9 for name, gpu in GPUS.items()}
    assert sizes == {"b300": 288, "b200": 180, "h200": 141, "mi355x": 288}
    assert all(gpu.per_node == 8 and gpu.source and gpu.name == name for name, gpu in GPUS.items())


def test_a_name_is_taken_in_any_case_and_an_unknown_one_is_refused_with_the_nearest():
    assert gpu_named("B300") is GPUS["b300"]
    with pytest.raises(ValueError, match=r"no figures for gpu 'h20' \(did you mean 'h200'\?\); known: b300"):
        gpu_named("h20")
