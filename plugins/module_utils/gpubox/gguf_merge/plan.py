# SPDX-License-Identifier: Apache-2.0
"""Lays the result out as a list of segments; nothing is read or written."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..gguf import DEFAULT_ALIGNMENT, KEY_SPLIT_COUNT, MAGIC, Header, Tensor, ValueType, padded
from .shards import alignment_of, is_whole

OUTPUT_VERSION = 3


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
    if len(headers) == 1 and is_whole(first):
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
