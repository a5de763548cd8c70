"""A rank reads its part of every tensor and nothing else, to the value, and the parts make the model."""

import shutil
from collections import defaultdict

import pytest
import torch
from broken_checkpoints import edit_tensor
from draft_reference import small_draft, small_draft_json
from k3compile.runtime import safetensors_dir, weights
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.config import K3Config
from k3compile.runtime.parallel.ranks import Ranks
from k3compile.runtime.parallel.sharding import DRAFT, TARGET, part_of, split_of
from k3compile.runtime.speculate.dspark_checkpoint import write_draft
from k3compile.runtime.speculate.dspark_weights import load_draft, tensors_of
from k3compile.runtime.weights import CheckpointError, load_model
from lanes import thinned

LAYER = "language_model.model.layers"
HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
A_LOG = f"{LAYER}.0.self_attn.A_log"
W2 = f"{LAYER}.1.block_sparse_moe.experts.3.w2.weight_packed"
W1_SCALE = f"{LAYER}.1.block_sparse_moe.experts.3.w1.weight_scale"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: make_checkpoint(tmp_path_factory.mktemp(name) / name, name) for name in ("tiny", "tiny-linear")
    }


@pytest.fixture
def copy(folders, tmp_path):
    return shutil.copytree(folders["tiny"], tmp_path / "copy")


