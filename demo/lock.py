# SPDX-License-Identifier: Apache-2.0
"""Locks between processes; the kernel drops them when their holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpubox.errors import GpuboxError


@contextmanager
def alone(path: Path, what: str) -> Iterator[None]:
    """Hold ``path`` for this process.

    Raises:
        GpuboxError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            raise GpuboxError(
                f"{what} is already running (PID {stream.read().strip() or 'unknown'})",
                "one run at a time",
                "wait for it to end, or end it with Ctrl-C where it runs, then repeat",
            ) from error
        _sign(stream.fileno())
        yield


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Hold ``path`` for this process, waiting until it is free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        _sign(stream.fileno())
        yield


def holder(path: Path) -> str | None:
    """The number of the process that holds ``path``, None when nobody does."""
    if not path.exists():
        return None
    with path.open(encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return stream.read().strip() or "unknown"
    return None


def _sign(handle: int) -> None:
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
