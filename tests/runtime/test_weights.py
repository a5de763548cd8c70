"""A checkpoint is loaded to the value, or refused with everything that is wrong with it."""

import dataclasses
import json
import logging
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from broken_checkpoints import edit_config, edit_index, edit_shard, edit_tensor, merge_shards, shard_of
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.layout import entries
from k3compile.runtime.presets import PRESETS
from k3compile.runtime.weights import SHOWN, CheckpointError, load_model
from safetensors.torch import load_file, save_file

LAYER = "language_model.model.layers"
HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
A_LOG = f"{LAYER}.0.self_attn.A_log"
PACKED = f"{LAYER}.1.block_sparse_moe.experts.3.w1.weight_packed"
SCALE = f"{LAYER}.1.block_sparse_moe.experts.3.w1.weight_scale"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("k3") / "tiny")


@pytest.fixture(scope="module")
def tiny_linear(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("linear") / "tiny-linear", "tiny-linear")


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "copy")


def refused(path, **options) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, **options)
    return caught.value.problems


@pytest.mark.parametrize("which", ["tiny", "tiny_linear"])
def test_every_value_of_the_files_is_in_the_model(which, request):
    path = request.getfixturevalue(which)
    model = load_model(path, torch.float32)
    parameters = dict(model.named_parameters())
    stored = {}
    for file in path.glob("*.safetensors"):
        stored |= load_file(file)
    for entry in entries(model.config):
        part = parameters[entry.parameter]
        part = part.flatten() if entry.index is None else part[entry.index].flatten()
        values = stored[entry.name].flatten()[: part.numel()]
        assert torch.equal(part, values.to(part.dtype)), entry.name
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters() if p.is_floating_point())


def test_experts_stay_packed_and_float32_tensors_keep_their_precision(tiny):
    model = load_model(tiny, torch.bfloat16)
    assert model.layers[1].ffn.experts.w1.dtype == torch.uint8
    assert model.layers[0].self_attn.o_proj.weight.dtype == torch.bfloat16
    for tensor in (model.layers[0].self_attn.a_log, model.layers[0].self_attn.conv_weight):
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, tensor.bfloat16().float())


def test_one_file_without_an_index_loads_the_same(tiny, copy):
    merge_shards(copy)
    for a, b in zip(load_model(tiny).parameters(), load_model(copy).parameters()):
        assert torch.equal(a, b)


def test_the_vision_tower_is_skipped_counted_and_logged_once(copy, caplog):
    vision = {f"vision_tower.block.{i}.weight": torch.zeros(2) for i in range(5)}
    vision["mm_projector.proj.0.weight"] = torch.zeros(2)
    save_file(vision, copy / "model-vision.safetensors")
    edit_index(copy, lambda weight_map: weight_map.update(dict.fromkeys(vision, "model-vision.safetensors")))
    with caplog.at_level(logging.INFO, logger="k3compile.runtime.weights"):
        load_model(copy)
    assert [r.message for r in caplog.records] == [
        "skipped 6 tensors of the vision tower and its projector: text only"
    ]


def test_missing_and_unknown_tensors_are_named(copy):
    edit_shard(shard_of(copy, PACKED), lambda tensors: tensors.update(stray=tensors.pop(PACKED)))
    edit_index(copy, lambda weight_map: weight_map.update(stray=weight_map.pop(PACKED)))
    found = refused(copy)
    assert f"{PACKED} [256, 32] is missing" in found
    assert any(line.startswith("stray in model-") and "not a tensor of this model" in line for line in found)
    assert len(found) == 2


def test_shapes_and_dtypes_are_compared(copy):
    edit_tensor(copy, f"{LAYER}.0.self_attn.dt_bias", lambda tensor: tensor.bfloat16())
    edit_tensor(copy, f"{LAYER}.0.self_attn.b_proj.weight", lambda tensor: tensor[:4])
    assert refused(copy) == [
        f"{LAYER}.0.self_attn.dt_bias is torch.bfloat16, and must be torch.float32",
        f"{LAYER}.0.self_attn.b_proj.weight has shape [4, 128], and must have [8, 128]",
    ]


