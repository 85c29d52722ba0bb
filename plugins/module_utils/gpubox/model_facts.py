# SPDX-License-Identifier: Apache-2.0
"""What the model is, from config.json and the headers of its GGUF files; no weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import GpuboxError
from .gguf import KEY_ARCHITECTURE, Header, Tensor

# Tensors that vLLM 0.33 splits over tensor parallel ranks (models/deepseek_v32/attention.py: q_b,
# kv_b and o_proj; the experts, dense layers, embedding and head); all others, the indexer among
# them (ReplicatedLinear), are whole on every rank.
_DIVIDED = (
    "token_embd",
    "output",
    "attn_q_b",
    "attn_k_b",
    "attn_v_b",
    "attn_output",
    *(
        f"ffn_{matrix}{kind}"
        for matrix in ("gate", "up", "down")
        for kind in ("", "_exps", "_shexp")
    ),
    "nextn.embed_tokens",
    "nextn.shared_head_head",
)
# RowParallelLinear and the experts' down: a rank gets a slice of each stored row, of whole blocks
_ROW_DIVIDED = ("attn_output", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
# dequantised to two bytes an element at load (docs/patches.md)
_DEQUANTIZED = (
    "attn_k_b",
    "attn_v_b",
    "ffn_gate_inp",
    "indexer.attn_k",
    "indexer.proj",
    "nextn.eh_proj",
)
# read by the step in parts: experts those that are chosen, the embedding one row
_PARTS = {"_exps": "routed", "token_embd": "embedding", "embed_tokens": "embedding"}
_BFLOAT16_BYTES = 2
# name here: key of config.json
_SIZES = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "index_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_intermediate_size": "moe_intermediate_size",
    "kv_lora_rank": "kv_lora_rank",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "mtp_layers": "num_nextn_predict_layers",
}


def _kind_and_layer(name: str) -> tuple[str, int | None]:
    """``blk.3.attn_q_b.weight`` is ``attn_q_b`` of layer 3."""
    stem = name.rpartition(".")[0] or name
    parts = stem.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal():
        return parts[2], int(parts[1])
    return stem, None


def loaded_bytes(tensor: Tensor) -> int:
    """Bytes that the tensor takes on a card, all ranks together when it is divided."""
    if _kind_and_layer(tensor.name)[0] not in _DEQUANTIZED:
        return tensor.size
    elements = _BFLOAT16_BYTES
    for dimension in tensor.dimensions:
        elements *= dimension
    return elements


def _weights(tensors: Iterable[Tensor], layers: int | None) -> dict[str, int]:
    names = ("divided", "replicated", "routed", "embedding")
    sums = {prefix + name: 0 for prefix in ("", "mtp_") for name in names} | {"head": 0}
    for tensor in tensors:
        kind, layer = _kind_and_layer(tensor.name)
        size = loaded_bytes(tensor)
        prefix = "mtp_" if layers is not None and layer is not None and layer >= layers else ""
        sums[prefix + ("divided" if kind in _DIVIDED else "replicated")] += size
        for end, part in _PARTS.items():
            if kind.endswith(end):
                sums[prefix + part] += size
        sums["head"] += size if kind == "output" else 0
    return sums


def _expert_layers(tensors: Iterable[Tensor], layers: int | None) -> int:
    found = {_kind_and_layer(tensor.name) for tensor in tensors}
    return sum(
        kind == "ffn_down_exps" and layer is not None and (layers is None or layer < layers)
        for kind, layer in found
    )


def read_config(*folders: Path) -> tuple[dict[str, Any] | None, GpuboxError | None]:
    """config.json of the first folder that has one.

    Returns:
        The object, None when there is no file; and what is wrong with a file that is there but
        that the server could not read.
    """
    for folder in folders:
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            found = error.strerror or str(error)
        except RecursionError:
            found = "lists or objects nested too deeply"
        except ValueError as error:
            found = f"no JSON in UTF-8 ({error})"
        else:
            if isinstance(config, dict):
                return config, None
            found = f"a JSON {type(config).__name__} and no object"
        return None, GpuboxError(
            f"{path}: {found}", "the model's configuration", "take it from the model's source again"
        )
    return None, None


def model_facts(
    config: Mapping[str, Any] | None, headers: Sequence[Header], faults: Sequence[str] = ()
) -> dict[str, Any]:
    """Facts of the model as plain JSON; a size that nothing tells is None.

    Args:
        config: config.json, None when there is none to read.
        headers: of the merged file or of every shard, in order.
        faults: what is there and could not be read; kept as ``faults``.

    Returns:
        ``architecture`` (general.architecture), ``config`` (the keys of config.json that are used),
        the sizes of config.json by the names of the planner, ``quantization_types`` (type to
        bytes), ``tensor_bytes`` (all of them, as stored), ``weights`` (bytes as loaded: ``divided``
        over tensor parallel ranks or ``replicated``, those of the MTP layers apart; of them
        ``routed`` experts, ``embedding`` and ``head``), ``expert_layers`` (layers with routed
        experts, without MTP) and ``row_parallel`` (pairs of a row's elements and its block, which
        a rank must not cut).
    """
    sizes: dict[str, int | None] = {}
    for name, key in _SIZES.items():
        value = (config or {}).get(key)
        sound = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        sizes[name] = value if sound else None
    if config is not None and sizes["mtp_layers"] is None:
        sizes["mtp_layers"] = 0
    types: dict[str, int] = {}
    rows: set[tuple[int, int]] = set()
    tensors = [tensor for header in headers for tensor in header.tensors]
    for tensor in tensors:
        kind = tensor.quantization_type
        types[kind.name] = types.get(kind.name, 0) + tensor.size
        if _kind_and_layer(tensor.name)[0] in _ROW_DIVIDED and tensor.dimensions:
            rows.add((tensor.dimensions[0], kind.block))
    architecture = headers[0].keys.get(KEY_ARCHITECTURE) if headers else None
    return {
        "architecture": None if architecture is None else architecture.value,
        "config": {key: config[key] for key in _SIZES.values() if config and key in config},
        **sizes,
        "quantization_types": dict(sorted(types.items())),
        "tensor_bytes": sum(types.values()) if headers else None,
        "weights": _weights(tensors, sizes["layers"]) if headers else None,
        "expert_layers": _expert_layers(tensors, sizes["layers"]) if headers else None,
        "row_parallel": [list(pair) for pair in sorted(rows)],
        "faults": list(faults),
    }
