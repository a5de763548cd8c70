"""The folder keeps its bound and comes back after a restart; what does not belong in it is never served."""

import contextlib
import errno
import logging
import os
import threading
import time

import pytest
from k3compile.runtime.cache.tiers import disk as disk_module
from k3compile.runtime.cache.tiers.disk import DiskTier
from k3compile.runtime.cache.tiers.disk_file import encode, file_name
from k3compile.runtime.cache.tiers.entry import Declined, Key
from tier_entries import FINGERPRINT, OTHER, chain, entry_of, same

HASHES = chain(12)
KEYS = [Key(h, "pages") for h in HASHES]
SIZE = len(encode(KEYS[1], FINGERPRINT, HASHES[0], entry_of(KEYS[1])))


def tier(folder, room: float = 100, fingerprint: str = FINGERPRINT) -> DiskTier:
    return DiskTier(folder, int(room * SIZE), fingerprint, SIZE)


def put(disk: DiskTier, *blocks: int) -> None:
    for block in blocks:
        disk.put(KEYS[block], entry_of(KEYS[block]), HASHES[block - 1] if block else None)


def served(disk: DiskTier) -> list[int]:
    """Blocks that are there; each is read and must be right."""
    there = [i for i, key in enumerate(KEYS) if key in disk]
    assert all(same(disk.get(KEYS[i])[0], entry_of(KEYS[i])) for i in there)
    return there


def path_of(folder, block: int, fingerprint: str = FINGERPRINT):
    return folder / file_name(KEYS[block], fingerprint)


def reason(call, *arguments) -> str:
    with pytest.raises(Declined) as caught:
        call(*arguments)
    return caught.value.reason


def test_what_was_put_comes_back_with_its_parent_now_and_after_a_restart(tmp_path, caplog):
    put(tier(tmp_path / "new" / "folder"), 0, 1, 2)
    disk = tier(tmp_path / "new" / "folder")
    assert served(disk) == [0, 1, 2]
    assert [disk.get(KEYS[i])[1] for i in range(3)] == [None, HASHES[0], HASHES[1]]
    assert disk.bytes == sum(p.stat().st_size for p in disk.folder.iterdir())
    assert (len(disk), caplog.records) == (3, [])


def test_files_are_for_their_owner_alone(tmp_path):
    put(tier(tmp_path / "x"), 0)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o700
    assert path_of(tmp_path / "x", 0).stat().st_mode & 0o777 == 0o600


def test_the_bound_holds_and_the_end_of_the_chain_goes_first(tmp_path):
    disk = tier(tmp_path, room=6.5)
    put(disk, *range(6))
    other = Key(chain(1, "other")[0], "pages")
    disk.put(other, entry_of(other), None)
    assert served(disk) == [0, 1, 2, 3]
    assert other in disk
    assert disk.bytes == sum(p.stat().st_size for p in tmp_path.iterdir()) <= disk.capacity


def test_the_order_of_use_survives_a_restart(tmp_path):
    disk = tier(tmp_path, room=4.5)
    others = [Key(chain(1, name)[0], "pages") for name in "abc"]
    for i, key in enumerate(others):
        disk.put(key, entry_of(key), None)
        os.utime(tmp_path / file_name(key, FINGERPRINT), ns=(i, i))
    tier(tmp_path).get(others[0])
    disk = tier(tmp_path, room=3.5)
    put(disk, 0)
    assert [key in disk for key in others] == [True, False, True]


def test_the_chain_is_known_after_a_restart(tmp_path):
    put(tier(tmp_path), 0, 1, 2)
    for block, used in enumerate([1, 9, 8]):  # the first is oldest, and two hang below it
        os.utime(path_of(tmp_path, block), ns=(used, used))
    disk = tier(tmp_path, room=3.5)
    other = Key(chain(1, "other")[0], "pages")
    disk.put(other, entry_of(other), None)
    assert served(disk) == [0, 1]


