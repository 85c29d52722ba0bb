# SPDX-License-Identifier: Apache-2.0
"""What may not be written to, and how much space a merge takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import GpuboxError
from ..gguf import Header
from .files import companions
from .plan import Plan, Range
from .shards import SHARD_NAME
from .system import PAGE


def require_usable(*paths: Path) -> None:
    """Raise `GpuboxError` for a path that no file can have, or that cannot be reached."""
    for path in paths:
        try:
            if path.name:
                path.stat()
                continue
            reason = "no name of a file"
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            reason = str(error.strerror)
        except ValueError as error:  # a NUL byte, or what no encoding has
            reason = str(error)
        raise GpuboxError(
            f"{path}: {reason}",
            "a path that a file can have, and the files beside it, whose names are longer",
            "Choose another path, or repair the permissions of its folders.",
        )


def destination_faults(
    dest: Path, headers: Sequence[Header], check_mode: bool
) -> list[GpuboxError]:
    """Why nothing may be written to ``dest``."""
    faults = []
    match = SHARD_NAME.fullmatch(dest.name)
    if match is not None and int(match["count"]) != 1:
        faults.append(
            GpuboxError(
                f"{dest}: named like a shard",
                "a name without -NNNNN-of-NNNNN, or loaders will look for the other shards",
                "Choose another destination.",
            )
        )
    if dest.is_dir():
        faults.append(GpuboxError(f"{dest}: a directory", "a file name", "Name the file in it."))
    elif dest.exists():
        if not dest.is_file():
            faults.append(
                GpuboxError(f"{dest}: not a regular file", "a file", "Choose another destination.")
            )
        for header in headers:
            if os.path.samestat(dest.stat(), header.path.stat()):
                faults.append(
                    GpuboxError(
                        f"{dest}: is the input {header.path}",
                        "a file that is none of the inputs",
                        "Choose another destination; inputs are never written to.",
                    )
                )
    for path in companions(dest):
        if path.is_dir() and not path.is_symlink():
            faults.append(
                GpuboxError(
                    f"{path}: a directory",
                    f"a name that is free for a file: a merge to {dest} writes it",
                    "Move it away, or choose another destination.",
                )
            )
        for header in headers:
            if path.exists() and path.samefile(header.path):
                faults.append(
                    GpuboxError(
                        f"{header.path}: is {path}, which a merge to {dest} writes",
                        "inputs with names of their own",
                        "Choose another destination, or rename the input.",
                    )
                )
    if not dest.parent.is_dir():
        if not check_mode:  # an earlier task may be about to make it
            faults.append(
                GpuboxError(f"{dest.parent}: no such folder", "a folder", "Create it first.")
            )
    elif not os.access(dest.parent, os.W_OK | os.X_OK):
        faults.append(
            GpuboxError(
                f"{dest.parent}: not writable for user id {os.geteuid()}",
                "a folder to write to",
                "Run as its owner, or choose another destination.",
            )
        )
    return faults


def in_place_faults(dest: Path, headers: Sequence[Header], check_mode: bool) -> list[GpuboxError]:
    """Why the shards may not be consumed by a merge to ``dest``."""
    faults = []
    for folder in dict.fromkeys(header.path.parent for header in headers):
        if not check_mode and not os.access(folder, os.W_OK | os.X_OK):
            faults.append(
                GpuboxError(
                    f"{folder}: not writable for user id {os.geteuid()}",
                    "a folder from which the shards can be removed when they are merged",
                    "Run as its owner, or merge with the method copy.",
                )
            )
    for header in headers:
        status = header.path.stat(follow_symlinks=False)
        if header.path.is_symlink() or status.st_nlink > 1:
            faults.append(
                GpuboxError(
                    f"{header.path}: a symbolic link, or one of several names of its file",
                    "shards that nobody else uses: in place their content is taken away",
                    "Merge with the method copy.",
                )
            )
        elif dest.parent.is_dir() and status.st_dev != dest.parent.stat().st_dev:
            faults.append(
                GpuboxError(
                    f"{header.path}: not on the file system of {dest.parent}",
                    "shards and result on one file system, or taking them away frees nothing",
                    "Merge with the method copy, or choose another destination.",
                )
            )
        elif not check_mode and not os.access(header.path, os.W_OK):
            faults.append(
                GpuboxError(
                    f"{header.path}: not writable for user id {os.geteuid()}",
                    "shards whose content may be taken away",
                    "Run as their owner, or merge with the method copy.",
                )
            )
    return faults


def reserve(size: int) -> int:
    """Bytes that stay free on the file system besides ``size`` new ones: 5 %, at most 4 GiB."""
    return min(size // 20, 4 << 30)


@dataclass(frozen=True)
class Space:
    """Bytes on the file system of a result."""

    needed: int
    reserve: int
    free: int

    def __str__(self) -> str:
        """For people."""
        return (
            f"needs {self.needed / 1e9:.2f} GB, {self.free / 1e9:.2f} GB are free, "
            f"{self.reserve / 1e9:.2f} GB of it are kept as a reserve"
        )

    def fault(self, folder: Path) -> GpuboxError | None:
        """Why the result does not fit."""
        wanted = self.needed + self.reserve
        if self.free >= wanted:
            return None
        return GpuboxError(
            f"{folder}: {self.free} bytes free ({self.free / 1e9:.1f} GB)",
            f"{wanted} bytes ({wanted / 1e9:.1f} GB: {self.needed} for the result "
            f"and a reserve of {self.reserve})",
            "Free space there, or choose a destination on another file system.",
        )


def space(dest: Path, at_once: int, held: int) -> Space:
    """What is needed and what is there.

    Args:
        at_once: bytes that are new on the disk before old ones are given back: all of the result,
            one epoch in place, or what is not shared.
        held: bytes of an interrupted run that count as free.
    """
    status = os.statvfs(dest.parent)
    return Space(at_once, reserve(at_once), status.f_bavail * status.f_frsize + held)


def pieces(plan: Plan) -> tuple[list[tuple[int, Range]], list[tuple[int, int]]]:
    """Which whole pages of the result can be shared, and which extents must be copied.

    Returns:
        Positions with ranges of a shard that begin and end with a page in both files; and
        ``(start, end)`` of everything else.
    """
    shared: list[tuple[int, Range]] = []
    copied: list[tuple[int, int]] = []
    position = copied_from = 0
    for segment in plan.segments:
        if isinstance(segment, Range) and (segment.offset - position) % PAGE == 0:
            skip = -position % PAGE
            length = (segment.length - skip) // PAGE * PAGE
            if length > 0:
                start = position + skip
                if start > copied_from:
                    copied.append((copied_from, start))
                shared.append((start, Range(segment.source, segment.offset + skip, length)))
                copied_from = start + length
        position += segment.length
    if position > copied_from:
        copied.append((copied_from, position))
    return shared, copied
