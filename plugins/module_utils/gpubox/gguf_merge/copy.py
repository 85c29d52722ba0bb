# SPDX-License-Identifier: Apache-2.0
"""Moves bytes past the page cache, the digest in between.

The result passes through a few page-aligned buffers, each filled, digested and written by one
thread at a time. Only the digest waits for its turn: it is taken front to back, so it is that of
the file, and any tool can repeat it. What the page cache holds is read from there and stays; all
else is read and written past it. Measured against the other ways in docs/performance-gguf.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from ..errors import GpuboxError
from ..gguf import Identity, padded
from . import system
from .digest import Ledger
from .plan import Literal, Plan, Range

BLOCK = 16 << 20  # bytes of one buffer
THREADS = 3  # as many buffers, and as many again to read into

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


class Origin(Protocol):
    """Where the bytes of a result come from."""

    def fill(self, view: memoryview, position: int, scratch: memoryview) -> None:
        """Fill ``view`` with the bytes at ``position`` of the result.

        ``scratch`` is free to use, begins with a page and is two pages longer than ``view``.
        """


class _File:
    """An open file that is read past the page cache, unless that holds what is asked for."""

    def __init__(self, descriptor: int, scratch: memoryview) -> None:
        self._descriptor = descriptor
        self._direct = system.open_direct(descriptor, os.O_RDONLY)
        self._scratch = scratch
        self._held = (0, 0)  # extent of the file that is in the scratch

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        if self._direct is not None:
            os.close(self._direct)

    def read(self, view: memoryview, offset: int, ahead: int) -> int:
        """Fill ``view`` as far as the file reaches; bytes that it had.

        Args:
            ahead: bytes from ``offset`` on that will be asked for, better read in one go.
        """
        done = self._from_scratch(view, offset)
        if done < len(view):
            cached = system.in_cache(self._descriptor, offset + done, len(view) - done)
            if cached is False and self._direct is not None:
                done += self._past_cache(self._direct, view[done:], offset + done, ahead - done)
            done += self._through_cache(view[done:], offset + done, bool(cached))
        return done

    def _from_scratch(self, view: memoryview, offset: int) -> int:
        start, end = self._held
        if not start <= offset < end:
            return 0
        part = self._scratch[offset - start : min(offset + len(view), end) - start]
        system.move(view, part)
        return len(part)

    def _past_cache(self, direct: int, view: memoryview, offset: int, ahead: int) -> int:
        page = system.PAGE
        if not (offset % page or len(view) % page or system.address(view) % page):
            return _read_pages(direct, view, offset)
        start, end = offset // page * page, padded(offset + ahead, page)
        self._held = (0, 0)
        self._held = (start, start + _read_pages(direct, self._scratch[: end - start], start))
        return self._from_scratch(view, offset)

    def _through_cache(self, view: memoryview, offset: int, keep: bool) -> int:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if not count:
                break
            done += count
        if done and not keep:
            system.forget(self._descriptor, offset, done)
        return done


def _read_pages(direct: int, view: memoryview, offset: int) -> int:
    """Bytes that came: fewer than asked for where the file ends, or cannot be read so."""
    done = 0
    try:
        while done < len(view) and not done % system.PAGE:
            count = os.preadv(direct, [view[done:]], offset + done)
            if not count:
                break
            done += count
    except OSError as error:
        if error.errno not in system.UNSUPPORTED:  # some take the flag and then not the read
            raise
    return done


class Sources:
    """The shards of a plan, held to the state that was planned for.

    Each is opened while it is needed: a set may have more shards than a process open files.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._starts = [0, *accumulate(segment.length for segment in plan.segments)]
        self._identities = [header.identity for header in plan.sources]
        self._used: set[int] = set()

    def path(self, index: int) -> Path:
        """Of shard ``index``."""
        return self._plan.sources[index].path

    @contextlib.contextmanager
    def opened(self, index: int, mode: int = os.O_RDONLY) -> Iterator[int]:
        """File descriptor of shard ``index``."""
        descriptor = os.open(self._plan.sources[index].path, mode | os.O_CLOEXEC)
        try:
            self._require_planned(index, os.fstat(descriptor))
            self._used.add(index)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _file(self, index: int, scratch: memoryview) -> Iterator[_File]:
        path = self.path(index)
        with (
            self.opened(index) as descriptor,
            _File(descriptor, scratch) as file,
            system.blaming(path),
        ):
            yield file

    def fill(self, view: memoryview, position: int, scratch: memoryview) -> None:
        """See `Origin`."""
        index = bisect_right(self._starts, position) - 1
        done, source = 0, -1
        with contextlib.ExitStack() as one:
            while done < len(view):
                segment = self._plan.segments[index]
                skip = position + done - self._starts[index]
                piece = view[done : done + segment.length - skip]
                if isinstance(segment, Range):
                    if segment.source != source:
                        one.close()
                        source = segment.source
                        file = one.enter_context(self._file(source, scratch))
                    if file.read(piece, segment.offset + skip, len(view) - done) < len(piece):
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
        for index in sorted(self._used):
            try:
                status = self._plan.sources[index].path.stat()
            except FileNotFoundError:
                status = None
            self._require_planned(index, status)

    def changed_by_us(self, index: int, descriptor: int) -> None:
        """Take the present state of a shard for the right one."""
        self._identities[index] = Identity.of(os.fstat(descriptor))

    def _require_planned(self, index: int, status: os.stat_result | None) -> None:
        if status is None or Identity.of(status) != self._identities[index]:
            raise GpuboxError(
                f"{self._plan.sources[index].path}: changed while it was being merged",
                "shards that nobody writes",
                "Wait for the download to finish and run again; nothing was published.",
            )


class Reread:
    """A result that is there, read again. Missing bytes read as zeros."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fill(self, view: memoryview, position: int, scratch: memoryview) -> None:
        """See `Origin`."""
        with _File(self._descriptor, scratch) as file:
            done = file.read(view, position, len(view))
        view[done:] = bytes(len(view) - done)


class Target:
    """The unfinished result: whole pages are written past the page cache where that is possible."""

    def __init__(self, descriptor: int) -> None:
        self._buffered = descriptor
        self._direct = system.open_direct(descriptor, os.O_WRONLY)
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
    buffers: queue.SimpleQueue[tuple[memoryview, memoryview]] = queue.SimpleQueue()
    size = min(BLOCK, max(end - start, 1))
    for _ in range(THREADS):
        buffers.put((system.memory(size), system.memory(size + 2 * system.PAGE)))
    turns = _Turns(start)

    def pass_on(position: int) -> int:
        buffer, scratch = buffers.get()
        try:
            view = buffer[: min(size, end - position)]
            if turns.failure is None:
                origin.fill(view, position, scratch)
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
            buffers.put((buffer, scratch))

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            done = 0
            for count in system.each(pool, pass_on, range(start, end, size)):
                done += count
                if progress is not None:
                    progress(done)
        except BaseException as failure:
            turns.stop(failure)
            pool.shutdown(cancel_futures=True)
            raise turns.failure or failure from None
