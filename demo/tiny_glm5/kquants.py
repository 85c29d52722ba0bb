# SPDX-License-Identifier: Apache-2.0
"""Encoders for the K-quants Q4_K, Q5_K and Q6_K, which gguf-py can only decode.

A K-quant super-block holds 256 consecutive weights of one row. The byte layouts are those of
``block_q4_K``, ``block_q5_K`` and ``block_q6_K`` in ggml/src/ggml-common.h. Scales are rounded up,
never to nearest: so no weight is clipped and every error is at most half of a sub-block's step.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize as quantize_simple
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

SUPER_BLOCK = 256  # weights
SCALE_MAX = 63  # 6-bit scales and minimums of Q4_K and Q5_K
Q6_SCALE_MAX = 127  # 8-bit signed scales of Q6_K


def _half_rounded_up(values: Floats) -> NDArray[np.float16]:
    """Smallest float16 that is not below each of ``values`` (all >= 0)."""
    half = values.astype(np.float16)
    return np.where(half.astype(np.float32) < values, np.nextafter(half, np.float16(np.inf)), half)


def _ceil_ratio(numerator: Floats, unit: Floats, largest: int) -> Bytes:
    """ceil(numerator / unit) as bytes within 0 … ``largest``; 0 where the unit is 0."""
    ratio = np.divide(numerator, unit, out=np.zeros_like(numerator), where=unit > 0)
    return np.clip(np.ceil(ratio), 0, largest).astype(np.uint8)


def _nearest_level(values: Floats, step: Floats, lowest: int, highest: int) -> NDArray[np.int16]:
    """The integer multiple of ``step`` nearest to each value; 0 where the step is 0."""
    step = np.broadcast_to(step, values.shape)
    level = np.divide(values, step, out=np.zeros_like(values), where=step > 0)
    return np.clip(np.rint(level), lowest, highest).astype(np.int16)


def _affine(blocks: Floats, levels: int) -> tuple[Bytes, Bytes]:
    """Header and levels of the affine K-quants: weight = scale · level - minimum.

    Args:
        blocks: [n, 256] weights.
        levels: highest level: 15 for Q4_K, 31 for Q5_K.

    Returns:
        [n, 16] header (d, dmin, packed scales and minimums) and [n, 8, 32] levels.
    """
    count = blocks.shape[0]
    sub_blocks = blocks.reshape(count, 8, 32)
    minimum = -np.minimum(sub_blocks.min(axis=-1), np.float32(0))
    dmin = _half_rounded_up(minimum.max(axis=-1, keepdims=True) / np.float32(SCALE_MAX))
    minimum_index = _ceil_ratio(minimum, dmin.astype(np.float32), SCALE_MAX)
    offset = dmin.astype(np.float32) * minimum_index

    span = np.maximum(sub_blocks.max(axis=-1) + offset, np.float32(0))
    scale = span / np.float32(levels)
    d = _half_rounded_up(scale.max(axis=-1, keepdims=True) / np.float32(SCALE_MAX))
    scale_index = _ceil_ratio(scale, d.astype(np.float32), SCALE_MAX)
    step = d.astype(np.float32) * scale_index
    level = _nearest_level(sub_blocks + offset[..., None], step[..., None], 0, levels)

    # 12 bytes hold 8 scales and 8 minimums of 6 bits: the first four of each whole, of the last
    # four the low nibbles together, their two high bits on top of the first four
    packed = np.concatenate(
        [
            scale_index[:, :4] | (scale_index[:, 4:] >> 4 << 6),
            minimum_index[:, :4] | (minimum_index[:, 4:] >> 4 << 6),
            (scale_index[:, 4:] & 15) | (minimum_index[:, 4:] & 15) << 4,
        ],
        axis=-1,
    )
    header = np.concatenate([_as_bytes(d), _as_bytes(dmin), packed], axis=-1)
    return header, level.astype(np.uint8)


def _as_bytes(values: NDArray[Any]) -> Bytes:
    """Little-endian bytes of [n, k] values as [n, k · size]."""
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(values.shape[0], -1)


def _low_nibbles(level: Bytes) -> Bytes:
    """[n, 8, 32] levels to [n, 128]: sub-blocks 2i and 2i+1 share 32 bytes."""
    return ((level[:, 0::2] & 15) | (level[:, 1::2] & 15) << 4).reshape(level.shape[0], 128)


def encode_q4_k(blocks: Floats) -> Bytes:
    """[n, 256] weights to [n, 144] bytes."""
    header, level = _affine(blocks, 15)
    return np.concatenate([header, _low_nibbles(level)], axis=-1)


def encode_q5_k(blocks: Floats) -> Bytes:
    """[n, 256] weights to [n, 176] bytes: the fifth bit of sub-block i is bit i of 32 bytes."""
    header, level = _affine(blocks, 31)
    fifth = np.zeros((blocks.shape[0], 32), dtype=np.uint8)
    for sub_block in range(8):
        fifth |= level[:, sub_block] >> 4 << sub_block
    return np.concatenate([header, fifth, _low_nibbles(level)], axis=-1)


def encode_q6_k(blocks: Floats) -> Bytes:
    """[n, 256] weights to [n, 210] bytes: 16 sub-blocks, weight = d · scale · (level - 32)."""
    count = blocks.shape[0]
    sub_blocks = blocks.reshape(count, 16, 16)
    scale = np.abs(sub_blocks).max(axis=-1) / np.float32(31)
    d = _half_rounded_up(scale.max(axis=-1, keepdims=True) / np.float32(Q6_SCALE_MAX))
    scale_index = _ceil_ratio(scale, d.astype(np.float32), Q6_SCALE_MAX)
    step = d.astype(np.float32) * scale_index
    level = (_nearest_level(sub_blocks, step[..., None], -32, 31) + 32).astype(np.uint8)

    # per half of 128 weights, quarters a b c d of 32: nibbles (a|c) (b|d), high bits a b c d
    quarter = level.reshape(count, 2, 4, 32)
    a, b, c, e = (quarter[:, :, i] for i in range(4))
    low = np.concatenate([(a & 15) | (c & 15) << 4, (b & 15) | (e & 15) << 4], axis=-1)
    high = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | e >> 4 << 6
    return np.concatenate(
        [low.reshape(count, 128), high.reshape(count, 64), scale_index, _as_bytes(d)], axis=-1
    )


_ENCODERS = {
    GGMLQuantizationType.Q4_K: encode_q4_k,
    GGMLQuantizationType.Q5_K: encode_q5_k,
    GGMLQuantizationType.Q6_K: encode_q6_k,
}


def quantize(weights: Floats, quantization_type: GGMLQuantizationType) -> NDArray[Any]:
    """Encode ``weights`` row by row.

    Returns:
        Bytes [..., row bytes], or the float array itself for F32.

    Raises:
        ValueError: a row is no multiple of the block size, a weight is not finite, or too large
            for the float16 scale of its block.
    """
    if not np.isfinite(weights).all():
        raise ValueError("weights must be finite")
    encoder = _ENCODERS.get(quantization_type)
    if encoder is None:
        return np.asarray(quantize_simple(weights, quantization_type))
    block_size, type_size = GGML_QUANT_SIZES[quantization_type]
    if weights.shape[-1] % block_size:
        raise ValueError(
            f"a row of {weights.shape[-1]} weights is no multiple of {block_size}, "
            f"the block size of {quantization_type.name}"
        )
    if weights.size and np.abs(weights).max() > 65504.0 * 31:
        raise ValueError("weights are too large for float16 scales")
    encoded = encoder(weights.astype(np.float32, copy=False).reshape(-1, block_size))
    return encoded.reshape(*weights.shape[:-1], weights.shape[-1] // block_size * type_size)
