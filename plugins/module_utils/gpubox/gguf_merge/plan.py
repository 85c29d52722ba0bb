# SPDX-License-Identifier: Apache-2.0
"""Lays the result out as a list of segments; nothing is read or written."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import GpuboxError
from ..gguf import DEFAULT_ALIGNMENT, KEY_SPLIT_COUNT, MAGIC, Header, Tensor, ValueType, padded
from .digest import Run
from .shards import alignment_of, is_whole
from .system import PAGE

OUTPUT_VERSION = 3
KEY_PADDING = "gpubox.padding"


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
    shared: bool = False  # laid out so that blocks can be shared, see `make_shared_plan`

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return sum(segment.length for segment in self.segments)

    @property
    def whole(self) -> bool:
        """Whether the result is its one source as it is."""
        return self.segments == (Range(0, 0, self.sources[0].size),)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Where each shard's tensors are in the result; shards without tensors have none."""
        runs, first = [], 0
        for index, header in enumerate(self.sources):
            tensors = self.tensors[first : first + len(header.tensors)]
            first += len(tensors)
            if tensors:
                start = min(tensor.offset for tensor in tensors)
                end = max(tensor.offset + tensor.size for tensor in tensors)
                runs.append(Run(index, self.header_size + start, end - start))
        return tuple(runs)


def make_plan(headers: Sequence[Header]) -> Plan:
    """Lay out the merger of a checked set (see `read_set`); a whole file is taken as it is.

    The rules are those of llama-gguf-split: the keys of the first shard only, byte for byte, with
    split.count 0 behind them; version 3; trailing dimensions of 1 dropped; tensors in the order of
    the shards, each padded with zeros. Unlike it, the alignment of the first shard is kept.
    """
    first = headers[0]
    alignment = first.own_alignment or DEFAULT_ALIGNMENT
    if len(headers) == 1 and is_whole(first):
        return Plan(
            (first,),
            (Range(0, 0, first.size),),
            first.tensors,
            first.data_start(alignment),
            alignment,
        )
    tensors = _laid_out(headers, alignment)
    segments = [*_metadata(first, len(tensors)), _table(tensors)]
    table_end = sum(segment.length for segment in segments)
    header_size = padded(table_end, alignment)
    segments.append(Zeros(header_size - table_end))
    for index, header in enumerate(headers):
        start = header.data_start(alignment_of(header, first))
        for tensor in header.tensors:
            segments.append(Range(index, start + tensor.offset, tensor.size))
            segments.append(Zeros(padded(tensor.size, alignment) - tensor.size))
    return Plan(tuple(headers), tuple(_joined(segments)), tensors, header_size, alignment)


def make_shared_plan(headers: Sequence[Header]) -> Plan:
    """Lay out the merger so that nearly all blocks can be those of the shards.

    Every shard's data begins at the same place inside a page as in the shard: a key of padding in
    the header moves the first, gaps below one page the others. gguf-py reads that, and with it
    vLLM; llama.cpp refuses gaps.

    Raises:
        GpuboxError: the shards' alignments do not allow it.
    """
    first = headers[0]
    if len(headers) == 1 and is_whole(first):
        return make_plan(headers)
    alignment = first.own_alignment or DEFAULT_ALIGNMENT
    extents = _extents(headers)
    begin = next((start for start, end in extents if end > start), 0)
    placed: list[Segment] = []  # the data section
    tensors = []
    size = 0
    for index, (header, (start, end)) in enumerate(zip(headers, extents, strict=True)):
        gap = (start - begin - size) % PAGE if header.tensors else 0
        placed += [Zeros(gap), Range(index, start, end - start)]
        size += gap
        shift = header.data_start(alignment_of(header, first)) - start + size
        for tensor in header.tensors:
            if begin % alignment or (tensor.offset + shift) % alignment or alignment > PAGE:
                raise GpuboxError(
                    f"{header.path}: laid out for alignment {alignment_of(header, first)}",
                    f"shards with the alignment of the first one ({alignment}), at most {PAGE}",
                    "Merge with the method copy.",
                )
            dimensions = _trimmed(tensor.dimensions)
            offset = tensor.offset + shift
            tensors.append(Tensor(tensor.name, dimensions, tensor.quantization_type_id, offset))
        size += end - start
    placed.append(Zeros(padded(size, alignment) - size))
    metadata, table = _metadata(first, len(tensors), KEY_PADDING), _table(tensors)
    used = sum(segment.length for segment in (*metadata, table, _padding_key(0)))
    padding = _padding_key((begin - used) % PAGE)
    segments = [*metadata, padding, table, *placed]
    header_size = used - _padding_key(0).length + padding.length
    return Plan(
        tuple(headers), tuple(_joined(segments)), tuple(tensors), header_size, alignment, True
    )


def _extents(headers: Sequence[Header]) -> list[tuple[int, int]]:
    """Offsets of the first and behind the last byte of tensor data in each file."""
    extents = []
    for header in headers:
        start = header.data_start(alignment_of(header, headers[0]))
        low = start + min((tensor.offset for tensor in header.tensors), default=0)
        high = start + max((tensor.offset + tensor.size for tensor in header.tensors), default=0)
        extents.append((low, high))
    return extents


def _padding_key(length: int) -> Literal:
    key = KEY_PADDING.encode()
    return Literal(
        struct.pack("<Q", len(key))
        + key
        + struct.pack("<IQ", ValueType.STRING, length)
        + b" " * length
    )


def _metadata(first: Header, tensor_count: int, *following: str) -> list[Segment]:
    """Preamble and keys, but for those that the caller puts behind them."""
    keys = len(first.keys.keys() | {KEY_SPLIT_COUNT, *following})
    segments: list[Segment] = [
        Literal(MAGIC + struct.pack("<IQQ", OUTPUT_VERSION, tensor_count, keys))
    ]
    for entry in first.keys.values():
        if entry.key not in (KEY_SPLIT_COUNT, *following):
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
            dimensions = _trimmed(tensor.dimensions)
            tensors.append(Tensor(tensor.name, dimensions, tensor.quantization_type_id, offset))
            offset += padded(tensor.size, alignment)
    return tuple(tensors)


def _trimmed(dimensions: tuple[int, ...]) -> tuple[int, ...]:
    """As ggml writes them: without 1s at the end."""
    dimensions = dimensions or (1,)
    while len(dimensions) > 1 and dimensions[-1] == 1:
        dimensions = dimensions[:-1]
    return dimensions


def _table(tensors: Iterable[Tensor]) -> Literal:
    return Literal(b"".join(_tensor_record(tensor) for tensor in tensors))


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
