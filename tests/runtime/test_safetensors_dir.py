"""A set of files is described whole: what is missing, cut short, doubled, stray or in the wrong place."""

import json
import os
import shutil

import pytest
import torch
from broken_checkpoints import INDEX, edit_index, edit_shard, merge_shards, shard_of
from k3compile.runtime.checkpoint import make_checkpoint
from k3compile.runtime.safetensors_dir import SafetensorsDir
from k3compile.runtime.weights import CheckpointError, load_model

FIRST = "model-00001-of-000004.safetensors"
EMBEDDING = "language_model.model.embed_tokens.weight"
NORM = "language_model.model.norm.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("k3") / "tiny")


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "copy")


def problems(path) -> list[str]:
    """What the loader says, which must be all that the directory says."""
    found = SafetensorsDir(path).problems
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    assert caught.value.problems == found
    return found


def test_a_good_directory_has_no_problems_and_every_header(tiny):
    files = SafetensorsDir(tiny)
    assert files.problems == []
    assert len(files.headers) == 618
    assert files.headers[EMBEDDING] == (FIRST, (1024, 128), torch.bfloat16)
    assert len(list(tiny.glob("*.safetensors"))) == 4


def test_a_missing_shard_is_one_problem(copy):
    (copy / FIRST).unlink()
    assert problems(copy) == [f"{FIRST} is missing (126 tensors of {INDEX} should be in it)"]


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_shard_cut_short_is_one_problem(copy, keep):
    size = (copy / FIRST).stat().st_size
    os.truncate(copy / FIRST, keep if keep >= 0 else size + keep)
    (problem,) = problems(copy)
    assert problem.startswith(f"{FIRST} cannot be read, it may be cut short")


def test_bytes_behind_the_end_are_a_problem(copy):
    with (copy / FIRST).open("ab") as file:
        file.write(b"more")
    (problem,) = problems(copy)
    assert problem.startswith(f"{FIRST} cannot be read")


def test_a_name_in_the_index_but_not_in_its_file_is_named(copy):
    file = shard_of(copy, NORM)
    edit_shard(file, lambda tensors: tensors.pop(NORM))
    assert problems(copy) == [f"{NORM} should be in {file.name}, and is not"]


def test_a_tensor_that_the_index_does_not_know_is_named(copy):
    file = shard_of(copy, NORM)
    edit_index(copy, lambda weight_map: weight_map.pop(NORM))
    assert problems(copy) == [f"{NORM} is in {file.name}, and {INDEX} does not know it"]


def test_a_tensor_in_two_shards_is_named_with_both(copy):
    file = shard_of(copy, NORM)
    edit_shard(copy / FIRST, lambda tensors: tensors.update({NORM: torch.zeros(128, dtype=torch.bfloat16)}))
    found = problems(copy)
    assert f"{NORM} is both in {FIRST} and in {file.name}" in found


def test_a_tensor_in_another_shard_than_the_index_says_is_named(copy):
    file = shard_of(copy, NORM)
    edit_index(copy, lambda weight_map: weight_map.update({NORM: FIRST}))
    assert problems(copy) == [f"{NORM} should be in {FIRST}, and is in {file.name}"]


def test_a_stray_file_is_named(copy):
    shutil.copy(copy / FIRST, copy / "old.safetensors")
    assert problems(copy) == [f"old.safetensors is not in {INDEX}: remove it, or finish the download"]


def test_an_empty_directory_says_what_was_looked_for(tmp_path, tiny):
    shutil.copy(tiny / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    (problem,) = problems(tmp_path)
    assert "holds neither model.safetensors.index.json nor model.safetensors; nothing else is read" in problem


def test_shards_without_an_index_are_not_guessed_together(copy):
    (copy / INDEX).unlink()
    (problem,) = problems(copy)
    assert problem.startswith(f"there is no {INDEX}")


MAPS = ["[]", '{"a": 1}', '{"a": "../a.safetensors"}']
NO_INDEX = ["{", "[]", "{}", *(f'{{"weight_map": {weight_map}}}' for weight_map in MAPS)]


@pytest.mark.parametrize("text", NO_INDEX)
def test_an_index_that_is_none_is_a_problem(copy, text):
    (copy / INDEX).write_text(text)
    assert any(problem.startswith(INDEX) for problem in SafetensorsDir(copy).problems)
    with pytest.raises(CheckpointError, match="index"):
        load_model(copy)


def test_a_name_twice_in_the_index_is_named(copy):
    text = (copy / INDEX).read_text()
    entry = f'"{NORM}": "{shard_of(copy, NORM).name}"'
    (copy / INDEX).write_text(text.replace(entry, f"{entry}, {entry}"))
    assert problems(copy) == [f"{INDEX} names twice: {NORM}"]


def test_several_problems_come_together(copy):
    shutil.copy(copy / FIRST, copy / "old.safetensors")
    os.truncate(copy / FIRST, 100)
    (copy / "model-00002-of-000004.safetensors").unlink()
    assert len(problems(copy)) == 3


def test_tensors_come_file_by_file(copy):
    merge_shards(copy)
    files = SafetensorsDir(copy)
    names = [NORM, EMBEDDING]
    assert [name for name, _ in files.tensors(names)] == names
    assert json.loads((copy / "config.json").read_text())["model_type"] == "kimi_k3"
