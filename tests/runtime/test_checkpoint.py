"""Random checkpoints: one seed gives one set of bytes, a stopped run goes on, nobody's files are touched."""

import hashlib
import json
import re

import pytest
import torch
from k3compile.kernels.mxfp4 import unpack
from k3compile.runtime import checkpoint
from k3compile.runtime.checkpoint import MARKER, make_checkpoint
from k3compile.runtime.layout import expected_tensors
from k3compile.runtime.model import DecoderLayer
from k3compile.runtime.safetensors_dir import INDEX
from k3compile.runtime.tokenizer import Tokenizer
from k3compile.runtime.weights import load_model
from safetensors import safe_open
from small_models import Row, make_step

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"


def contents(path) -> dict[str, str]:
    files = (p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("k3") / "tiny")


def tensors_of(path) -> dict[str, torch.Tensor]:
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return found


def test_the_files_are_those_of_the_release(tiny):
    names = set(contents(tiny))
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    assert shards == [f"model-{i:05}-of-000004.safetensors" for i in range(1, 5)]
    assert names - set(shards) == {
        MARKER,
        "config.json",
        "generation_config.json",
        "hf-tokenizer/tokenizer.json",
        "hf-tokenizer/tokenizer_config.json",
        "model.safetensors.index.json",
        "tiktoken.model",
        "tokenizer_config.json",
    }
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 7_485_792
    assert all((p.stat().st_mode & 0o444) == 0o444 for p in tiny.iterdir() if p.is_file())


def test_names_shapes_and_dtypes_are_those_of_the_layout(tiny):
    stored = tensors_of(tiny)
    expected = expected_tensors(load_model(tiny).config)
    assert {name: (tuple(t.shape), t.dtype) for name, t in stored.items()} == expected
    for name, tensor in stored.items():
        if name.endswith("A_log"):
            assert tensor.shape == (128,)
            assert not tensor[8:].any()
            assert tensor[:8].all()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tiny, tmp_path):
    again = make_checkpoint(tmp_path / "again", "tiny", 0)
    other = make_checkpoint(tmp_path / "other", "tiny", 1)
    assert contents(again) == contents(tiny)
    changed = {name for name, digest in contents(other).items() if contents(tiny)[name] != digest}
    assert changed == {name for name in contents(tiny) if name.endswith(".safetensors")} | {MARKER}


def test_no_two_tensors_are_drawn_alike(tiny):
    stored = tensors_of(tiny)
    large = [
        hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).digest()
        for t in stored.values()
        if t.numel() > 64
    ]
    assert len(set(large)) == len(large)


def test_expert_matrices_have_the_spread_of_their_width(tiny):
    stored = tensors_of(tiny)
    matrix = unpack(stored[f"{EXPERT}_packed"], stored[f"{EXPERT}_scale"], torch.float64)
    assert matrix.shape == (256, 64)
    assert matrix.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert abs(matrix.mean().item()) < 0.005


def test_a_stopped_run_is_completed_to_the_same_bytes(tiny, tmp_path, monkeypatch):
    done = []

    def stop(line):
        done.append(line)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "k3", report=stop)
    with pytest.raises(ValueError):
        load_model(tmp_path / "k3")
    (tmp_path / "k3" / "model-00003-of-000004.safetensors.part").write_bytes(b"torn")
    second = []
    make_checkpoint(tmp_path / "k3", report=second.append)
    assert len(second) == 3
    assert contents(tmp_path / "k3") == contents(tiny)


def test_a_complete_one_is_left_alone(tiny):
    before = {p: p.stat().st_mtime_ns for p in tiny.glob("*.safetensors")}
    lines = []
    make_checkpoint(tiny, report=lines.append)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert len(lines) == 1


def test_other_peoples_directories_are_not_written_into(tiny, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    with pytest.raises(ValueError, match="not empty and was not made here"):
        make_checkpoint(tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    with pytest.raises(ValueError, match=re.escape('"seed": 0')):
        make_checkpoint(tiny, "tiny", 1)
    with pytest.raises(ValueError, match="there are tiny, small, tiny-linear"):
        make_checkpoint(tmp_path / "x", "huge")
    assert not (tmp_path / "x").exists()


def test_the_tokenizer_fits_the_model(tiny):
    tokenizer, config = Tokenizer(tiny), load_model(tiny).config
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.stop_id == config.eos_token_id
    assert tokenizer.control_ids["[BOS]"] == config.bos_token_id
    assert tokenizer.control_ids["[PAD]"] == config.pad_token_id
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    named = {entry["content"]: int(index) for index, entry in settings["added_tokens_decoder"].items()}
    assert named == dict(tokenizer.control_ids)
    plain = {entry["content"] for entry in settings["added_tokens_decoder"].values() if not entry["special"]}
    assert plain == {"<|open|>", "<|close|>", "<|sep|>"}
    assert json.loads((tiny / "generation_config.json").read_text())["eos_token_id"] == config.eos_token_id


def test_greedy_text_goes_on_and_activations_and_experts_are_sane(tiny):
    model, largest, chosen = load_model(tiny), [], []

    def layer(block, p, blocks, pools, step):
        p = DecoderLayer.forward(block, p, blocks, pools, step)
        largest.append(p.abs().max().item())
        return p

    for block in model.layers[1:]:
        block.ffn.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1].flatten()))
    pools, tokens, out, seen = (
        model.make_pools(2, 4, 64),
        Tokenizer(tiny).encode("Hello, how are you?"),
        [],
        0,
    )
    with torch.no_grad():
        for _ in range(60):
            hidden, _ = model(make_step([Row(tokens, 1, seen, [1, 2, 3])]), pools, layer=layer)
            seen += len(tokens)
            tokens = [int(model.logits(hidden[-1]).argmax())]
            out += tokens
    assert len(set(out)) > 30
    assert 0.5 < max(largest) < 50
    share = torch.bincount(torch.cat(chosen), minlength=8) / torch.cat(chosen).numel()
    assert share.max() < 0.3
    assert share.min() > 0.02


def test_a_checkpoint_without_its_index_has_no_configuration_either(tmp_path, monkeypatch):
    def write(path, value):
        if path.name == INDEX:
            raise KeyboardInterrupt
        return real(path, value)

    real = checkpoint.write_json
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", write)
        with pytest.raises(KeyboardInterrupt):
            make_checkpoint(tmp_path / "made", "tiny-linear")
    assert not (tmp_path / "made" / "config.json").exists()
    assert (make_checkpoint(tmp_path / "made", "tiny-linear") / "config.json").exists()
