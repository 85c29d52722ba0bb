# SPDX-License-Identifier: Apache-2.0
"""What a card cannot beat: bytes of a decode step, operations of a prompt, from a GGUF's header.

Bytes are those of ``gpubox.decode_model``: every weight once, of the routed experts those that are
chosen, the KV cache as far as it is attended to and the keys of the indexer. Operations are the
fewest that the model asks for: what is faster than arithmetic on every pair (the absorbed form of
MLA, index scores where all tokens are chosen anyway) is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

# bytes of a token's KV cache in a layer (docs/plan.md), without the keys of the indexer
LATENT_BYTES = {"fp8": 656, "bfloat16": 1152, "float32": 2304}


class Stored(Protocol):
    """A tensor of the header; the contiguous dimension comes first."""

    @property
    def name(self) -> str: ...
    @property
    def dimensions(self) -> tuple[int, ...]: ...


def kind_of(name: str) -> str:
    """``blk.3.attn_q_b.weight`` is ``attn_q_b``."""
    parts = name.rpartition(".")[0].split(".", 2)
    return parts[2] if parts[0] == "blk" and len(parts) == 3 else parts[0]


def layer_of(name: str) -> int:
    """The layer of a tensor, -1 of one that is in none."""
    parts = name.split(".", 2)
    return int(parts[1]) if parts[0] == "blk" and parts[1].isdecimal() else -1


def attended(tokens: int, topk: int) -> int:
    """Pairs of a token and one that it attends to, itself included, in a prompt of ``tokens``."""
    full = min(tokens, topk)
    return full * (full + 1) // 2 + (tokens - full) * topk


def scored(tokens: int, topk: int) -> int:
    """Pairs that the indexer must score: a token with fewer than ``topk`` before it takes all."""
    few = min(tokens, topk)
    return tokens * (tokens + 1) // 2 - few * (few + 1) // 2


def prefill_operations(
    facts: Mapping[str, Any], tensors: Iterable[Stored], tokens: int
) -> dict[str, float]:
    """Operations (a multiplication and an addition are two) of a prompt, by their place.

    Args:
        facts: of ``model_facts``.
        tensors: of the header.
        tokens: of the prompt; the head computes the last one only.
    """
    found = {"linear": 0.0, "experts": 0.0, "attention": 0.0, "indexer": 0.0, "head": 0.0}
    pairs, index_pairs = (count(tokens, facts["index_topk"]) for count in (attended, scored))
    used = facts["experts_per_token"] / max(facts["experts"] or 1, 1)
    for tensor in tensors:
        kind, elements = kind_of(tensor.name), math.prod(tensor.dimensions)
        if layer_of(tensor.name) >= facts["layers"] or len(tensor.dimensions) < 2:
            continue  # MTP; norms and biases
        if kind == "token_embd":
            continue
        if kind == "output":
            found["head"] += 2.0 * elements
        elif kind.endswith("_exps"):
            found["experts"] += 2.0 * elements * used * tokens
        else:
            found["linear"] += 2.0 * elements * tokens
        if kind == "attn_k_b":  # [nope, latent, heads]
            width = tensor.dimensions[0] + facts["qk_rope_head_dim"]
            found["attention"] += 2.0 * pairs * facts["heads"] * width
        elif kind == "attn_v_b":  # [latent, value, heads]
            found["attention"] += 2.0 * pairs * facts["heads"] * tensor.dimensions[1]
        elif kind == "indexer.attn_q_b":
            found["indexer"] += 2.0 * index_pairs * facts["index_heads"] * facts["index_head_dim"]
    return found


def decode_bytes(one: Any, clients: int) -> dict[str, float]:
    """Bytes of a step of ``clients`` tokens, by their place; ``one``: of ``decode_model.reads``."""
    return {
        "always": one.always,
        "experts": one.experts_read(one.experts, clients),
        "cache": one.cache * clients,
    }


def prefill_bytes(one: Any, tokens: int) -> float:
    """Bytes of the weights that a prompt reads at least."""
    return float(one.always + one.experts_read(one.experts, tokens))
