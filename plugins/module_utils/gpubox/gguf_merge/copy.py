# SPDX-License-Identifier: Apache-2.0
"""Moves bytes: buffered reads, direct writes, the digest in between.

The result passes through a few page-aligned buffers, each filled, digested and written by one
thread at a time. Only the digest waits for its turn: it is taken front to back, so it is that of
the file, and any tool can repeat it. Reads go through the page cache for its readahead, and what
was read is dropped again; writes go past it. Measured against the other ways in
docs/performance-gguf.md.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Protocol

from ..errors import GpuboxError
from ..gguf import Identity
from . import system
from .digest import Ledger
from .plan import Literal, Plan, Range

BLOCK = 16 << 20  # bytes of one buffer
THREADS = 3  # as many buffers

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


class Origin(Protocol):
    """Where the bytes of a result come from."""

    def fill(self, view: memoryview, position: int) -> None:
        """Fill ``view`` with the bytes at ``position`` of the result."""


def _read(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` from the file as far as it reaches, and drop what was read from the cache."""
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            break
        done += count
    system.forget(descriptor, offset, done)
    return done


class Sources:
    """The shards of a plan, opened when first needed and held to the state that was planned for."""

    def __init__(self, plan: Plan, writable: bool = False) -> None:
        self._plan = plan
        self._starts = [0, *accumulate(segment.length for segment in plan.segments)]
        self._mode = os.O_RDWR if writable else os.O_RDONLY
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        self._identities = [header.identity for header in plan.sources]

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            system.forget(descriptor)
            os.close(descriptor)

    def descriptor(self, index: int) -> int:
        """File descriptor of shard ``index``."""
        with self._lock:
            if index not in self._descriptors:
                path = self._plan.sources[index].path
                self._descriptors[index] = os.open(path, self._mode | os.O_CLOEXEC)
                self._require_unchanged(index)
            return self._descriptors[index]

    def fill(self, view: memoryview, position: int) -> None:
        """See `Origin`."""
        index = bisect_right(self._starts, position) - 1
        done = 0
        while done < len(view):
            segment = self._plan.segments[index]
            skip = position + done - self._starts[index]
            piece = view[done : done + segment.length - skip]
            if isinstance(segment, Range):
                descriptor = self.descriptor(segment.source)
                if _read(descriptor, piece, segment.offset + skip) < len(piece):
                    self.require_unchanged()
                    raise OSError(errno.EIO, "a shard ends early")
            elif isinstance(segment, Literal):
                piece[:] = segment.data[skip : skip + len(piece)]
            else:
                piece[:] = bytes(len(piece))
            done += len(piece)
            index += 1

    def ranges(self, start: int, end: int) -> Iterator[Range]:
        """The tensor data of the shards from ``start`` to ``end`` of the result.

        Of a range that begins earlier all up to ``end``.
        """
        for segment, position in zip(self._plan.segments, self._starts, strict=False):
            if position >= end:
                return
            if (
                isinstance(segment, Range)
                and position >= self._plan.header_size
                and position + segment.length > start
            ):
                length = min(segment.length, end - position)
                yield Range(segment.source, segment.offset, length)

    def require_unchanged(self) -> None:
        """Raise `GpuboxError` if a shard that was read is no longer what was planned for."""
        for index in list(self._descriptors):
            self._require_unchanged(index)

    def changed_by_us(self, index: int) -> None:
        """Take the present state of a shard for the right one."""
        self._identities[index] = Identity.of(os.fstat(self._descriptors[index]))

    def _require_unchanged(self, index: int) -> None:
        if Identity.of(os.fstat(self._descriptors[index])) != self._identities[index]:
            raise GpuboxError(
                f"{self._plan.sources[index].path}: changed while it was being merged",
                "shards that nobody writes",
                "Wait for the download to finish and run again; nothing was published.",
            )


class Reread:
    """A result that is there, read again. Missing bytes read as zeros."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fill(self, view: memoryview, position: int) -> None:
        """See `Origin`."""
        done = _read(self._descriptor, view, position)
        view[done:] = bytes(len(view) - done)


class Target:
    """The unfinished result: whole pages are written past the page cache where that is possible."""

    def __init__(self, descriptor: int) -> None:
        self._buffered = descriptor
        self._direct: int | None = None
        with contextlib.suppress(OSError):
            # the same file again, whatever its name is by now
            flags = os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC
            self._direct = os.open(f"/proc/self/fd/{descriptor}", flags)
        self._to_close = self._direct

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        if self._to_close is not None:
            os.close(self._to_close)

    @property
    def direct(self) -> bool:
        """Whether pages are written past the page cache."""
        return self._direct is not None

    def write(self, view: memoryview, position: int) -> None:
        """Write all of ``view``."""
        while view:
            descriptor, part = self._buffered, view
            direct = self._direct
            if direct is not None and not position % system.PAGE and len(view) >= system.PAGE:
                descriptor, part = direct, view[: len(view) // system.PAGE * system.PAGE]
            try:
                done = system.write(descriptor, part, position)
            except OSError as error:
                if descriptor == self._buffered or error.errno not in system.UNSUPPORTED:
                    raise
                self._direct = None  # tmpfs, NFS, ZFS: some take the flag and then not the write
                continue
            view = view[done:]
            position += done

    def sync(self) -> None:
        """Bring what was written to the disk, and out of the page cache."""
        system.sync_data(self._buffered)
        system.forget(self._buffered)


class _Turns:
    """Lets threads pass one by one, in the order of the positions that they work at."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._condition = threading.Condition()
        self.failure: BaseException | None = None

    @contextlib.contextmanager
    def at(self, position: int, length: int) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: self.failure or self._position == position)
            if self.failure is not None:
                raise InterruptedError
            yield
            self._position += length
            self._condition.notify_all()

    def stop(self, failure: BaseException) -> None:
        with self._condition:
            self.failure = self.failure or failure
            self._condition.notify_all()


def stream(
    origin: Origin,
    start: int,
    end: int,
    ledger: Ledger | None = None,
    target: Target | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Pass the bytes from ``start`` to ``end`` of a result to the ledger and the target.

    ``progress`` is called, in the calling thread, with the bytes done so far. Ctrl-C, or any other
    exception there or in a thread, ends all threads before it is passed on.
    """
    buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    size = min(BLOCK, max(end - start, 1))
    for _ in range(THREADS):
        buffers.put(memoryview(mmap.mmap(-1, size)))
    turns = _Turns(start)

    def pass_on(position: int) -> int:
        buffer = buffers.get()
        try:
            view = buffer[: min(size, end - position)]
            if turns.failure is None:
                origin.fill(view, position)
            with turns.at(position, len(view)):
                if ledger is not None:
                    ledger.update(view)
            if target is not None:
                target.write(view, position)
            return len(view)
        except BaseException as failure:
            turns.stop(failure)
            raise
        finally:
            buffers.put(buffer)

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            done = 0
            for count in pool.map(pass_on, range(start, end, size)):
                done += count
                if progress is not None:
                    progress(done)
        except BaseException as failure:
            turns.stop(failure)
            pool.shutdown(cancel_futures=True)
            raise turns.failure or failure from None