def same_parts(whole, part, table, ranks) -> None:
    for (name, full), (other, local) in zip(whole.named_parameters(), part.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(part_of(full, split_of(table, name), ranks), local), name


PARTS = [("tiny", 2), ("tiny-linear", 4), ("tiny", 8)]


@pytest.mark.parametrize(("preset", "n"), thinned(PARTS, 1, several=True))
def test_each_rank_has_its_part_of_every_value(folders, preset, n):
    whole = load_model(folders[preset], torch.float32, torch.bfloat16)
    for rank in range(n):
        ranks = Ranks(rank, n, "")
        same_parts(
            whole, load_model(folders[preset], torch.float32, torch.bfloat16, ranks=ranks), TARGET, ranks
        )


def test_each_rank_has_its_part_of_the_draft(folders, tmp_path):
    folder, target = tmp_path / "draft", K3Config.from_file(folders["tiny"])
    embedding = load_model(folders["tiny"]).embed_tokens
    model = small_draft(target, num_attention_heads=8, num_key_value_heads=8)
    write_draft(
        folder,
        small_draft_json(target, num_attention_heads=8, num_key_value_heads=8),
        tensors_of(model, embedding),
    )
    whole = load_draft(folder, target)
    for rank in range(8):
        told, ranks = Told(), Ranks(rank, 8, "")
        part = load_draft(folder, target, ranks=ranks, report=told)
        same_parts(whole, part, DRAFT, ranks)
        assert told.last[0] == told.last[1] < 0.6 * (folder / "model.safetensors").stat().st_size


class Told:
    """A progress that never goes back and never changes its end."""

    def __init__(self) -> None:
        self.last = (0, 0)

    def __call__(self, done: int, total: int) -> None:
        assert self.last[0] < done <= total
        assert self.last[1] in (0, total)
        self.last = (done, total)


class Reads:
    """What is read of a checkpoint: every tensor or slice that the library hands out."""

    def __init__(self, monkeypatch) -> None:
        self.of: dict[str, list[torch.Tensor]] = defaultdict(list)
        real, reads = safetensors_dir.safe_open, self

        class Slice:
            def __init__(self, name, part):
                self.name, self.get_shape, self.get_dtype, self.part = (
                    name,
                    part.get_shape,
                    part.get_dtype,
                    part,
                )

            def __getitem__(self, at):
                return reads.note(self.name, self.part[at])

        class Handle:
            def __init__(self, *args, **options):
                self.handle = real(*args, **options)

            def __enter__(self):
                self.handle.__enter__()
                return self

            def __exit__(self, *error):
                return self.handle.__exit__(*error)

            def keys(self):
                return self.handle.keys()

            def get_tensor(self, name):
                return reads.note(name, self.handle.get_tensor(name))

            def get_slice(self, name):
                return Slice(name, self.handle.get_slice(name))

        monkeypatch.setattr(safetensors_dir, "safe_open", Handle)

    def note(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.of[name].append(tensor)
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for tensors in self.of.values() for t in tensors)


def test_no_rank_reads_more_than_its_part(folders, monkeypatch):
    path = folders["tiny"]
    files = safetensors_dir.SafetensorsDir(path)
    stored = {name: torch.Size(h.shape).numel() * h.dtype.itemsize for name, h in files.headers.items()}
    of_all = defaultdict(list)
    for rank in range(8):
        told, reads = Told(), Reads(monkeypatch)
        load_model(path, ranks=Ranks(rank, 8, ""), report=told)
        monkeypatch.undo()
        assert told.last == (reads.num_bytes, reads.num_bytes)
        assert all(len(tensors) == 1 for tensors in reads.of.values())
        for name, (tensor,) in reads.of.items():
            of_all[name].append(tensor.numel() * tensor.element_size())
    experts = [name for name in stored if ".experts." in name]
    assert len(experts) == 8 * 8 * 6
    for name in experts:  # an eighth of every matrix and of its scales: nobody sees an expert whole
        assert of_all[name] == [stored[name] // 8] * 8
    for name in (HEAD, EMBEDDING):
        assert of_all[name] == [stored[name] // 8] * 8
    largest = max(max(sizes) for sizes in of_all.values())
    assert largest == max(stored[f"{LAYER}.0.mlp.up_proj.weight"] // 8, stored[EMBEDDING] // 8, 128 * 128 * 2)


def test_reading_a_part_leaves_the_rest_of_a_file_alone(folders):
    """What comes back is a view of the mapped file: only the copy of a part takes memory."""
    files = safetensors_dir.SafetensorsDir(folders["tiny"])
    ((_, part),) = files.parts({W2: safetensors_dir.Cut(1, 16, 32)})
    ((_, whole),) = files.tensors([W2])
    assert part.shape == (64, 16)
    assert not part.is_contiguous()
    assert torch.equal(part, whole[:, 16:32])


@pytest.mark.parametrize(
    ("name", "row", "value", "by"),
    [
        (EMBEDDING, 600, float("nan"), [2]),  # of 1024 rows
        (A_LOG, 5, float("inf"), [0, 1, 2, 3]),  # small and padded: everybody reads all of it
        (A_LOG, 100, 0.5, [0, 1, 2, 3]),
        (W1_SCALE, 255, 255, [3]),
    ],
)
def test_a_bad_value_is_found_by_the_ranks_that_read_it(copy, name, row, value, by):
    edit_tensor(copy, name, lambda tensor: tensor.index_fill(0, torch.tensor(row), value))
    for rank in range(4):
        if rank not in by:
            load_model(copy, ranks=Ranks(rank, 4, ""))
            continue
        with pytest.raises(CheckpointError) as caught:
            load_model(copy, ranks=Ranks(rank, 4, ""))
        (problem,) = caught.value.problems
        assert problem.startswith(name)


def test_all_ranks_agree_whether_a_head_is_the_embedding(copy, monkeypatch):
    """The last row alone differs, which one rank of eight would read, and all have to see it."""
    monkeypatch.setattr(weights, "ROWS", 100)
    both = {
        name: tensor.clone() for name, tensor in safetensors_dir.SafetensorsDir(copy).tensors([EMBEDDING])
    }
    edit_tensor(copy, HEAD, lambda tensor: both[EMBEDDING].index_fill(0, torch.tensor(1023), 0.25))
    config = weights.examine(copy).config
    assert not config.tie_word_embeddings
    files = safetensors_dir.SafetensorsDir(copy)
    assert weights.has_own_head(config, files)
    edit_tensor(copy, HEAD, lambda tensor: both[EMBEDDING])
    assert not weights.has_own_head(config, safetensors_dir.SafetensorsDir(copy))


def test_what_ranks_cannot_divide_is_refused(folders):
    with pytest.raises(ValueError, match="16 ranks need a multiple of 16"):
        load_model(folders["tiny"], ranks=Ranks(0, 16, ""))
