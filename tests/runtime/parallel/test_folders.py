"""Two folders that differ are told apart by little reading; what may be missed is said."""

import json
import random
import struct
from itertools import pairwise

import pytest
from k3compile.runtime.parallel import folders
from k3compile.runtime.parallel.folders import RANGE, describe_folder, places


def safetensors(header: dict, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_a_folder_is_told_apart_by_names_sizes_headers_and_small_files(tmp_path):
    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return describe_folder(tmp_path)

    header = {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}
    first = write("model.safetensors", safetensors(header, b"abcd"))
    assert set(first) == {"model.safetensors"}
    assert write("model.safetensors", safetensors(header, b"abcz")) != first, "a small file is read whole"
    assert write("model.safetensors", safetensors(header, b"abcde")) != first
    assert write("model.safetensors", safetensors({"v": header["w"]}, b"abcd")) != first
    assert write("model.safetensors", safetensors(header, b"abcd")) == first
    assert write("config.json", b"{}") != (other := write("config.json", b"[]"))
    assert write("notes.txt", b"mine") == other
    assert write("cut.safetensors", b"\xff" * 9)["cut.safetensors"].startswith("9 bytes")
    assert write("empty.safetensors", b"")["empty.safetensors"].startswith("0 bytes")


@pytest.mark.parametrize("size", [0, 1, 64 * RANGE, 64 * RANGE + 1, 10_000_019, 10_000_000_019])
def test_ranges_are_apart_reach_both_ends_and_leave_no_stretch_out(size):
    found = places(size, 64)
    assert sum(length for _, length in found) == min(size, 64 * RANGE)
    assert found[0][0] == 0
    assert sum(found[-1]) == size
    gaps = [b - (a + length) for (a, length), (b, _) in pairwise(found)]
    assert all(0 <= gap <= 2 * size / 62 for gap in gaps)


def test_of_a_large_file_a_change_everywhere_is_seen_and_a_small_one_may_be_missed(tmp_path):
    size, body = 5_000_000, random.Random(0).randbytes(5_000_000)
    file, header = tmp_path / "model.safetensors", {"w": {}}

    def said(body):
        file.write_bytes(safetensors(header, body))
        return describe_folder(tmp_path)

    first = said(body)
    assert said(body) == first
    for step in (997, 65_537):  # as training does, and damage here and there
        other = bytearray(body)
        for i in range(0, size, step):
            other[i] ^= 1
        assert said(bytes(other)) != first, step
    for place in (0, size - 1):
        other = bytearray(body)
        other[place] ^= 1
        assert said(bytes(other)) != first, place
    unread = bytearray(body)
    (place, length), *_ = places(size, 64)[5:]
    unread[place + length] ^= 1
    assert said(bytes(unread)) == first


def test_a_folder_of_many_files_costs_no_more(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(folders, "samples", lambda path, ranges: asked.append(ranges) or b"")
    for i in range(200):
        (tmp_path / f"{i}.safetensors").write_bytes(b"")
    describe_folder(tmp_path)
    assert set(asked) == {20}
