# SPDX-License-Identifier: Apache-2.0
"""The tiny GLM-5 as data: dimensions, tensors, GGUF metadata and the Hugging Face configuration.

Names and shapes are those of the GGUF architecture ``glm-dsa`` (llama.cpp src/models/glm-dsa.cpp;
gguf-py MODEL_ARCH.GLM_DSA), the types those that a Q4_K_XL file of GLM-5 mixes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from gguf import GGML_QUANT_SIZES, ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter

F32 = GGMLQuantizationType.F32
Q4_K = GGMLQuantizationType.Q4_K
Q5_K = GGMLQuantizationType.Q5_K
Q6_K = GGMLQuantizationType.Q6_K
Q8_0 = GGMLQuantizationType.Q8_0

FILE_STEM = "tiny-GLM-5-UD-Q4_K_XL"
ARCHITECTURE = "glm-dsa"
FILE_TYPE_MOSTLY_Q4_K_M = 15
QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class Dimensions:
    """Sizes of the model; what kernels insist on keeps GLM-5's value, the rest is small.

    kv_lora_rank 512 with rope 64 is the only MLA shape of vLLM's CPU backend; DeepGEMM wants 32 or
    64 index heads; index_topk must be 2048; rows of K-quants are multiples of 256.
    """

    vocabulary: int = 512
    unused_tokens: int = 0  # of the vocabulary, which no text makes
    hidden: int = 256
    layers: int = 3  # of which the first `dense_layers` have no experts
    dense_layers: int = 1
    nextn_layers: int = 1  # the multi-token-prediction layer behind them
    heads: int = 8
    q_lora_rank: int = 256
    kv_lora_rank: int = 512
    rope: int = 64
    nope: int = 192
    value: int = 256
    feed_forward: int = 512
    expert_feed_forward: int = 512
    experts: int = 8
    experts_used: int = 2
    experts_shared: int = 1
    index_heads: int = 32
    index_head: int = 128
    index_topk: int = 2048
    context: int = 4096  # tokens


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: shape with the contiguous dimension last, stored type and how it is drawn.

    ``weight`` is drawn with deviation 1/√(fan-in), ``embedding`` with 1, ``gain`` around 1 with
    0.1, ``shift`` around 0 with 0.1 and ``router_bias`` around 0 with 0.05.
    """

    name: str
    shape: tuple[int, ...]
    quantization_type: GGMLQuantizationType
    kind: Literal["weight", "embedding", "gain", "shift", "router_bias"] = "weight"


def tensors(
    dim: Dimensions, quantization_type: GGMLQuantizationType | None = None
) -> list[TensorSpec]:
    """All tensors in file order: the top level, then each layer by name, as real files have it.

    Args:
        dim: sizes.
        quantization_type: of every quantised tensor whose rows its blocks divide, instead of the
            mix of a Q4_K_XL file.
    """
    specs = [
        TensorSpec("output.weight", (dim.vocabulary, dim.hidden), Q6_K),
        TensorSpec("output_norm.weight", (dim.hidden,), F32, "gain"),
        TensorSpec("token_embd.weight", (dim.vocabulary, dim.hidden), Q4_K, "embedding"),
    ]
    for layer in range(dim.layers + dim.nextn_layers):
        parts = [*_attention(dim), *_indexer(dim)]
        parts += _dense(dim) if layer < dim.dense_layers else _experts(dim)
        if layer >= dim.layers:
            parts += _nextn(dim)
        for part in sorted(parts, key=lambda spec: spec.name):
            specs.append(replace(part, name=f"blk.{layer}.{part.name}"))
    if quantization_type is None:
        return specs
    block = GGML_QUANT_SIZES[quantization_type][0]
    return [
        replace(spec, quantization_type=quantization_type)
        if spec.quantization_type != F32 and spec.shape[-1] % block == 0
        else spec
        for spec in specs
    ]


def _attention(dim: Dimensions) -> list[TensorSpec]:
    """MLA. attn_k_b is stored transposed: rows of 192, which no K-quant can hold."""
    query = dim.heads * (dim.nope + dim.rope)
    return [
        TensorSpec("attn_k_b.weight", (dim.heads, dim.kv_lora_rank, dim.nope), Q8_0),
        TensorSpec("attn_kv_a_mqa.weight", (dim.kv_lora_rank + dim.rope, dim.hidden), Q8_0),
        TensorSpec("attn_kv_a_norm.weight", (dim.kv_lora_rank,), F32, "gain"),
        TensorSpec("attn_norm.weight", (dim.hidden,), F32, "gain"),
        TensorSpec("attn_output.weight", (dim.hidden, dim.heads * dim.value), Q5_K),
        TensorSpec("attn_q_a.weight", (dim.q_lora_rank, dim.hidden), Q5_K),
        TensorSpec("attn_q_a_norm.weight", (dim.q_lora_rank,), F32, "gain"),
        TensorSpec("attn_q_b.weight", (query, dim.q_lora_rank), Q5_K),
        TensorSpec("attn_v_b.weight", (dim.heads, dim.value, dim.kv_lora_rank), Q8_0),
        TensorSpec("ffn_norm.weight", (dim.hidden,), F32, "gain"),
    ]


def _indexer(dim: Dimensions) -> list[TensorSpec]:
    index_query = dim.index_heads * dim.index_head
    return [
        TensorSpec("indexer.attn_k.weight", (dim.index_head, dim.hidden), Q8_0),
        TensorSpec("indexer.attn_q_b.weight", (index_query, dim.q_lora_rank), Q8_0),
        TensorSpec("indexer.k_norm.bias", (dim.index_head,), F32, "shift"),
        TensorSpec("indexer.k_norm.weight", (dim.index_head,), F32, "gain"),
        TensorSpec("indexer.proj.weight", (dim.index_heads, dim.hidden), Q8_0),
    ]