def test_a_chain_longer_than_the_tier_keeps_its_beginning(tmp_path):
    disk = tier(tmp_path, room=3.5)
    put(disk, 0, 1, 2)
    assert reason(put, disk, 3) == "no_room"
    assert served(disk) == [0, 1, 2]


def test_an_entry_larger_than_the_tier_is_too_big(tmp_path):
    assert reason(put, tier(tmp_path, room=0.5), 0) == "too_big"
    assert not list(tmp_path.iterdir())


def test_a_restart_with_less_room_shrinks_when_something_is_put(tmp_path):
    put(tier(tmp_path), *range(8))
    disk = tier(tmp_path, room=4)
    assert served(disk) == list(range(8))
    other = Key(chain(1, "other")[0], "pages")
    disk.put(other, entry_of(other), None)
    assert disk.bytes == sum(p.stat().st_size for p in tmp_path.iterdir()) <= disk.capacity


def damage(folder) -> dict[int, str]:
    """Block -> why it must not be served."""
    put(tier(folder), *range(12))
    path_of(folder, 0).write_bytes(b"")
    path_of(folder, 1).write_bytes(path_of(folder, 1).read_bytes()[:-1])
    path_of(folder, 2).write_bytes(path_of(folder, 2).read_bytes() + b"\0")
    path_of(folder, 3).unlink()
    path_of(folder, 3).mkdir()
    path_of(folder, 4).write_bytes(path_of(folder, 5).read_bytes())  # another entry's content
    path_of(folder, 5).write_bytes(encode(KEYS[5], OTHER, None, entry_of(KEYS[5])))
    outside = folder.parent / "outside"
    outside.write_bytes(path_of(folder, 6).read_bytes())  # whole and right, but not in the folder
    path_of(folder, 6).unlink()
    path_of(folder, 6).symlink_to(outside)
    path_of(folder, 7).unlink()
    os.mkfifo(path_of(folder, 7))
    path_of(folder, 8).write_bytes(path_of(folder, 8).read_bytes() + bytes(2 << 20))
    path_of(folder, 9).write_bytes(bytes(range(256)) * 20)
    return {0: "torn", 1: "torn", 2: "torn", 4: "foreign", 5: "foreign", 8: "foreign", 9: "torn"}


