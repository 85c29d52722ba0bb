# SPDX-License-Identifier: Apache-2.0
"""Copies, publishes and remembers the merger of a set."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import GpuboxError
from ..gguf import Header, Identity, read_header
from .plan import Literal, Plan, Range, Zeros, make_plan
from .shards import SHARD_NAME, combined, read_set, shard_paths

MANIFEST_FORMAT = "gpubox.gguf_merge/1"
STEP = 64 << 20  # bytes between two reports of progress
BLOCK = 4 << 20  # bytes of one read where the kernel cannot copy by itself

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


class _Sources:
    """Open files of a plan, opened when first needed and held to the state that was planned for."""

    def __init__(self, headers: Sequence[Header]) -> None:
        self._headers = headers
        self._descriptors: dict[int, int] = {}

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def descriptor(self, index: int) -> int:
        """File descriptor of source ``index``."""
        if index not in self._descriptors:
            self._descriptors[index] = os.open(
                self._headers[index].path, os.O_RDONLY | os.O_CLOEXEC
            )
            self._require_unchanged(index)
        return self._descriptors[index]

    def require_unchanged(self) -> None:
        """Raise `GpuboxError` if a source that was read is no longer what was planned for."""
        for index in self._descriptors:
            self._require_unchanged(index)

    def _require_unchanged(self, index: int) -> None:
        header = self._headers[index]
        if Identity.of(os.fstat(self._descriptors[index])) != header.identity:
            raise GpuboxError(
                f"{header.path}: changed while it was being merged",
                "shards that nobody writes",
                "Wait for the download to finish and run again; nothing was published.",
            )


# errors with which a file system or kernel says that it cannot copy by itself
_CANNOT_COPY = {
    errno.EXDEV,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EBADF,
    errno.ETXTBSY,
}


def _by_copy_file_range(source: int, target: int, offset: int, position: int, length: int) -> int:
    return os.copy_file_range(source, target, length, offset, position)


def _by_sendfile(source: int, target: int, offset: int, position: int, length: int) -> int:
    os.lseek(target, position, os.SEEK_SET)
    return os.sendfile(target, source, offset, length)


def _by_read_and_write(source: int, target: int, offset: int, position: int, length: int) -> int:
    block = os.pread(source, min(length, BLOCK), offset)
    _write_all(target, block, position)
    return len(block)


def _write_all(target: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(target, view, position)
        view = view[written:]
        position += written


CopyMethod = Callable[[int, int, int, int, int], int]
"""Copies at most so many bytes: source and target descriptor, their offsets, length; bytes done."""

# from the kernel's own copy (blocks may be shared) to the one that works everywhere
COPY_METHODS: tuple[CopyMethod, ...] = (_by_copy_file_range, _by_sendfile, _by_read_and_write)


def copy(plan: Plan, target: int, progress: Progress | None = None) -> None:
    """Write the whole result of ``plan`` into the empty file with descriptor ``target``.

    Raises:
        GpuboxError: a source changed or became shorter.
        OSError: the disk is full or broken.
    """
    methods = list(COPY_METHODS)
    total, position = plan.size, 0
    with _Sources(plan.sources) as sources:
        for segment in plan.segments:
            if isinstance(segment, Range):
                for done in _copy_range(segment, sources, target, position, methods):
                    if progress is not None:
                        progress(position + done, total)
            else:
                done = 0
                for data in _own_bytes(segment):
                    _write_all(target, data, position + done)
                    done += len(data)
            position += segment.length
        sources.require_unchanged()
    if progress is not None:
        progress(position, total)


def _copy_range(
    segment: Range, sources: _Sources, target: int, position: int, methods: list[CopyMethod]
) -> Iterator[int]:
    """Copy one range to ``position``; yields the bytes done. Drops the methods that do not work."""
    source = sources.descriptor(segment.source)
    done = 0
    while done < segment.length:
        length = min(segment.length - done, STEP)
        try:
            copied = methods[0](source, target, segment.offset + done, position + done, length)
        except OSError as error:
            if len(methods) == 1 or error.errno not in _CANNOT_COPY:
                raise
            copied = 0
        if copied:
            done += copied
            yield done
        elif len(methods) > 1:
            del methods[0]
        else:
            sources.require_unchanged()
            raise OSError(errno.EIO, "a source ends early")


def _own_bytes(segment: Literal | Zeros) -> Iterator[bytes]:
    if isinstance(segment, Literal):
        yield segment.data
        return
    left = segment.length
    while left:
        yield bytes(min(left, BLOCK))
        left -= min(left, BLOCK)


def holds(plan: Plan, path: Path, progress: Progress | None = None) -> bool:
    """Whether ``path`` already holds exactly the result of ``plan``; reads both when it may."""
    total, position = plan.size, 0
    with path.open("rb", buffering=0) as stream, _Sources(plan.sources) as sources:
        if os.fstat(stream.fileno()).st_size != total:
            return False
        for segment in plan.segments:
            done = 0
            while done < segment.length:
                length = min(segment.length - done, BLOCK)
                if isinstance(segment, Range):
                    descriptor = sources.descriptor(segment.source)
                    expected = os.pread(descriptor, length, segment.offset + done)
                elif isinstance(segment, Literal):
                    expected = segment.data[done : done + length]
                else:
                    expected = bytes(length)
                if not expected or os.pread(stream.fileno(), len(expected), position) != expected:
                    return False
                done += len(expected)
                position += len(expected)
                if progress is not None:
                    progress(position, total)
        sources.require_unchanged()
    return True


def partial_path(dest: Path) -> Path:
    """The unfinished result, in the target folder. A leftover is recognised by this name."""
    return dest.with_name(f".{dest.name}.gpubox-partial")


def manifest_path(dest: Path) -> Path:
    """The manifest beside the result."""
    return dest.with_name(f"{dest.name}.manifest.json")


@contextlib.contextmanager
def partial_file(dest: Path) -> Iterator[int]:
    """Descriptor of an empty, locked, unfinished result; gone afterwards unless it was published.

    The lock tells a running merge from the leftover of one that was killed.
    """
    path = partial_path(dest)
    descriptor = _open_locked(path, os.O_CREAT)
    try:
        os.ftruncate(descriptor, 0)
        yield descriptor
        # a published file has left this name
    finally:
        _unlink_if_same(path, descriptor)
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


def _unlink_if_same(path: Path, descriptor: int) -> None:
    if _is_same(path, descriptor):
        path.unlink()


def remove_leftover(dest: Path) -> bool:
    """Remove the unfinished result of a killed run, if there is one and nobody works on it."""
    path = partial_path(dest)
    try:
        descriptor = _open_locked(path, 0)
    except (OSError, GpuboxError):  # none, not ours, or of a merge that is running
        return False
    try:
        _unlink_if_same(path, descriptor)
    finally:
        os.close(descriptor)
    return True


def publish(plan: Plan, descriptor: int, dest: Path) -> None:
    """Give the finished file its name, once it is on the disk and its header is what was planned.

    A file that it replaces hands on its mode and, as far as we may, its owner.
    """
    written = read_header(partial_path(dest))
    if (written.tensors, written.size) != (plan.tensors, plan.size):
        raise GpuboxError(
            f"{partial_path(dest)}: not what was to be written",
            f"{len(plan.tensors)} tensors in {plan.size} bytes",
            "Check the memory and the disk of this machine; nothing was published.",
        )
    try:
        old = dest.stat()
    except FileNotFoundError:
        pass
    else:
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
    os.fsync(descriptor)
    partial_path(dest).replace(dest)
    _sync_folder(dest.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(plan: Plan, dest: Path) -> None:
    """Record what ``dest`` was made from. Written last; without it the next run compares."""
    merged = dest.stat()
    document = {
        "format": MANIFEST_FORMAT,
        "merged": {"name": dest.name, "size": merged.st_size, "mtime_ns": merged.st_mtime_ns},
        "tensors": len(plan.tensors),
        "sources": [
            {
                "name": header.path.name,
                "size": header.size,
                "mtime_ns": header.identity.mtime_ns,
            }
            for header in plan.sources
        ],
    }
    path = manifest_path(dest)
    temporary = path.with_name(f".{path.name}.gpubox-partial")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(document, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    _sync_folder(dest.parent)


def known_result(paths: Sequence[Path], dest: Path) -> int | None:
    """Tensors in ``dest`` if its manifest proves it to be the merger of ``paths``, else None.

    Size and modification time stand for the content, of the result and of the sources. Sources
    that are gone do not matter.
    """
    try:
        document = json.loads(manifest_path(dest).read_text(encoding="utf-8"))
        merged = dest.stat()
        recorded = document["sources"]
        if document["format"] != MANIFEST_FORMAT:
            return None
        if (merged.st_size, merged.st_mtime_ns) != (
            document["merged"]["size"],
            document["merged"]["mtime_ns"],
        ):
            return None
        if [source["name"] for source in recorded] != [path.name for path in paths]:
            return None
        for path, source in zip(paths, recorded, strict=True):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if (status.st_size, status.st_mtime_ns) != (source["size"], source["mtime_ns"]):
                return None
        return int(document["tensors"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Result:
    """What `merge` did, or in check mode would do.

    ``action``: ``merged`` or ``copied`` (written), ``adopted`` (the file was right already, its
    manifest is new), ``unchanged``, ``awaited`` (check mode: the shards are not there yet).
    """

    action: str
    path: Path
    sources: tuple[Path, ...]
    size: int | None  # bytes of the result
    tensors: int | None
    seconds: float

    @property
    def changed(self) -> bool:
        """Whether anything on the disk differs from before."""
        return self.action != "unchanged"


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


def reserve(size: int) -> int:
    """Bytes that stay free on the file system besides a result of ``size``: 5 %, at most 4 GiB."""
    return min(size // 20, 4 << 30)


def space_fault(plan: Plan, dest: Path) -> GpuboxError | None:
    """Why the result does not fit on the file system of ``dest``."""
    status = os.statvfs(dest.parent)
    free = status.f_bavail * status.f_frsize
    with contextlib.suppress(FileNotFoundError):
        free += partial_path(dest).stat().st_blocks * 512  # removed before anything is written
    needed = plan.size + reserve(plan.size)
    if free >= needed:
        return None
    return GpuboxError(
        f"{dest.parent}: {free} bytes free ({free / 1e9:.1f} GB)",
        f"{needed} bytes ({needed / 1e9:.1f} GB: the result of {plan.size} and a reserve)",
        "Free space there, or choose a destination on another file system.",
    )


def merge(
    src: Path, dest: Path, check_mode: bool = False, progress: Progress | None = None
) -> Result:
    """Make ``dest`` the merger of the set that ``src`` belongs to; a whole file is copied.

    A symbolic link as ``dest`` is followed. The sources are never written to.

    Args:
        src: any shard of the set, or a file that was never split.
        dest: the result; when it is ``src`` itself, a whole file, nothing is to be done.
        check_mode: write nothing, also nothing temporary.
        progress: called with bytes done and bytes in all.

    Raises:
        GpuboxError: all faults of the set, the destination and the space in one message; or the
            copy failed. Then ``dest`` is as it was.
    """
    started = time.monotonic()
    dest = Path(os.path.realpath(dest))
    paths = shard_paths(src)
    try:
        action, size, tensors = _merge(paths, dest, check_mode, progress)
    except OSError as error:
        raise GpuboxError(
            f"{error.filename or dest}: {error.strerror or error}",
            f"the merger of {len(paths)} files in {dest}",
            "Free space, or repair permissions or the file system, and run again; "
            "nothing was published and the inputs are untouched.",
        ) from error
    return Result(action, dest, tuple(paths), size, tensors, time.monotonic() - started)


def _merge(
    paths: Sequence[Path], dest: Path, check_mode: bool, progress: Progress | None
) -> tuple[str, int | None, int | None]:
    """Action, bytes and tensors of the result; see `merge`."""
    tensors = known_result(paths, dest)
    if tensors is not None:
        if not check_mode:
            remove_leftover(dest)
        return "unchanged", dest.stat().st_size, tensors
    if check_mode and not any(path.exists() for path in paths):
        return "awaited", None, None

    headers, faults = read_set(paths)
    if not faults and len(paths) == 1 and dest.exists() and paths[0].samefile(dest):
        return "unchanged", headers[0].size, len(headers[0].tensors)
    faults += destination_faults(dest, headers, check_mode)
    if faults:
        raise combined(faults, f"{len(paths)} whole shards of one set and a usable destination")
    plan = make_plan(headers)
    if _same_header(plan, dest) and (check_mode or holds(plan, dest, progress)):
        action = "adopted"
        if not check_mode:
            remove_leftover(dest)
            write_manifest(plan, dest)
    else:
        action = "merged" if len(plan.segments) > 1 else "copied"
        fault = space_fault(plan, dest) if dest.parent.is_dir() else None
        if fault is not None:
            raise fault
        if not check_mode:
            with partial_file(dest) as descriptor:
                copy(plan, descriptor, progress)
                publish(plan, descriptor, dest)
            write_manifest(plan, dest)
    return action, plan.size, len(plan.tensors)


def _same_header(plan: Plan, dest: Path) -> bool:
    """Whether ``dest`` may be the result already, judged by its header and length."""
    try:
        header = read_header(dest)
    except GpuboxError:
        return False
    return (header.size, header.tensors) == (plan.size, plan.tensors)