def _dense(dim: Dimensions) -> list[TensorSpec]:
    return [
        TensorSpec("ffn_down.weight", (dim.hidden, dim.feed_forward), Q6_K),
        TensorSpec("ffn_gate.weight", (dim.feed_forward, dim.hidden), Q4_K),
        TensorSpec("ffn_up.weight", (dim.feed_forward, dim.hidden), Q4_K),
    ]


def _experts(dim: Dimensions) -> list[TensorSpec]:
    inner, count = dim.expert_feed_forward, dim.experts
    shared = inner * dim.experts_shared
    return [
        TensorSpec("exp_probs_b.bias", (count,), F32, "router_bias"),
        TensorSpec("ffn_down_exps.weight", (count, dim.hidden, inner), Q5_K),
        TensorSpec("ffn_down_shexp.weight", (dim.hidden, shared), Q6_K),
        TensorSpec("ffn_gate_exps.weight", (count, inner, dim.hidden), Q4_K),
        TensorSpec("ffn_gate_inp.weight", (count, dim.hidden), F32),
        TensorSpec("ffn_gate_shexp.weight", (shared, dim.hidden), Q4_K),
        TensorSpec("ffn_up_exps.weight", (count, inner, dim.hidden), Q4_K),
        TensorSpec("ffn_up_shexp.weight", (shared, dim.hidden), Q4_K),
    ]


def _nextn(dim: Dimensions) -> list[TensorSpec]:
    return [
        TensorSpec("nextn.eh_proj.weight", (dim.hidden, 2 * dim.hidden), Q8_0),
        TensorSpec("nextn.enorm.weight", (dim.hidden,), F32, "gain"),
        TensorSpec("nextn.hnorm.weight", (dim.hidden,), F32, "gain"),
        TensorSpec("nextn.shared_head_norm.weight", (dim.hidden,), F32, "gain"),
    ]


def add_metadata(writer: GGUFWriter, dim: Dimensions) -> None:
    """The architecture's keys. MLA is described as multi-query attention over the latent vector."""
    writer.add_type("model")
    writer.add_name("tiny GLM-5")
    writer.add_block_count(dim.layers + dim.nextn_layers)
    writer.add_context_length(dim.context)
    writer.add_embedding_length(dim.hidden)
    writer.add_feed_forward_length(dim.feed_forward)
    writer.add_head_count(dim.heads)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(dim.experts)
    writer.add_expert_used_count(dim.experts_used)
    writer.add_expert_group_count(1)
    writer.add_expert_group_used_count(1)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_key_length(dim.kv_lora_rank + dim.rope)
    writer.add_value_length(dim.kv_lora_rank)
    writer.add_leading_dense_block_count(dim.dense_layers)
    writer.add_vocab_size(dim.vocabulary)
    writer.add_q_lora_rank(dim.q_lora_rank)
    writer.add_kv_lora_rank(dim.kv_lora_rank)
    writer.add_key_length_mla(dim.nope + dim.rope)
    writer.add_value_length_mla(dim.value)
    writer.add_expert_feed_forward_length(dim.expert_feed_forward)
    writer.add_expert_shared_count(dim.experts_shared)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_rope_dimension_count(dim.rope)
    writer.add_nextn_predict_layers(dim.nextn_layers)
    writer.add_indexer_head_count(dim.index_heads)
    writer.add_indexer_key_length(dim.index_head)
    writer.add_indexer_top_k(dim.index_topk)
    writer.add_quantization_version(QUANTIZATION_VERSION)
    writer.add_file_type(FILE_TYPE_MOSTLY_Q4_K_M)


def configuration(dim: Dimensions, eos_ids: list[int], pad_id: int) -> dict[str, Any]:
    """config.json as transformers' GlmMoeDsaConfig reads it."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": eos_ids,
        "ep_size": 1,
        "first_k_dense_replace": dim.dense_layers,
        "head_dim": dim.rope,
        "hidden_act": "silu",
        "hidden_size": dim.hidden,
        "index_head_dim": dim.index_head,
        "index_n_heads": dim.index_heads,
        "index_topk": dim.index_topk,
        "indexer_rope_interleave": True,
        "initializer_range": 0.02,
        "intermediate_size": dim.feed_forward,
        "kv_lora_rank": dim.kv_lora_rank,
        "max_position_embeddings": dim.context,
        "mlp_layer_types": ["dense"] * dim.dense_layers
        + ["sparse"] * (dim.layers - dim.dense_layers),
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": dim.expert_feed_forward,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": dim.experts,
        "n_shared_experts": dim.experts_shared,
        "norm_topk_prob": True,
        "num_attention_heads": dim.heads,
        "num_experts_per_tok": dim.experts_used,
        "num_hidden_layers": dim.layers,
        "num_key_value_heads": dim.heads,
        "num_nextn_predict_layers": dim.nextn_layers,
        "pad_token_id": pad_id,
        "pretraining_tp": 1,
        "q_lora_rank": dim.q_lora_rank,
        "qk_head_dim": dim.nope + dim.rope,
        "qk_nope_head_dim": dim.nope,
        "qk_rope_head_dim": dim.rope,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": dim.value,
        "vocab_size": dim.vocabulary,
    }
