# SPDX-License-Identifier: Apache-2.0
"""Writes a set of shards of a real model's shape: its headers, its sizes, random data."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.unit.gguf_files import (
    ARRAY,
    F32,
    I32,
    METADATA,
    STRING,
    TYPE_F32,
    TYPE_Q4_K,
    TYPE_Q6_K,
    GgufFile,
    Key,
    TensorData,
    split_keys,
)

SHARDS = 10
LAYERS = 77
TOKENS = 150_000
NOISE = 64 << 20  # bytes of random data; each tensor takes them from another place


def vocabulary() -> tuple[Key, ...]:
    """The arrays that make a header large."""
    tokens = [f"token{number:x}{'ä' * (number % 7)}" for number in range(TOKENS)]
    return (
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.scores", ARRAY, (F32, [0.5] * TOKENS)),
        ("tokenizer.ggml.token_type", ARRAY, (I32, [1] * TOKENS)),
        ("tokenizer.ggml.merges", ARRAY, (STRING, [f"{t} {t[:3]}" for t in tokens])),
    )


def tensors(size: int) -> list[TensorData]:
    """1,619 tensors of at least ``size`` bytes in all, most of them in the experts."""
    found = [TensorData("token_embd.weight", (2048, 4096), TYPE_Q4_K)]
    found.append(TensorData("output.weight", (2048, 4096), TYPE_Q6_K))
    rest = size - sum(tensor.size for tensor in found)
    rows = -(-rest // (LAYERS * 3 * 144 * 8))  # 2048 elements of Q4_K are 8 blocks of 144 bytes
    for layer in range(LAYERS):
        for name in ("gate", "up", "down"):
            found.append(TensorData(f"blk.{layer}.ffn_{name}_exps.weight", (2048, rows), TYPE_Q4_K))
        for number in range(18):
            # odd sizes: padding between the tensors
            name = f"blk.{layer}.part{number}.weight"
            found.append(TensorData(name, (2048 + number % 3,), TYPE_F32))
    return found


def write_header(path: Path) -> None:
    """A file with the whole vocabulary and all tensors in its header; its data is a hole."""
    found = tensors(1 << 28)
    more = 1800 - len(found)  # as many as the real model has
    found += [TensorData(f"blk.{number}.more.weight", (2048,)) for number in range(more)]
    whole = GgufFile((*METADATA, *vocabulary()), tuple(found))
    header = whole.header()
    with path.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + sum(tensor.size + 32 for tensor in found))


def write_set(folder: Path, size: int) -> list[Path]:
    """The shards, about ``size`` bytes in all, in order."""
    folder.mkdir(parents=True)
    noise = memoryview(os.urandom(NOISE))
    found = tensors(size)
    total = sum(tensor.size for tensor in found)
    paths = []
    done = 0
    rest = list(found)
    for index in range(SHARDS):
        own: list[TensorData] = []
        while rest and (index == SHARDS - 1 or done < total * (index + 1) // SHARDS):
            own.append(rest.pop(0))
            done += own[-1].size
        keys = (*METADATA, *vocabulary()) if index == 0 else ()
        shard = GgufFile((*keys, *split_keys(index, SHARDS, len(found))), tuple(own))
        path = folder / f"Bench-Q4-{index + 1:05d}-of-{SHARDS:05d}.gguf"
        _write(path, shard, noise, index)
        paths.append(path)
    return paths


def _write(path: Path, shard: GgufFile, noise: memoryview, seed: int) -> None:
    header = shard.header()
    with path.open("wb") as stream:
        stream.write(header + bytes(-len(header) % shard.alignment))
        for number, tensor in enumerate(shard.tensors):
            at = (seed * 7919 + number * 104_729) * 64 % NOISE
            left = tensor.size
            while left:
                piece = noise[at : at + left]
                stream.write(piece)
                left -= len(piece)
                at = 0
            stream.write(bytes(-tensor.size % shard.alignment))
        stream.flush()
        os.fsync(stream.fileno())


if __name__ == "__main__":
    write_set(Path(sys.argv[1]), int(sys.argv[2]))
