# SPDX-License-Identifier: Apache-2.0
"""File systems below the paths that matter, and how fast a file comes from its disk."""

from __future__ import annotations

import json
import mmap
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .probe import Fact, Run, known, read_text, tail, unknown

MIB = 1024**2
FINDMNT = (
    "findmnt",
    "--list",
    "--json",
    "--bytes",
    "--output",
    "TARGET,SOURCE,FSTYPE,MAJ:MIN,OPTIONS,SIZE,AVAIL",
)
# ioctl_ficlonerange(2); XFS says it by its own tool, of others (overlay, NFS, ZFS) nothing is said
_REFLINK = {"bcachefs": True, "btrfs": True, "ocfs2": True}
_NO_REFLINK = ("ext2", "ext3", "ext4", "ramfs", "tmpfs", "vfat")
# Bounds of the measurement of a disk: one of them ends it.
SAMPLE_BYTES = 256 * MIB
SAMPLE_SECONDS = 0.3
SAMPLE_SMALLEST = 64 * MIB  # a smaller file tells the latency and not the rate
_BLOCK = 8 * MIB


# --- file systems ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    """A row of findmnt; sizes in bytes, None where it does not say."""

    target: str
    source: str
    file_system: str
    number: str
    options: frozenset[str]
    size_bytes: int | None
    free_bytes: int | None


def _size(value: Any) -> int | None:
    """A size of findmnt: a number, and a text in older versions."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,19}", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def parse_findmnt(text: str) -> list[Mount] | None:
    """Mounts of `FINDMNT` in the order of the kernel, None when the text is not such a list."""
    try:
        rows = json.loads(text)["filesystems"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    found = []
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict) or not isinstance(row.get("target"), str):
            continue
        found.append(
            Mount(
                row["target"],
                str(row.get("source") or ""),
                str(row.get("fstype") or ""),
                str(row.get("maj:min") or "").strip(),
                frozenset(str(row.get("options") or "").split(",")) - {""},
                _size(row.get("size")),
                _size(row.get("avail")),
            )
        )
    return found or None


def mount_of(mounts: Iterable[Mount], path: str) -> Mount | None:
    """The mount that a path lies on; of two on one folder the later one is seen."""
    parts = PurePosixPath(path).parts
    found: Mount | None = None
    for mount in mounts:
        target = PurePosixPath(mount.target).parts
        if parts[: len(target)] == target and (
            found is None or len(target) >= len(PurePosixPath(found.target).parts)
        ):
            found = mount
    return found


def parse_xfs_info(text: str) -> bool | None:
    """Whether an XFS shares blocks, from ``xfs_info``; None when it does not say."""
    match = re.search(r"\breflink=([01])\b", text)
    return match[1] == "1" if match else None


def _reflink(mount: Mount, run: Run) -> bool | None:
    if mount.file_system == "xfs":
        return parse_xfs_info(run(["xfs_info", mount.target]).stdout)
    return False if mount.file_system in _NO_REFLINK else _REFLINK.get(mount.file_system)


def _rotational(root: Path, number: str) -> bool | None:
    """Whether the disk turns; a partition's queue is that of the disk above it."""
    if not re.fullmatch(r"[0-9]{1,6}:[0-9]{1,8}", number):
        return None
    device = root / "sys/dev/block" / number
    for path in (device / "queue/rotational", device / "../queue/rotational"):
        text, _ = read_text(path)
        if text is not None and text.strip() in ("0", "1"):
            return text.strip() == "1"
    return None


def paths(root: Path, run: Run, wanted: Sequence[str]) -> dict[str, Fact]:
    """The fact ``paths``: where each of the wanted paths lies or will lie."""
    source = "findmnt"
    output = run(FINDMNT)
    mounts = None if output.fault else parse_findmnt(output.stdout)
    if mounts is None:
        return {"paths": unknown(tail(output), source)}
    found = {}
    reflinks: dict[str, bool | None] = {}
    for path in wanted:
        # links of a recorded box would lead out of it
        try:
            real = os.path.realpath(path) if root == Path("/") else path
        except ValueError:  # a byte that no path can have
            continue
        mount = mount_of(mounts, real)
        if mount is None:
            continue
        if mount.target not in reflinks:
            reflinks[mount.target] = _reflink(mount, run)
        found[str(PurePosixPath(path))] = {
            "mount": mount.target,
            "device": mount.source,
            "number": mount.number,
            "file_system": mount.file_system,
            "size_bytes": mount.size_bytes,
            "free_bytes": mount.free_bytes,
            "read_only": "ro" in mount.options,
            "noexec": "noexec" in mount.options,
            "reflink": reflinks[mount.target],
            "rotational": _rotational(root, mount.number),
        }
    return {"paths": known(found, source)}


# --- the rate of a disk ---------------------------------------------------------------------------


def _open_uncached(path: Path) -> int:
    """A descriptor whose reads come from the disk as far as the file system lets them."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:  # tmpfs and others have no direct reads, and another's file no O_NOATIME
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return descriptor


def read_speed(path: Path) -> int | None:
    """Bytes a second that come from a file's disk, by a read that is short in size and in time.

    Only the file is read and nothing is ever written. One reader with large blocks: an array of
    disks can do more.

    Raises:
        OSError: the file cannot be read.
    """
    descriptor = _open_uncached(path)
    try:
        start = os.fstat(descriptor).st_size // 2 // _BLOCK * _BLOCK
        done, begin = 0, time.monotonic()
        with mmap.mmap(-1, _BLOCK) as buffer:  # whole pages, as direct reads need them
            while done < SAMPLE_BYTES and time.monotonic() - begin < SAMPLE_SECONDS:
                count = os.preadv(descriptor, [buffer], start + done)
                done += count
                if count < _BLOCK:
                    break
        seconds = time.monotonic() - begin
    finally:
        os.close(descriptor)
    return int(done / seconds) if done and seconds > 0 else None


def read_speeds(root: Path, samples: Sequence[str]) -> dict[str, Fact]:
    """The fact ``read_speeds``: bytes a second of the first sample that is large enough."""
    source = "a short read past the page cache"
    reasons = []
    for sample in samples:
        path = root / sample.lstrip("/")
        try:
            if not path.is_file() or path.stat().st_size < SAMPLE_SMALLEST:
                reasons.append(f"{path} is no file of {SAMPLE_SMALLEST // MIB} MiB or more")
                continue
            speed = read_speed(path)
        except OSError as error:
            reasons.append(f"{path}: {error.strerror or error}")
            continue
        if speed:
            return {"read_speeds": known({sample: speed}, source)}
        reasons.append(f"{path} gave nothing")
    return {"read_speeds": unknown("; ".join(reasons) or "no file was named to read", source)}
