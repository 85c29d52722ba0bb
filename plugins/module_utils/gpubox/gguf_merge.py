# SPDX-License-Identifier: Apache-2.0
"""Merges GGUF shards into one file, byte for byte what ``llama-gguf-split --merge`` writes.

Three steps that know nothing of each other's insides: `make_plan` checks every shard and lays the
result out as a list of segments (nothing is written), a copier fills a temporary file in the
target folder, and `publish` makes it visible with one rename. A manifest beside the result lets a
rerun know it again without reading it, also when the shards are gone.

Command line: ``python -m gpubox.gguf_merge SHARD DEST``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import GpuboxError
from .gguf import (
    DEFAULT_ALIGNMENT,
    KEY_ARCHITECTURE,
    KEY_QUANTIZATION_VERSION,
    KEY_SPLIT_COUNT,
    KEY_SPLIT_NO,
    KEY_SPLIT_TENSORS_COUNT,
    MAGIC,
    Header,
    Identity,
    Tensor,
    ValueType,
    padded,
    read_header,
)

SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
OUTPUT_VERSION = 3
MANIFEST_FORMAT = "gpubox.gguf_merge/1"
FAULTS_SHOWN = 40  # of a set that is wrong all over
STEP = 64 << 20  # bytes between two reports of progress
BLOCK = 4 << 20  # bytes of one read where the kernel cannot copy by itself

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


# ---------------------------------------------------------------------------------- the set


def shard_paths(src: Path) -> list[Path]:
    """All shards of the set that ``src`` belongs to, in order; ``src`` alone when it is no shard.

    The name alone decides (``PREFIX-NNNNN-of-NNNNN.gguf``, numbered from 1, ggml docs/gguf.md):
    the folder is not searched, so neither a foreign nor a missing file can change the set.

    Raises:
        GpuboxError: the number in the name is outside the set.
    """
    match = SHARD_NAME.fullmatch(src.name)
    if match is None:
        return [src]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise GpuboxError(
            f"{src}: shard {number} of {count}",
            f"a number from 1 to {count}",
            "Correct the name; shards are numbered from 1.",
        )
    return [
        src.with_name(f"{match['prefix']}-{index:05d}-of-{count:05d}.gguf")
        for index in range(1, count + 1)
    ]


def combined(faults: Sequence[GpuboxError], wanted: str) -> GpuboxError:
    """One error that lists all ``faults``, each with what was expected, and every remedy once."""
    if len(faults) == 1:
        return faults[0]
    lines = [f"{fault.measured}; expected: {fault.wanted}" for fault in faults[:FAULTS_SHOWN]]
    if len(faults) > FAULTS_SHOWN:
        lines.append(f"… and {len(faults) - FAULTS_SHOWN} more")
    remedies = dict.fromkeys(fault.remedy for fault in faults[:FAULTS_SHOWN])
    return GpuboxError(
        f"{len(faults)} faults\n  " + "\n  ".join(lines), wanted, "\n  ".join(remedies)
    )


def read_set(paths: Sequence[Path]) -> tuple[list[Header], list[GpuboxError]]:
    """Headers of all readable files, and every fault of each file and of the set as a whole."""
    headers: list[Header | None] = []
    faults: list[GpuboxError] = []
    for path in paths:
        try:
            headers.append(read_header(path))
        except GpuboxError as error:
            headers.append(None)
            faults.append(error)
    present = [header for header in headers if header is not None]
    if headers[0] is not None and len(paths) == 1 and _is_whole(headers[0]):
        faults += _whole_file_faults(headers[0])
        return present, faults
    for index, header in enumerate(headers):
        if header is not None:
            faults += _split_faults(header, index, len(paths))
    faults += _kinship_faults(present)
    faults += _duplicates(present)
    if len(present) == len(paths):
        faults += _tensor_count_faults(present)
    # without the first shard its alignment, which the others may lack, is unknown
    if headers[0] is not None:
        for header in present:
            fault = header.layout_fault(alignment_of(header, headers[0]))
            if fault is not None:
                faults.append(fault)
    return present, faults


def _is_whole(header: Header) -> bool:
    """A file that was never split, or the result of a merge (split.count 0).

    The name -00001-of-00001 without split keys is a hub's convention for a single file.
    """
    entry = header.keys.get(KEY_SPLIT_COUNT)
    return entry is None or entry.integer == 0 or SHARD_NAME.fullmatch(header.path.name) is None


def _whole_file_faults(header: Header) -> list[GpuboxError]:
    faults = []
    entry = header.keys.get(KEY_SPLIT_COUNT)
    if entry is not None and entry.integer != 0:
        number = header.keys.get(KEY_SPLIT_NO)
        part = "?" if number is None or number.integer is None else number.integer + 1
        faults.append(
            GpuboxError(
                f"{header.path}: {KEY_SPLIT_COUNT} says that it is shard {part} of {entry.value}",
                "a file of its own, or a name that ends in -NNNNN-of-NNNNN.gguf",
                "Give the shards the names they were published under; "
                "a file joined with cat is no model.",
            )
        )
    fault = header.layout_fault(alignment_of(header, header))
    return [*faults, fault] if fault is not None else faults


def alignment_of(header: Header, first: Header) -> int:
    """Alignment that the data of ``header`` really has, in bytes.

    Only the first shard of a set holds metadata. Some writers (gguf-py) lay the others out with the
    first one's alignment, some (llama-gguf-split) with 32: the length of the file tells which.
    """
    if header.own_alignment is not None:
        return header.own_alignment
    inherited = first.own_alignment or DEFAULT_ALIGNMENT
    if header.layout_fault(inherited) is None or header.layout_fault(DEFAULT_ALIGNMENT) is not None:
        return inherited
    return DEFAULT_ALIGNMENT


def _split_faults(header: Header, index: int, count: int) -> list[GpuboxError]:
    """What split.no and split.count say against the name. split.no counts from 0."""
    faults = []
    for key, expected, meaning in (
        (KEY_SPLIT_NO, index, f"its name says shard {index + 1}"),
        (KEY_SPLIT_COUNT, count, f"its name says {count} shards"),
    ):
        entry = header.keys.get(key)
        found = "no" if entry is None else f"{entry.value!r} as"
        if entry is None or entry.integer != expected:
            faults.append(
                GpuboxError(
                    f"{header.path}: {found} {key}",
                    f"{expected} ({meaning})",
                    "Give each shard the name it was published under, or fetch the set again.",
                )
            )
    return faults


def _kinship_faults(headers: Sequence[Header]) -> list[GpuboxError]:
    """Shards that say another architecture or quantisation version than the first one that does."""
    faults = []
    for key in (KEY_ARCHITECTURE, KEY_QUANTIZATION_VERSION):
        told = [(header, header.keys[key].value) for header in headers if key in header.keys]
        for header, value in told[1:]:
            if value != told[0][1]:
                faults.append(
                    GpuboxError(
                        f"{header.path}: {key} is {value!r}",
                        f"{told[0][1]!r}, as in {told[0][0].path.name}",
                        "This shard is of another model or revision; fetch the set again.",
                    )
                )
    return faults


def _duplicates(headers: Sequence[Header]) -> list[GpuboxError]:
    home: dict[str, Path] = {}
    faults = []
    for header in headers:
        for tensor in header.tensors:
            first = home.setdefault(tensor.name, header.path)
            if first != header.path:
                faults.append(
                    GpuboxError(
                        f"{header.path}: tensor {tensor.name} is in {first.name} too",
                        "each tensor in one shard",
                        "One of the two is of another set; fetch the set again.",
                    )
                )
    return faults


def _tensor_count_faults(headers: Sequence[Header]) -> list[GpuboxError]:
    """split.tensors.count is the total of the set, in every shard."""
    total = sum(len(header.tensors) for header in headers)
    faults = []
    for header in headers:
        entry = header.keys.get(KEY_SPLIT_TENSORS_COUNT)
        if entry is not None and entry.integer != total:
            faults.append(
                GpuboxError(
                    f"{header.path}: {KEY_SPLIT_TENSORS_COUNT} is {entry.value!r}",
                    f"{total}, the tensors of all {len(headers)} shards",
                    "A shard is of another revision or was renumbered; fetch the set again.",
                )
            )
    return faults


# ---------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Literal:
    """Bytes that the plan makes."""

    data: bytes

    @property
    def length(self) -> int:
        """Bytes."""
        return len(self.data)


@dataclass(frozen=True)
class Range:
    """Bytes of one of the sources."""

    source: int
    offset: int
    length: int


@dataclass(frozen=True)
class Zeros:
    """Padding."""

    length: int


Segment = Literal | Range | Zeros


@dataclass(frozen=True)
class Plan:
    """The whole result, front to back. A pure function of the sources' headers."""

    sources: tuple[Header, ...]
    segments: tuple[Segment, ...]
    tensors: tuple[Tensor, ...]  # of the result, offsets included
    header_size: int  # bytes in front of the data section
    alignment: int

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return sum(segment.length for segment in self.segments)


