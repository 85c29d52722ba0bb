# SPDX-License-Identifier: Apache-2.0
"""Random weights that are equal on every machine.

The bits come from PCG64, whose stream numpy guarantees; a nearly normal number is the centred sum
of four 16-bit integers. Only exact integer and IEEE arithmetic is used: no logarithm or cosine,
whose last bit depends on the processor's vector units.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from .model import TensorSpec

# variance of the sum of four independent integers, uniform on 0 … 65535
_DEVIATION = np.sqrt(np.float64(4 * (65536**2 - 1)) / 12)
_MEAN = 4 * 65535 / 2


def standard(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Nearly normal numbers of mean 0 and deviation 1, within ±3.5; a stream for each ``name``."""
    generator = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    count = int(np.prod(shape))
    raw = generator.random_raw(count).astype("<u8", copy=False)
    parts = raw.view("<u2").reshape(count, 4)
    total = parts.sum(axis=1, dtype=np.int64)
    return ((total - _MEAN) / _DEVIATION).astype(np.float32).reshape(shape)


def draw(seed: int, spec: TensorSpec, shape: tuple[int, ...] | None = None) -> NDArray[np.float32]:
    """The weights of one tensor, scaled so that activations neither vanish nor explode.

    The fan-in of attn_k_b is its middle dimension, because it is stored transposed.

    Args:
        seed: of the random numbers.
        spec: the tensor.
        shape: of a part to draw instead of the whole.
    """
    values = standard(seed, spec.name, shape or spec.shape)
    if spec.kind == "embedding":
        return values
    if spec.kind == "gain":
        return np.float32(1) + np.float32(0.1) * values
    if spec.kind == "shift":
        return np.float32(0.1) * values
    if spec.kind == "router_bias":
        return np.float32(0.05) * values
    fan_in = spec.shape[-2] if spec.name.endswith("attn_k_b.weight") else spec.shape[-1]
    return values / np.sqrt(np.float32(fan_in))
