"""The disk tier: one file an entry, whole or absent, no more bytes than allowed, found again after a restart.

    put   make room -> .part file, locked -> fsync -> rename -> fsync of the folder
    get   open, no link, a plain file -> read -> header, owner, size, checksum -> tensors

The index is the folder itself: it is read at the start, and again whenever room is needed and now and then,
so several processes may share one folder and its bound. What is damaged or another model's is never served,
and leaves like the rest when room is needed; files whose names are not ours are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
from pathlib import Path

from .disk_file import (
    HEADER_LIMIT,
    PART,
    PART_NAME,
    check_owner,
    decode,
    encode,
    file_name,
    read_header,
    read_name,
)
from .entry import Declined, Entry, Key
from .lru import LeafLru, Record

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOW_WATER = 0.875  # room is made down to this share of the capacity, so that not every put reads the folder
RESCAN = 1 / 16  # share of the capacity that is written before the folder is read again: others write too
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in our place must not stop us
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DiskTier:
    """Keeps up to ``capacity`` bytes of files in ``folder``, which is made if it is not there.

    fingerprint: whose entries they are. largest: bytes of the largest entry; a larger file is not read.
    Thread-safe, with one thread that puts. Raises ValueError when the folder cannot be used at all.
    """

    name = "disk"

    def __init__(self, folder: str | Path, capacity: int, fingerprint: str, largest: int) -> None:
        if capacity < 1:
            raise ValueError(f"a disk tier needs at least 1 byte, got {capacity}")
        self.folder, self.capacity, self.fingerprint = Path(folder), capacity, fingerprint
        self.largest = largest + HEADER_LIMIT
        self._lock = threading.Lock()
        self._books = LeafLru()
        self._unscanned = 0  # bytes written since the folder was read
        self._unusable: set[str] = set()  # in the books, so that they leave when room is needed; not served
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            problems = self._scan(sweep=True)
        except OSError as error:
            raise ValueError(
                f"offload_dir {str(folder)!r} cannot be used ({error.strerror}): name another folder"
            ) from None
        for what, names in problems.items():
            shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            log.warning("%s: %d ignored, %s: %s", self.folder, len(names), what, shown)

    def __contains__(self, key: Key) -> bool:
        name = file_name(key, self.fingerprint)
        return name in self._books and name not in self._unusable

    def __len__(self) -> int:
        """Entries that are served."""
        return len(self._books) - len(self._unusable)

    @property
    def bytes(self) -> int:
        """Bytes of all entries in the folder, as far as this process knows."""
        return self._books.total

    def put(self, key: Key, entry: Entry, parent: bytes | None) -> None:
        """Write an entry. parent: hash of the block before.

        Raises :class:`Declined`: too_big, no_room, disk_full, io_error. Then the folder is as before, but
        for what made room.
        """
        name = file_name(key, self.fingerprint)
        with self._lock:
            if name in self._books and name not in self._unusable:
                self._books.touch(name)
                return
        data = encode(key, self.fingerprint, parent, entry)
        if len(data) > self.capacity:
            raise Declined("too_big", f"{len(data):,} B for {self.capacity:,} B")
        try:
            self._make_room(name, len(data), self._above(key, parent))
            try:
                self._write(name, data)
            except (
                FileNotFoundError,
                BlockingIOError,
            ):  # swept before we had the lock
                self._write(name, data)
        except OSError as error:
            self._forget(name)
            reason = "disk_full" if error.errno in FULL else "io_error"
            raise Declined(reason, f"{self.folder}: {error.strerror or error}") from None
        with self._lock:
            self._unusable.discard(name)

    def get(self, key: Key) -> tuple[Entry, bytes | None]:
        """An entry as it was put, and its parent.

        Raises :class:`Declined`: not_found, io_error, torn, foreign, checksum. After the last three the file
        is not read again.
        """
        name = file_name(key, self.fingerprint)
        with self._lock:
            record = None if name in self._unusable else self._books.record(name)
        if record is None:
            raise Declined("not_found")
        try:
            fd = os.open(self.folder / name, READ)
            try:
                entry, parent = decode(self._read(fd), key, self.fingerprint)
                with contextlib.suppress(OSError):  # a folder that is read only serves as well
                    os.utime(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            self._drop(name, record)
            raise Declined("not_found") from None
        except OSError as error:
            self._drop(name, record, there=True)
            raise Declined("io_error", f"{name}: {error.strerror or error}") from None
        except Declined as error:
            self._drop(name, record, there=True)
            raise Declined(error.reason, f"{name}: {error}") from None
        with self._lock:
            self._books.touch(name)
        return entry, parent

    def _above(self, key: Key, parent: bytes | None) -> str | None:
        above = key.above(parent)
        return None if above is None else file_name(above, self.fingerprint)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._books.remove(name)
            self._unusable.discard(name)

    def _drop(self, name: str, record: Record, there: bool = False) -> None:
        """Serve a file no more, unless a new one was put in its place while it was read."""
        with self._lock:
            if self._books.record(name) is not record:
                return
            if there:
                self._unusable.add(name)
            else:
                self._books.remove(name)

    def _read(self, fd: int) -> bytes:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Declined("foreign", "it is no plain file")
        if status.st_size > self.largest:
            raise Declined("foreign", f"{status.st_size:,} B are more than an entry has")
        with open(fd, "rb", closefd=False) as file:
            return file.read(self.largest + 1)

    def _make_room(self, name: str, size: int, above: str | None) -> None:
        """Enter a file that is about to be written, and delete others until it fits."""
        with self._lock:
            crowded = self._books.total + size > self.capacity
        self._unscanned += size
        if crowded or self._unscanned > self.capacity * RESCAN:
            self._scan()
            self._unscanned = 0
        with self._lock:
            self._books.add(name, size, above)
            self._unusable.add(name)
            goal = self.capacity * LOW_WATER if self._books.total > self.capacity else self.capacity
            while self._books.total > goal:
                goes = self._books.first_to_go()
                if goes == name:
                    break
                with contextlib.suppress(FileNotFoundError):  # another process may have been faster
                    os.unlink(self.folder / goes)
                self._books.remove(goes)
                self._unusable.discard(goes)
            fits = self._books.total <= self.capacity
        if not fits:
            self._forget(name)
            raise Declined("no_room", "only what the entry hangs below could have made room")

    def _write(self, name: str, data: bytes) -> None:
        """A file is under its name only when all of it is on the disk, whenever the power fails."""
        part = self.folder / f".{name}.{os.getpid()}-{secrets.token_hex(4)}{PART}"
        fd = os.open(part, WRITE, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # shows that its writer lives
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
            os.replace(part, self.folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        finally:
            os.close(fd)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _scan(self, sweep: bool = False) -> dict[str, list[str]]:
        """Make the books agree with the folder -> why files are ignored: which.

        sweep: also delete what writers that died have left.
        """
        problems: dict[str, list[str]] = {}
        found: dict[str, os.stat_result] = {}
        with os.scandir(self.folder) as items:
            for item in items:
                if PART_NAME.fullmatch(item.name):
                    if sweep:
                        sweep_part(self.folder / item.name)
                elif read_name(item.name) is None:
                    problems.setdefault("as their names are none of ours", []).append(item.name)
                elif not item.is_file(follow_symlinks=False):
                    problems.setdefault("being no plain files", []).append(item.name)
                else:
                    with contextlib.suppress(FileNotFoundError):  # gone since the folder was read
                        found[item.name] = item.stat(follow_symlinks=False)
        with self._lock:
            for name in [n for n in self._books if n not in found]:
                self._books.remove(name)
                self._unusable.discard(name)
            news = [name for name in found if name not in self._books]
        for name in news:
            above, problem = self._inspect(name, found[name].st_size)
            if problem is not None:
                problems.setdefault(problem, []).append(name)
            with self._lock:
                self._books.add(name, found[name].st_size, above, found[name].st_mtime_ns)
                if problem is not None:
                    self._unusable.add(name)
        return problems

    def _inspect(self, name: str, size: int) -> tuple[str | None, str | None]:
        """What a file hangs below, and why it is not to be served. Only its header is read."""
        key, fingerprint = read_name(name)
        if fingerprint != self.fingerprint[:16]:
            return None, "belonging to other models, drafts or settings"
        if size > self.largest:
            return None, "being larger than any entry"
        try:
            fd = os.open(self.folder / name, READ)
            try:
                header = read_header(os.pread(fd, HEADER_LIMIT + 8, 0))
            finally:
                os.close(fd)
            check_owner(header, key, self.fingerprint)
        except OSError as error:
            return None, f"as they cannot be read ({error.strerror})"
        except Declined as error:
            return None, "being cut short or damaged" if error.reason == "torn" else "holding something else"
        if header.size != size:
            return None, "being cut short or damaged"
        return self._above(key, header.parent), None


def sweep_part(path: Path) -> None:
    """Delete a half-written file unless its writer still holds it."""
    with contextlib.suppress(OSError):  # it was finished meanwhile, or somebody writes it
        fd = os.open(path, READ)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(fd)