def test_many_problems_are_all_kept_and_the_text_says_how_many_are_not_shown(copy):
    edit_config(copy, lambda raw: raw["text_config"].update(hidden_size=256))
    with pytest.raises(CheckpointError, match=r"and \d+ more") as caught:
        load_model(copy)
    assert len(caught.value.problems) > SHOWN


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (A_LOG, lambda t: t.index_fill(0, torch.tensor(100), 0.5), "must be zero past its first 8 values"),
        (A_LOG, lambda t: t.index_fill(0, torch.tensor(3), float("nan")), "holds NaN or infinity"),
        (EMBEDDING, lambda t: t.index_fill(0, torch.tensor(9), float("inf")), "holds NaN or infinity"),
        (SCALE, lambda t: t.index_fill(0, torch.tensor(5), 255), "scale byte 255"),
        (SCALE, lambda t: t.index_fill(0, torch.tensor(5), 0), "scale byte 0"),
        (SCALE, lambda t: t + 12, "implausible"),
        (SCALE, lambda t: t - 40, "implausible"),
    ],
)
def test_values_that_no_trained_model_has_are_refused_by_name(copy, name, change, message):
    edit_tensor(copy, name, change)
    (problem,) = refused(copy)
    assert problem.startswith(name)
    assert message in problem


def test_problems_with_values_come_together_too(copy):
    edit_tensor(copy, SCALE, lambda tensor: torch.zeros_like(tensor))
    edit_tensor(copy, A_LOG, lambda tensor: tensor + 1)
    assert len(refused(copy)) == 2


def test_a_bad_configuration_is_refused_before_any_file_is_read(copy):
    edit_config(copy, lambda raw: raw["text_config"].update(topk_method="greedy"))
    for file in copy.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="topk_method"):
        load_model(copy)


def test_dense_experts_are_told_by_their_names_not_by_the_configuration(tiny_linear, tmp_path):
    copy = shutil.copytree(tiny_linear, tmp_path / "copy")
    k3 = json.loads((make_checkpoint(tmp_path / "k3") / "config.json").read_text())
    edit_config(copy, lambda raw: raw.update(quantization_config=k3["text_config"]["quantization_config"]))
    assert not load_model(copy).config.experts_packed


@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("head", ["different", "equal", "absent"])
def test_the_head_is_never_dropped_and_never_invented(copy, outer, inner, head, caplog):
    def set_flags(raw):
        for holder, flag in ((raw, outer), (raw["text_config"], inner)):
            holder.pop("tie_word_embeddings")
            if flag is not None:
                holder["tie_word_embeddings"] = flag

    edit_config(copy, set_flags)
    embedding = load_file(shard_of(copy, EMBEDDING))[EMBEDDING]
    if head == "equal":
        edit_tensor(copy, HEAD, lambda tensor: embedding)
    if head == "absent":
        edit_shard(shard_of(copy, HEAD), lambda tensors: tensors.pop(HEAD))
        edit_index(copy, lambda weight_map: weight_map.pop(HEAD))
    tied = outer if inner is None else inner
    if not tied and head == "absent":
        assert refused(copy) == [f"{HEAD} [1024, 128] is missing"]
    else:
        model = load_model(copy)
        used = model.embed_tokens if model.lm_head is None else model.lm_head.weight
        stored = load_file(shard_of(copy, HEAD))[HEAD] if head != "absent" else embedding
        assert torch.equal(used, stored.float())
        assert (model.lm_head is None) == bool(tied and head != "different")
        assert ("has a head of its own" in caplog.text) == bool(tied and head == "different")


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.slow
def test_memory_peaks_at_the_part_of_a_rank_and_little_more(wide, ranks):
    """Counts the process's own memory, not mapped file pages, which the system may drop at any time."""
    done = python(MEASURE, str(wide), str(ranks))
    assert done.returncode == 0, done.stderr
    resident, peak = map(int, done.stdout.split())
    assert resident > 30e6
    assert peak < 1.1 * resident


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    size = dataclasses.replace(PRESETS["tiny"], hidden=512, dense_width=32768, shard_bytes=1 << 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "wide", size)
        return make_checkpoint(tmp_path_factory.mktemp("wide") / "wide", "wide")


def python(code: str, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


MEASURE = """
    import sys, threading, time
    import torch
    from k3compile.runtime.weights import load_model
    from k3compile.runtime.parallel.ranks import Ranks

    def private() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    peak, done = 0, False

    def watch():
        global peak
        while not done:
            peak = max(peak, private())
            time.sleep(0.002)

    before = private()
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(sys.argv[1], torch.float32, ranks=Ranks(0, int(sys.argv[2]), ""))
    done = True
    watcher.join()
    resident = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    print(resident, peak - before)
"""
