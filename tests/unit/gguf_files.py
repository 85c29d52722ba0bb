# SPDX-License-Identifier: Apache-2.0
"""Writes small GGUF files, right ones and wrong ones, field by field (ggml docs/gguf.md)."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?"} | {
    U64: "Q",
    I64: "q",
    F64: "d",
}
# type number, elements a block, bytes a block
TYPE_F32, TYPE_Q8_0, TYPE_Q4_K, TYPE_Q6_K = (0, 1, 4), (8, 32, 34), (12, 256, 144), (14, 256, 210)

Key = tuple[str, int, Any]


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(value_type: int, content: Any) -> bytes:
    if value_type == STRING:
        return string(content)
    if value_type == ARRAY:
        element_type, elements = content
        head = struct.pack("<IQ", element_type, len(elements))
        return head + b"".join(value(element_type, element) for element in elements)
    return struct.pack("<" + _FORMATS[value_type], content)


def key_value(key: Key) -> bytes:
    name, value_type, content = key
    return string(name) + struct.pack("<I", value_type) + value(value_type, content)


@dataclass(frozen=True)
class TensorData:
    name: str
    dimensions: tuple[int, ...]
    kind: tuple[int, int, int] = TYPE_F32

    @property
    def size(self) -> int:
        """Bytes of the data, without padding."""
        elements = 1
        for dimension in self.dimensions:
            elements *= dimension
        return elements // self.kind[1] * self.kind[2]

    @property
    def data(self) -> bytes:
        """Bytes that depend on the name, so that no two tensors are equal."""
        return hashlib.shake_128(self.name.encode()).digest(self.size)


@dataclass(frozen=True)
class GgufFile:
    keys: tuple[Key, ...]
    tensors: tuple[TensorData, ...] = ()
    alignment: int = 32
    version: int = 3
    pad_byte: bytes = b"\0"
    pad_end: bool = True

    def with_key(self, key: Key) -> GgufFile:
        """The same file with ``key`` added or replaced."""
        names = [name for name, *_ in self.keys]
        if key[0] in names:
            return replace(
                self, keys=tuple(key if name == key[0] else old for name, old in self._named())
            )
        return replace(self, keys=(*self.keys, key))

    def without_key(self, name: str) -> GgufFile:
        return replace(self, keys=tuple(key for key in self.keys if key[0] != name))

    def _named(self) -> list[tuple[str, Key]]:
        return [(key[0], key) for key in self.keys]

    def header(self) -> bytes:
        out = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))
        out += b"".join(key_value(key) for key in self.keys)
        offset = 0
        for tensor in self.tensors:
            count = len(tensor.dimensions)
            out += string(tensor.name) + struct.pack(f"<I{count}Q", count, *tensor.dimensions)
            out += struct.pack("<IQ", tensor.kind[0], offset)
            offset += tensor.size + -tensor.size % self.alignment
        return out

    def to_bytes(self) -> bytes:
        out = self.header()
        out += self.pad_byte * (-len(out) % self.alignment)
        for number, tensor in enumerate(self.tensors):
            out += tensor.data
            if self.pad_end or number + 1 < len(self.tensors):
                out += self.pad_byte * (-len(tensor.data) % self.alignment)
        return out


METADATA: tuple[Key, ...] = (
    ("general.architecture", STRING, "glm-dsa"),
    ("general.quantization_version", U32, 2),
    ("tiny.bool", BOOL, True),
    ("tiny.float", F32, 0.5),
    ("tiny.tokens", ARRAY, (STRING, ["a", "", "ä€", "z" * 300])),
    ("tiny.scores", ARRAY, (F32, [0.5, -1.0])),
    ("tiny.template", STRING, "{{ x }}\n" * 10),
)

# padding of 12, 26, 0, 12 … bytes; trailing dimensions of 1; a scalar-like one
TENSORS = (
    TensorData("output.weight", (256, 3), TYPE_Q6_K),
    TensorData("output_norm.weight", (5,)),
    TensorData("blk.0.attn_k_b.weight", (32, 3, 1, 1), TYPE_Q8_0),
    TensorData("blk.0.ffn_up_exps.weight", (256, 2, 4), TYPE_Q4_K),
    TensorData("blk.0.ffn_norm.weight", (7, 1)),
    TensorData("blk.1.ffn_down_exps.weight", (256, 4, 2), TYPE_Q4_K),
    TensorData("blk.1.exp_probs_b.bias", (3,)),
)


def split_keys(index: int, count: int, total: int) -> tuple[Key, ...]:
    """In the order of llama-gguf-split."""
    return (
        ("split.no", U16, index),
        ("split.tensors.count", I32, total),
        ("split.count", U16, count),
    )


@dataclass
class ShardSet:
    """Shards by number and the file that their merger must be."""

    folder: Path
    shards: list[GgufFile]
    prefix: str = "Model-Q4"
    tensors: tuple[TensorData, ...] = TENSORS
    metadata: tuple[Key, ...] = METADATA
    paths: list[Path] = field(default_factory=list)

    def path(self, number: int) -> Path:
        """Path of shard ``number``, counted from 1."""
        return self.folder / f"{self.prefix}-{number:05d}-of-{len(self.shards):05d}.gguf"

    def write(self) -> ShardSet:
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(self.shards, start=1):
            self.path(number).write_bytes(shard.to_bytes())
        self.paths = [self.path(number) for number in range(1, len(self.shards) + 1)]
        return self

    def change(self, number: int, key: Key) -> None:
        """Rewrite one shard with another value of ``key``."""
        shard = self.shards[number - 1].with_key(key)
        self.path(number).write_bytes(shard.to_bytes())

    @property
    def merged(self) -> bytes:
        """What llama-gguf-split --merge writes; split.no and split.tensors.count stay."""
        tensors = []
        for tensor in self.tensors:
            dimensions = tensor.dimensions
            while len(dimensions) > 1 and dimensions[-1] == 1:
                dimensions = dimensions[:-1]
            tensors.append(replace(tensor, dimensions=dimensions))
        keys = (*self.metadata, *split_keys(0, 0, len(self.tensors)))
        return GgufFile(keys, tuple(tensors), self.shards[0].alignment).to_bytes()


def shard_set(
    folder: Path,
    cuts: tuple[int, ...] = (3, 5),
    tensors: tuple[TensorData, ...] = TENSORS,
    metadata: tuple[Key, ...] = METADATA,
    **options: Any,
) -> ShardSet:
    """A set on disk, divided in front of the tensors numbered ``cuts`` (0 for a metadata shard)."""
    bounds = [0, *cuts, len(tensors)]
    count = len(bounds) - 1
    shards = [
        GgufFile(
            (*(metadata if index == 0 else ()), *split_keys(index, count, len(tensors))),
            tensors[bounds[index] : bounds[index + 1]],
            **options,
        )
        for index in range(count)
    ]
    return ShardSet(folder, shards, tensors=tensors, metadata=metadata).write()