def make_plan(headers: Sequence[Header]) -> Plan:
    """Lay out the merger of a checked set (see `read_set`); a whole file is taken as it is.

    The rules are those of llama-gguf-split: the keys of the first shard only, byte for byte, with
    split.count 0 behind them; version 3; trailing dimensions of 1 dropped; tensors in the order of
    the shards, each padded with zeros. Unlike it, the alignment of the first shard is kept.
    """
    first = headers[0]
    alignment = first.own_alignment or DEFAULT_ALIGNMENT
    if len(headers) == 1 and _is_whole(first):
        return Plan(
            (first,),
            (Range(0, 0, first.size),),
            first.tensors,
            first.data_start(alignment),
            alignment,
        )
    tensors = _laid_out(headers, alignment)
    segments = [
        *_metadata(first, len(tensors)),
        Literal(b"".join(_tensor_record(tensor) for tensor in tensors)),
    ]
    table_end = sum(segment.length for segment in segments)
    header_size = padded(table_end, alignment)
    segments.append(Zeros(header_size - table_end))
    for index, header in enumerate(headers):
        start = header.data_start(alignment_of(header, first))
        for tensor in header.tensors:
            segments.append(Range(index, start + tensor.offset, tensor.size))
            segments.append(Zeros(padded(tensor.size, alignment) - tensor.size))
    return Plan(tuple(headers), tuple(_joined(segments)), tensors, header_size, alignment)


