# SPDX-License-Identifier: Apache-2.0
"""The files of a merge beside its result: the unfinished result and what is remembered of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import GpuboxError
from . import system

MAX_DOCUMENT = 64 << 20  # bytes; a manifest has a few hundred for each shard


def partial_path(dest: Path) -> Path:
    """The unfinished result, in the target folder. A leftover is recognised by this name."""
    return dest.with_name(f".{dest.name}.gpubox-partial")


def journal_path(dest: Path) -> Path:
    """How far the unfinished result is right."""
    return dest.with_name(f".{dest.name}.gpubox-journal")


def manifest_path(dest: Path) -> Path:
    """What the result was made from."""
    return dest.with_name(f"{dest.name}.manifest.json")


def companions(dest: Path) -> tuple[Path, ...]:
    """All names beside ``dest`` that a merge writes or removes."""
    journal, manifest = journal_path(dest), manifest_path(dest)
    return partial_path(dest), journal, manifest, _new(journal), _new(manifest)


def _new(path: Path) -> Path:
    return path.with_name(f".{path.name.lstrip('.')}.gpubox-new")


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Replace a JSON file in one step; it is on the disk when this returns."""
    temporary = _new(path)
    temporary.unlink(missing_ok=True)  # of a killed run; a link would lead elsewhere
    with temporary.open("x", encoding="utf-8") as stream:
        json.dump(document, stream, indent=2)
        stream.write("\n")
        stream.flush()
        system.sync(stream.fileno())
    system.rename(temporary, path)
    system.sync_folder(path.parent)


def read_document(path: Path) -> dict[str, Any]:
    """The JSON file; empty where it is missing or damaged."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_DOCUMENT:  # a FIFO would block
            return {}
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


@contextlib.contextmanager
def partial_file(dest: Path) -> Iterator[int]:
    """Descriptor of the locked, unfinished result.

    Afterwards it is gone unless it was published, or a journal says that going on is worth it. The
    lock tells a running merge from the leftover of one that was killed.
    """
    path = partial_path(dest)
    descriptor = _open_locked(path, os.O_CREAT)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise GpuboxError(
            f"{path}: one of several names of its file",
            "an unfinished result that is nobody else's",
            "Move it away, and its journal, if their content is not needed; then run again.",
        )
    try:
        yield descriptor
    finally:
        if not journal_path(dest).exists():
            _remove_if_same(path, descriptor)  # a published file has left this name
        os.close(descriptor)


def _open_locked(path: Path, flags: int) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise GpuboxError(
                f"{path}: in use, another merge to the same file is running",
                "one merge at a time",
                "Wait for it, or end it, and run again.",
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the other run finished between our open and our lock


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        status = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def _remove_if_same(path: Path, descriptor: int) -> None:
    if _is_same(path, descriptor):
        system.remove(path)


def remove_journal(dest: Path) -> None:
    """The unfinished result is finished, or worth nothing."""
    if journal_path(dest).exists():
        system.remove(journal_path(dest))


def _remove_documents(dest: Path) -> None:
    remove_journal(dest)
    for path in (_new(journal_path(dest)), _new(manifest_path(dest))):
        path.unlink(missing_ok=True)


def remove_leftovers(dest: Path) -> None:
    """Remove the unfinished result of a killed run and its journal, unless somebody works on it."""
    path = partial_path(dest)
    try:
        descriptor = _open_locked(path, 0)
    except FileNotFoundError:
        _remove_documents(dest)
        return
    except (OSError, GpuboxError):  # not ours, or of a merge that is running
        return
    try:
        _remove_documents(dest)
        _remove_if_same(path, descriptor)
    finally:
        os.close(descriptor)