def test_a_restart_ignores_what_is_damaged_and_says_so_once_a_kind(tmp_path, caplog):
    damage(tmp_path / "tier")
    (tmp_path / "tier" / "notes.txt").write_text("mine")
    path_of(tmp_path / "tier", 0, OTHER).write_bytes(encode(KEYS[0], OTHER, None, entry_of(KEYS[0])))
    caplog.clear()
    disk = tier(tmp_path / "tier")
    assert served(disk) == [10, 11]
    said = sorted(record.getMessage().split(": ", 1)[1] for record in caplog.records)
    assert [line.split(":")[0] for line in said] == [
        "1 ignored, as their names are none of ours",
        "1 ignored, being larger than any entry",
        "1 ignored, belonging to other models, drafts or settings",
        "2 ignored, holding something else",
        "3 ignored, being no plain files",
        "4 ignored, being cut short or damaged",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_damage_while_the_process_runs_is_noticed_when_read_and_once(tmp_path):
    folder = tmp_path / "tier"
    disk = tier(folder)
    put(disk, *range(12))
    for block, why in (damage(folder) | {3: "foreign", 6: "io_error", 7: "foreign"}).items():
        assert reason(disk.get, KEYS[block]) == why
        assert KEYS[block] not in disk
        assert reason(disk.get, KEYS[block]) == "not_found"
    assert served(disk) == [10, 11]
    assert (tmp_path / "outside").exists()


def test_a_flipped_bit_is_a_checksum_error_and_the_entry_can_be_stored_again(tmp_path):
    disk = tier(tmp_path)
    put(disk, 0, 1)
    data = bytearray(path_of(tmp_path, 0).read_bytes())
    data[-1] ^= 1
    path_of(tmp_path, 0).write_bytes(data)
    disk = tier(tmp_path)  # the header is whole, so the scan does not see it
    assert KEYS[0] in disk
    assert reason(disk.get, KEYS[0]) == "checksum"
    assert KEYS[0] not in disk
    put(disk, 0)
    assert served(disk) == [0, 1]


def test_damaged_and_foreign_files_make_room_and_files_with_other_names_stay(tmp_path):
    folder = tmp_path / "tier"
    damage(folder)
    put(tier(folder, fingerprint=OTHER), 0)
    (folder / "notes.txt").write_bytes(bytes(50 * SIZE))
    disk = tier(folder, room=3)
    for name in "ab":
        key = Key(chain(1, name)[0], "pages")
        disk.put(key, entry_of(key), None)
    assert (folder / "notes.txt").stat().st_size == 50 * SIZE
    assert path_of(folder, 3).is_dir()
    assert path_of(folder, 6).is_symlink()
    assert (tmp_path / "outside").exists()
    assert not path_of(folder, 8).exists()
    ours = [p for p in folder.iterdir() if p.is_file() and not p.is_symlink() and p.name != "notes.txt"]
    assert sum(p.stat().st_size for p in ours) == disk.bytes <= disk.capacity


def test_a_link_in_place_of_a_file_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("precious")
    disk = tier(tmp_path / "tier")
    path_of(tmp_path / "tier", 0).symlink_to(tmp_path / "precious")
    put(disk, 0)
    assert (tmp_path / "precious").read_text() == "precious"
    assert served(disk) == [0]
    assert not path_of(tmp_path / "tier", 0).is_symlink()


def test_a_folder_in_place_of_a_file_declines_the_store(tmp_path):
    disk = tier(tmp_path)
    path_of(tmp_path, 0).mkdir()
    assert reason(put, disk, 0) == "io_error"
    assert (KEYS[0] in disk, disk.bytes, len(list(tmp_path.iterdir()))) == (False, 0, 1)


@pytest.mark.parametrize(
    ("call", "number", "expected"),
    [
        ("write", errno.ENOSPC, "disk_full"),
        ("write", errno.EDQUOT, "disk_full"),
        ("fsync", errno.EIO, "io_error"),
        ("open", errno.EROFS, "io_error"),
        ("open", errno.EACCES, "io_error"),
        ("replace", errno.EACCES, "io_error"),
    ],
)
def test_a_disk_that_refuses_declines_the_store_and_leaves_nothing(
    tmp_path, monkeypatch, call, number, expected
):
    disk = tier(tmp_path)
    put(disk, 0)

    def refuse(*arguments, **named):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(disk_module.os, call, refuse)
        assert reason(put, disk, 1) == expected
    assert (KEYS[1] in disk, disk.bytes) == (False, path_of(tmp_path, 0).stat().st_size)
    assert len(list(tmp_path.iterdir())) == 1
    put(disk, 1)
    assert served(disk) == [0, 1]


def test_an_error_while_reading_declines_the_load(tmp_path, monkeypatch):
    disk = tier(tmp_path)
    put(disk, 0)

    def refuse(*arguments, **named):
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(disk_module.os, "fstat", refuse)
        with pytest.raises(Declined, match="io_error"):
            disk.get(KEYS[0])


def test_a_file_has_its_name_only_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    calls, real = [], {name: getattr(os, name) for name in ("fsync", "replace", "open", "write")}

    def note(name):
        def called(first, *rest, **named):
            result = real[name](first, *rest, **named)
            told = str(first) if name in ("open", "replace") else None
            told = "part" if told and told.endswith(".part") else told
            calls.append((name, told))
            return result

        return called

    disk = tier(tmp_path)
    for name in real:
        monkeypatch.setattr(disk_module.os, name, note(name))
    put(disk, 0)
    steps = [(name, told) for name, told in calls if name != "write"]
    folder = str(tmp_path).rsplit(".", 1)[-1]
    assert steps == [
        ("open", "part"),
        ("fsync", None),
        ("replace", "part"),
        ("open", folder),
        ("fsync", None),
    ]
    assert calls.index(("write", None)) < calls.index(("fsync", None))


def test_what_a_dead_writer_left_is_swept_and_what_a_live_one_writes_is_not(tmp_path):
    dead = tmp_path / f".{file_name(KEYS[0], FINGERPRINT)}.123-0123abcd.part"
    dead.write_bytes(b"half")
    disk, seen = tier(tmp_path), []
    assert not dead.exists()
    real = os.replace

    def look(part, final):
        tier(tmp_path)  # another process starts in this very moment
        seen.append(os.path.exists(part))
        real(part, final)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module.os, "replace", look)
        put(disk, 0)
    assert seen == [True]
    assert served(disk) == [0]


