# SPDX-License-Identifier: Apache-2.0
"""Stops a merge at any of the calls that change a file, in a process of its own.

`gpubox.gguf_merge.system` holds all of these calls. A killed process loses nothing that it wrote; a
machine that loses its power may lose whatever was not synchronised, and `Power` takes that back.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpubox.gguf_merge import system

CALLS = (
    "write", "truncate", "preallocate", "punch", "clone", "sync_data", "sync", "rename", "remove",
    "mark", "unmark",
)  # fmt: skip
FINISHED, FAILED = 0, 3


class Power:
    """Keeps what is needed to undo all that is not on the disk yet."""

    def __init__(self, attic: Path, dice: random.Random) -> None:
        self._attic = attic
        self._dice = dice
        self._written: list[tuple[int, int, bytes]] = []  # inode, position, bytes before
        self._names: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._real = {name: getattr(system, name) for name in CALLS}
        attic.mkdir(exist_ok=True)

    def install(self) -> None:
        for name in ("write", "sync_data", "sync", "rename", "remove"):
            setattr(system, name, getattr(self, name))

    def write(self, descriptor: int, data: memoryview | bytes, position: int) -> int:
        with self._lock:
            reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
            before = os.pread(reader, len(data), position).ljust(len(data), b"\0")
            os.close(reader)
            done: int = self._real["write"](descriptor, data, position)
            self._written.append((os.fstat(descriptor).st_ino, position, before[:done]))
            return done

    def sync(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        self._written = [entry for entry in self._written if entry[0] != inode]
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            self._names = []

    sync_data = sync

    def _keep(self, path: Path) -> Path:
        kept = self._attic / str(len(list(self._attic.iterdir())))
        path.rename(kept)
        return kept

    def rename(self, old: Path, new: Path) -> None:
        kept = self._keep(new) if new.exists() else None
        old.rename(new)

        def undo() -> None:
            new.rename(old)
            if kept is not None:
                kept.rename(new)

        self._names.append(undo)

    def remove(self, path: Path) -> None:
        kept = self._keep(path)
        self._names.append(lambda: kept.rename(path))

    def lose(self, folder: Path) -> None:
        """Lose some of what is not on the disk; names only from the last one backwards."""
        files = {path.stat().st_ino: path for path in folder.rglob("*") if path.is_file()}
        for inode, position, before in reversed(self._written):
            if inode in files and self._dice.random() < 0.5:
                with files[inode].open("rb+") as stream:
                    os.pwrite(stream.fileno(), before, position)
        for undo in reversed(self._names):
            if self._dice.random() < 0.5:
                break
            undo()


def in_a_child(work: Callable[[], object], prepare: Callable[[], None] = lambda: None) -> int:
    """Exit status of a forked process that does ``work``; -9 when it was killed."""
    process = os.fork()
    if not process:
        status = FAILED
        with contextlib.suppress(BaseException):
            prepare()
            work()
            status = FINISHED
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def stop_at(number: int, power: Power | None = None, folder: Path | None = None) -> None:
    """Kill this process at its call number ``number``, counted from 0.

    Half of a write is done before, and every second time the call itself.
    """
    if power is not None:
        power.install()
    left = [number]
    lock = threading.Lock()

    def end() -> None:
        if power is not None and folder is not None:
            power.lose(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            with lock:  # the others wait for ever, as threads of a killed process
                left[0] -= 1
                if left[0] < 0:
                    if name == "write":
                        call(arguments[0], bytes(arguments[1][: len(arguments[1]) // 2]),
                             arguments[2])  # fmt: skip
                    elif number % 2:
                        call(*arguments)
                    end()
            return call(*arguments)

        return wrapped

    for name in CALLS:
        setattr(system, name, wrap(name, getattr(system, name)))


def count_calls(work: Callable[[], object], tally: Path) -> int:
    """How many calls a whole run makes."""

    def prepare() -> None:
        for name in CALLS:
            call = getattr(system, name)

            def counted(*arguments: Any, call: Callable[..., Any] = call) -> Any:
                with tally.open("ab") as stream:
                    stream.write(b".")
                return call(*arguments)

            setattr(system, name, counted)

    assert in_a_child(work, prepare) == FINISHED
    return tally.stat().st_size