def _metadata(first: Header, tensor_count: int) -> list[Segment]:
    """Preamble and keys."""
    segments: list[Segment] = [
        Literal(MAGIC + struct.pack("<IQQ", OUTPUT_VERSION, tensor_count, len(first.keys)))
    ]
    for entry in first.keys.values():
        if entry.key != KEY_SPLIT_COUNT:
            segments.append(Range(0, entry.start, entry.end - entry.start))
    key = KEY_SPLIT_COUNT.encode()
    segments.append(
        Literal(struct.pack("<Q", len(key)) + key + struct.pack("<IH", ValueType.UINT16, 0))
    )
    return segments


def _laid_out(headers: Sequence[Header], alignment: int) -> tuple[Tensor, ...]:
    """Tensors of the result: dimensions as ggml writes them, offsets one behind the other."""
    tensors = []
    offset = 0
    for header in headers:
        for tensor in header.tensors:
            dimensions = tensor.dimensions or (1,)
            while len(dimensions) > 1 and dimensions[-1] == 1:
                dimensions = dimensions[:-1]
            tensors.append(Tensor(tensor.name, dimensions, tensor.quantization_type_id, offset))
            offset += padded(tensor.size, alignment)
    return tuple(tensors)


def _tensor_record(tensor: Tensor) -> bytes:
    name = tensor.name.encode("utf-8", "surrogateescape")
    return b"".join(
        [
            struct.pack("<Q", len(name)),
            name,
            struct.pack(f"<I{len(tensor.dimensions)}Q", len(tensor.dimensions), *tensor.dimensions),
            struct.pack("<IQ", tensor.quantization_type_id, tensor.offset),
        ]
    )


def _joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same bytes in as few segments as possible: neighbouring ranges become one."""
    held: Segment | None = None
    for segment in segments:
        if not segment.length:
            continue
        if (
            isinstance(held, Range)
            and isinstance(segment, Range)
            and held.source == segment.source
            and held.offset + held.length == segment.offset
        ):
            held = Range(held.source, held.offset, held.length + segment.length)
            continue
        if held is not None:
            yield held
        held = segment
    if held is not None:
        yield held


# ---------------------------------------------------------------------------------- the copy


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


# ---------------------------------------------------------------------------------- publishing


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


# ---------------------------------------------------------------------------------- the whole


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


# ---------------------------------------------------------------------------------- command line


class _Meter:
    """Progress on standard error: a line that moves on a terminal, else a line every 10 s."""

    def __init__(self) -> None:
        self._started = self._shown = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown < (0.5 if self._terminal else 10) and done < total:
            return
        self._shown = now
        elapsed = max(now - self._started, 1e-9)
        rate = done / elapsed
        left = (total - done) / rate if rate else 0
        text = (
            f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s, "
            f"{elapsed:.0f} s so far, {left:.0f} s left"
        )
        end = "\n" if not self._terminal or done >= total else ""
        print(f"\r\x1b[K{text}" if self._terminal else text, end=end, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0 done, 1 refused or failed."""
    parser = argparse.ArgumentParser(
        prog="python -m gpubox.gguf_merge",
        description="Merge GGUF shards into one file, identical to llama-gguf-split --merge.",
    )
    parser.add_argument("src", type=Path, help="any shard of the set")
    parser.add_argument("dest", type=Path, help="the merged file")
    parser.add_argument("--check", action="store_true", help="check everything, write nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    try:
        result = merge(
            options.src, options.dest, options.check, None if options.quiet else _Meter()
        )
    except GpuboxError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was published", file=sys.stderr)
        return 128 + signal.SIGINT
    would = "would be " if options.check and result.changed else ""
    print(
        f"{would}{result.action}: {result.path}, {result.size} bytes, {result.tensors} tensors "
        f"from {len(result.sources)} files in {result.seconds:.1f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
