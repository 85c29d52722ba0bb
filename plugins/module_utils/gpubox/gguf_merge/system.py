# SPDX-License-Identifier: Apache-2.0
"""Every call that changes a file, and those that Python lacks.

The order of the calls that change a file is what makes a merge safe against a crash, so tests count
them, refuse them and stop the process at them here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

PAGE = 4096
"""Bytes to which direct writes, shared blocks and their buffers are aligned."""

# with these a kernel or file system says that it cannot do what was asked
UNSUPPORTED = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}
)
MARK = "user.gpubox.merge-in-place"
"""Extended attribute of a shard: the token of the merge in place, and bytes of its first tensor
that are or will be gone, 0 while it is whole."""

# linux/falloc.h
_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_FICLONERANGE = 0x4020940D  # linux/fs.h

_CACHESTAT = 451  # asm-generic/unistd.h, from Linux 6.5 on; the same on x86-64 and arm64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    while _libc.fallocate(descriptor, mode, offset, length):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def preallocate(descriptor: int, offset: int, length: int) -> None:
    """Give the range its blocks now; where the file system cannot, the writes will.

    Raises:
        OSError: the disk is too full, or something else is wrong with it.
    """
    try:
        _fallocate(descriptor, 0, offset, length)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def punch(descriptor: int, offset: int, length: int) -> None:
    """Give the blocks of the range back; it reads as zeros afterwards."""
    _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def clone(source: int, target: int, offset: int, position: int, length: int) -> None:
    """Let ``target`` at ``position`` share the blocks of ``source`` at ``offset``."""
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, offset, length, position))


def write(descriptor: int, data: memoryview | bytes, position: int) -> int:
    """Bytes written."""
    return os.pwrite(descriptor, data, position)


def truncate(descriptor: int, size: int) -> None:
    """Set the length."""
    os.ftruncate(descriptor, size)


def sync_data(descriptor: int) -> None:
    """Bring the content to the disk."""
    os.fdatasync(descriptor)


def sync(descriptor: int) -> None:
    """Bring content and metadata to the disk."""
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Give a file its name in one step."""
    old.replace(new)


def remove(path: Path) -> None:
    """Remove a name."""
    path.unlink()


def mark(descriptor: int, token: str, taken: int) -> None:
    """Write on a shard which merge in place takes its content away, or will."""
    os.setxattr(descriptor, MARK, f"{token} {taken}".encode())


def unmark(descriptor: int) -> None:
    """Take back what `mark` wrote."""
    os.removexattr(descriptor, MARK)


def marked(file: Path | int) -> tuple[str, int]:
    """Token and bytes as `mark` wrote them; empty and 0 for a shard that no merge in place saw."""
    try:
        value = os.getxattr(file, MARK).decode("ascii", "replace")
    except OSError:
        return "", 0
    token, _, taken = value.partition(" ")
    return token, int(taken) if taken.isdecimal() else 1


def has_hole(descriptor: int, size: int) -> bool:
    """Whether blocks of a file are missing."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE) < size
    except OSError:
        return False


def each(
    pool: ThreadPoolExecutor, function: Callable[[Item], Outcome], items: Iterable[Item]
) -> Iterator[Outcome]:
    """Outcomes in order, as ``pool.map`` gives them.

    Raises:
        OSError: no thread could be started, which Python does not tell as the kernel's error.
    """
    try:
        return pool.map(function, items)
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error


@contextlib.contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Let errors of the calls on an open file, which name none or its descriptor, name ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None or isinstance(error.filename, int):
            error.filename = str(path)
        raise


def memory(size: int) -> memoryview:
    """Zeroed memory that begins with a page.

    In huge pages where the kernel has some: fewer faults, and direct reads and writes pin it for
    less (measured in docs/performance-gguf.md).
    """
    found = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        found.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(found)


def address(view: memoryview) -> int:
    """Where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def move(target: memoryview, source: memoryview) -> None:
    """Copy ``source`` to the beginning of ``target``; other threads run meanwhile."""
    if source:
        ctypes.memmove(address(target[: len(source)]), address(source), len(source))


def open_direct(descriptor: int, flags: int) -> int | None:
    """The same file again, whatever its name is by now, past the page cache; None if it cannot."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def in_cache(descriptor: int, offset: int, length: int) -> bool | None:
    """Whether all pages of the range are in the page cache; None if the kernel does not say."""
    extent = struct.pack("=QQ", offset, length)
    counts = ctypes.create_string_buffer(5 * 8)  # cached, dirty, in writeback, evicted, recently
    if _libc.syscall(ctypes.c_long(_CACHESTAT), descriptor, extent, counts, 0):
        return None
    pages = (offset + length - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    return bool(struct.unpack_from("=Q", counts)[0] >= pages)


def forget(descriptor: int, offset: int = 0, length: int = 0) -> None:
    """Drop clean pages of the range (to the end for length 0) from the page cache."""
    try:
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
    except OSError:  # an advice only
        return