def test_two_processes_on_one_folder_share_its_bound_and_find_each_others_entries(tmp_path):
    one, two = tier(tmp_path, room=6.5), tier(tmp_path, room=6.5)
    put(one, 0, 1, 2)
    put(two, 0, 1, 2)  # not known to be there: written again, whole again
    assert len(list(tmp_path.iterdir())) == 3
    put(one, 3, 4, 5)
    for disk in (two, one):
        for i in range(6):
            key = Key(chain(1, f"{i}")[0], "pages")
            disk.put(key, entry_of(key), None)
        assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= disk.capacity
    assert reason(two.get, KEYS[5]) == "not_found"
    for disk in (one, two):
        for i in range(6):
            key = Key(chain(1, f"{i}")[0], "pages")
            if key in disk:
                with contextlib.suppress(Declined):  # the other one deleted it
                    assert same(disk.get(key)[0], entry_of(key))
    assert served(tier(tmp_path)) == []
    assert len(tier(tmp_path)) >= 5


def test_threads_that_store_and_load_the_same_keys_see_whole_entries_only(tmp_path):
    disk, wrong, stop = tier(tmp_path, room=4.5), [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            for key in KEYS[:8]:
                try:
                    if not same(disk.get(key)[0], entry_of(key)):
                        wrong.append(key)
                except Declined as error:
                    if error.reason != "not_found":
                        wrong.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        for block in range(8):
            key = KEYS[block]
            disk.put(key, entry_of(key), None)
    stop.set()
    thread.join()
    assert not wrong
    assert disk.bytes == sum(p.stat().st_size for p in tmp_path.iterdir()) <= disk.capacity


@pytest.mark.parametrize("what", ["a file", "below a file"])
def test_a_folder_that_cannot_be_is_refused_by_name(tmp_path, what):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"offload_dir .* cannot be used"):
        tier(tmp_path / "file" if what == "a file" else tmp_path / "file" / "tier")


def test_a_tier_without_a_byte_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1 byte"):
        tier(tmp_path, room=0)


def test_a_read_that_fails_does_not_strike_out_the_file_written_meanwhile(tmp_path, monkeypatch):
    disk = tier(tmp_path)
    put(disk, 0)
    real = os.open

    def replaced(path, *rest, **named):
        """The file leaves for want of room and is stored again before the reader gets to open it."""
        monkeypatch.setattr(disk_module.os, "open", real)
        disk._forget(path_of(tmp_path, 0).name)
        put(disk, 0)
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(disk_module.os, "open", replaced)
    with pytest.raises(Declined, match="not_found"):
        disk.get(KEYS[0])
    assert served(disk) == [0]
    assert disk.bytes == path_of(tmp_path, 0).stat().st_size


@pytest.mark.parametrize("moment", ["before the lock", "before the rename"])
def test_a_file_that_is_swept_before_its_writer_has_the_lock_is_written_again(tmp_path, monkeypatch, moment):
    disk, calls = tier(tmp_path), []
    real = disk_module.fcntl.flock

    def swept(fd, how):
        """Another process takes the new file for a dead writer's."""
        calls.append(fd)
        if len(calls) > 1:
            return real(fd, how)
        if moment == "before the lock":
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        (part,) = tmp_path.glob(".*.part")
        part.unlink()

    monkeypatch.setattr(disk_module.fcntl, "flock", swept)
    put(disk, 0)
    assert served(disk) == [0]
    assert len(list(tmp_path.iterdir())) == 1
