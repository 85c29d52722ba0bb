# SPDX-License-Identifier: Apache-2.0
"""What transformers computes from the dequantised weights of a glm-dsa GGUF, in fp32.

Runs in the environment of the box (torch, transformers, gguf). Nothing of the GGUF plugin or of
vLLM takes part: the file is read with gguf-py and the names are mapped here once more.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaModel

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_output": "self_attn.o_proj",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}


def shards(path: Path) -> list[Path]:
    """All files of the set that ``path`` (a first shard or a single file) belongs to."""
    match = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    count = int(match[2])
    return [
        path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]


def read(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model, dequantised to fp32, by its GGUF name."""
    return {
        tensor.name: torch.from_numpy(
            gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        )
        for shard in shards(path)
        for tensor in gguf.GGUFReader(shard).tensors
    }


def layer_state(tensors: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """State of one decoder layer in transformers' names, relative to the layer."""
    prefix = f"blk.{number}."
    own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    state = {}
    for name, value in own.items():
        base, _, suffix = name.rpartition(".")
        if base in _LAYER:
            state[f"{_LAYER[base]}.{suffix}"] = value
    # k_b [heads, kv_lora, nope] is transposed, v_b [heads, v, kv_lora] is not
    state["self_attn.kv_b_proj.weight"] = torch.cat(
        [own["attn_k_b.weight"].transpose(1, 2), own["attn_v_b.weight"]], dim=1
    ).flatten(0, 1)
    if "ffn_gate_exps.weight" in own:
        state["mlp.experts.gate_up_proj"] = torch.cat(
            [own["ffn_gate_exps.weight"], own["ffn_up_exps.weight"]], dim=1
        )
        state["mlp.experts.down_proj"] = own["ffn_down_exps.weight"]
        state["mlp.gate.e_score_correction_bias"] = own["exp_probs_b.bias"]
    return state


def load(path: Path) -> tuple[GlmMoeDsaForCausalLM, dict[str, torch.Tensor]]:
    """The model with every weight set from the GGUF; config.json lies beside it."""
    config = AutoConfig.from_pretrained(path.parent)
    config._attn_implementation = "eager"
    tensors = read(path)
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors["output.weight"],
    }
    for number in range(config.num_hidden_layers):
        for name, value in layer_state(tensors, number).items():
            state[f"model.layers.{number}.{name}"] = value
    model = GlmMoeDsaForCausalLM(config).float().eval()
    model.load_state_dict(state, strict=True)
    return model, tensors


def draft_tokens(
    model: GlmMoeDsaForCausalLM, tensors: dict[str, torch.Tensor], token_ids: list[int]
) -> list[dict[str, Any]]:
    """What the MTP layer proposes after each position: token and its lead over the second.

    The layer sees, at position i, the embedding of token i+1 (zero at position 0) and the main
    model's final hidden state i. transformers has no MTP, so the layer's decoder block is run as a
    model of one layer between ``eh_proj`` and ``shared_head``.
    """
    config = model.config
    number = config.num_hidden_layers
    prefix = f"blk.{number}.nextn."
    block_config = type(config).from_dict(
        {
            **config.to_dict(),
            "num_hidden_layers": 1,
            "mlp_layer_types": ["sparse"],
            "indexer_types": ["full"],
            "layer_types": config.layer_types[:1],
        }
    )
    block_config._attn_implementation = "eager"
    block = GlmMoeDsaModel(block_config).float().eval()
    state = {f"layers.0.{name}": v for name, v in layer_state(tensors, number).items()}
    state["norm.weight"] = tensors[prefix + "shared_head_norm.weight"]
    state["embed_tokens.weight"] = tensors["token_embd.weight"]
    block.load_state_dict(state, strict=True)

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        variance = values.pow(2).mean(-1, keepdim=True)
        scaled = values * torch.rsqrt(variance + config.rms_norm_eps)
        return scaled * tensors[f"{prefix}{name}.weight"]

    ids = torch.tensor([token_ids])
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
    embedded = model.model.embed_tokens(ids[:, 1:]).clone()
    embedded[:, 0] = 0
    joined = torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], dim=-1)
    inputs = joined @ tensors[prefix + "eh_proj.weight"].T
    logits = model.lm_head(block(inputs_embeds=inputs, use_cache=False).last_hidden_state)[0]
    best = logits.topk(2, dim=-1)
    return [
        {"token": int(ids_[0]), "lead": float(values[0] - values[1])}
        for ids_, values in zip(best.indices, best.values, strict=True)
    ]


@torch.no_grad()
def compute(path: Path, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Teacher-forced logprobs of the prompts, greedy continuations and MTP proposals."""
    model, tensors = load(path)
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(max_tokens):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            ids.append(int(logits[-1].argmax()))
        logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        chosen = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
        lead = logprobs[len(prompt) - 1 : -1].topk(2, dim=-1).values
        answers.append(
            {
                "prompt_logprobs": chosen[: len(prompt) - 1],
                "tokens": ids[len(prompt) :],
                "logprobs": chosen[len(prompt) - 1 :],
                # how far the greedy token is ahead of the next one
                "leads": [float(first - second) for first, second in lead],
            }
        )
    drafts = None
    if f"blk.{model.config.num_hidden_layers}.nextn.eh_proj.weight" in tensors:
        drafts = draft_tokens(model, tensors, list(prompts[0]) + answers[0]["tokens"])
    return {"answers": answers, "drafts": drafts}
