# SPDX-License-Identifier: Apache-2.0
"""Everything that can be known to fail before the box is changed, as one list of findings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import GpuboxError

GIB = 1024**3
# Measured: the stack glm5-cpu takes 3.5 GB on disk; the CUDA stack's wheels unpack to about 12 GB.
ENVIRONMENT_BYTES = {"cpu": 4 * GIB, "cuda": 16 * GIB}
# Left free besides what is needed, so that a full disk is refused and not met.
RESERVE_BYTES = GIB
# llama.cpp's name of GLM-5's architecture, and what it calls the tensors that are looked at
ARCHITECTURE = "glm-dsa"
INDEXER = ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
GATE_AND_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
UNQUANTIZED = {"F32", "F16", "BF16"}
INDEX_HEADS = (32, 64)
# key of the GGUF behind the architecture, key of config.json
HEADER_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
# vLLM 0.33.0, flashinfer_mla_sparse.py: what FLASHINFER_MLA_SPARSE_SM120 supports
SM120_OPTIONS = {
    "dtype": ("auto", "bfloat16"),
    "kv_cache_dtype": ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"),
}
SM120_INDEX_TOPK = 2048
SM120_BACKENDS = ("AUTO", "FLASHINFER_MLA_SPARSE_SM120", "CUSTOM")
# patch 0020: what the plugin's own backend supports, on any card
CUSTOM_OPTIONS = {
    "dtype": ("auto", "bfloat16"),
    "kv_cache_dtype": ("auto", "bfloat16", "fp8_ds_mla"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that stands in the way (``error``) or deserves a look (``warning``)."""

    severity: str
    check: str
    measured: str
    wanted: str
    remedy: str

    def sentence(self) -> str:
        """The finding on three lines, for people."""
        return (
            f"{self.severity} [{self.check}] measured: {self.measured}\n"
            f"  wanted: {self.wanted}\n  do: {self.remedy}"
        )


def check_host(
    system: str, os_release: Mapping[str, str] | None, architecture: str | None
) -> list[Finding]:
    """systemd as the init, Debian or Ubuntu, x86_64.

    Args:
        system: the command name of process 1.
        os_release: keys of /etc/os-release, None when unknown.
        architecture: as ``uname -m`` prints it, None when unknown.
    """
    found = []
    if system != "systemd":
        found.append(
            Finding(
                "error",
                "init",
                f"process 1 is {system or 'unknown'}",
                "systemd, which runs the service",
                "boot the machine or container with systemd as PID 1",
            )
        )
    names = f"{(os_release or {}).get('ID', '')} {(os_release or {}).get('ID_LIKE', '')}".split()
    if not {"debian", "ubuntu"} & set(names):
        found.append(
            Finding(
                "error",
                "system",
                f"ID is {' '.join(names) or 'unknown'}",
                "Debian or Ubuntu (packages come by apt)",
                "install Ubuntu 24.04 or Debian 12 or later",
            )
        )
    if architecture != "x86_64":
        found.append(
            Finding(
                "error",
                "architecture",
                architecture or "unknown",
                "x86_64 (the stacks pin wheels of it)",
                "use an x86_64 machine",
            )
        )
    return found


def check_device(stack: str, wanted: str, box: str) -> list[Finding]:
    """The stack is for the device that the box has; CPU peculiarities never reach a GPU box."""
    if wanted == box:
        return []
    if wanted == "cuda":
        return [
            Finding(
                "error",
                "device",
                "no NVIDIA device",
                f"an NVIDIA card for stack {stack}",
                "seat or power the cards (lspci -nn | grep 10de); "
                "without any, only tests can be served, with plan_stack: glm5-cpu",
            )
        ]
    return [
        Finding(
            "error",
            "device",
            "the box has NVIDIA devices",
            f"none, because stack {stack} patches vLLM for CPUs",
            "set plan_stack: glm5-cu130",
        )
    ]


def check_model(
    config: Mapping[str, Any] | None, device: str, tensor_parallel_size: int, max_model_len: int
) -> list[Finding]:
    """The sizes of the plan against config.json (None: not there yet, so nothing is known)."""
    if config is None:
        return []
    found = []
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and (tensor_parallel_size < 1 or heads % tensor_parallel_size):
        fitting = [size for size in (1, 2, 4, 8, 16) if heads % size == 0]
        found.append(
            Finding(
                "error",
                "parallel",
                f"{heads} attention heads over {tensor_parallel_size} ranks",
                "a tensor parallel size that divides the heads",
                f"set plan_tensor_parallel_size to one of {fitting}",
            )
        )
    experts = [config.get(key) for key in ("n_routed_experts", "num_experts")]
    if None not in experts and experts[0] != experts[1]:
        found.append(
            Finding(
                "error",
                "config",
                " and ".join(f"{key} {config[key]}" for key in ("n_routed_experts", "num_experts")),
                "one number of experts",
                "remove the stale num_experts from config.json",
            )
        )
    index_heads = config.get("index_n_heads")
    if device == "cuda" and isinstance(index_heads, int) and index_heads not in INDEX_HEADS:
        found.append(
            Finding(
                "error",
                "config",
                f"index_n_heads {index_heads}",
                "32 or 64 heads of the indexer: DeepGEMM computes it on a GPU and has no others",
                "serve a model with GLM-5's own indexer",
            )
        )
    top = config.get("index_topk")
    if device == "cpu" and isinstance(top, int) and max_model_len > top:
        found.append(
            Finding(
                "error",
                "context",
                f"max_model_len {max_model_len}",
                f"at most index_topk ({top}): a CPU has no sparse attention, and dense attention "
                "is the same only up to there",
                f"set plan_max_model_len to {top} or less",
            )
        )
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and max_model_len > longest:
        found.append(
            Finding(
                "error",
                "context",
                f"max_model_len {max_model_len}",
                f"at most max_position_embeddings ({longest})",
                f"set plan_max_model_len to {longest} or less",
            )
        )
    return found


def check_options(
    options: Mapping[str, Any], config: Mapping[str, Any] | None, capabilities: Iterable[str]
) -> list[Finding]:
    """Options of ``vllm serve`` that no attention backend takes on compute capability 12.x.

    With ``attention_backend`` CUSTOM: what the plugin's own backend does not take, on any card.

    The rules are those of vLLM's own selector (tests/gpu/selector.py holds them to it).

    Args:
        options: all options, by name with dashes or underscores.
        config: config.json, None when it is not there yet.
        capabilities: of the cards, such as ``12.0``; others than 12.x are not judged.
    """
    given = {name.replace("-", "_"): value for name, value in options.items()}
    backend = str(given.get("attention_backend") or "auto").upper()  # vLLM takes any case
    custom = backend == "CUSTOM"
    if not custom and not any(capability.startswith("12.") for capability in capabilities):
        return []
    found = []
    if backend not in SM120_BACKENDS:
        wanted = f"one of: {', '.join(SM120_BACKENDS)}; others have no sparse MLA for these cards"
        found.append((f"attention_backend {backend}", wanted, "attention_backend"))
    for name, allowed in (CUSTOM_OPTIONS if custom else SM120_OPTIONS).items():
        value = given.get(name)
        if value is not None and str(value) not in allowed:
            found.append((f"{name} {value}", f"one of: {', '.join(allowed)}", name))
    size = given.get("block_size")
    if size is not None and (not isinstance(size, int) or size % 64):
        found.append((f"block_size {size}", "a multiple of 64 tokens", "block_size"))
    ranks = given.get("decode_context_parallel_size")
    if ranks not in (None, 1):
        found.append(
            (
                f"decode_context_parallel_size {ranks}",
                "1: the backend of these cards cannot join parts of a context",
                "decode_context_parallel_size",
            )
        )
    findings = [
        Finding("error", "options", measured, wanted, f"correct {name} in serving_options")
        for measured, wanted, name in found
    ]
    top = (config or {}).get("index_topk")
    if isinstance(top, int) and top != SM120_INDEX_TOPK and not custom:
        findings.append(
            Finding(
                "error",
                "config",
                f"index_topk {top}",
                f"{SM120_INDEX_TOPK}: FlashInfer's kernel for these cards has no other",
                "serve a model with GLM-5's own indexer",
            )
        )
    return findings


def check_numa_bind(options: Mapping[str, Any], numactl: bool) -> list[Finding]:
    """vLLM starts its ranks through numactl where it is asked to bind them.

    Args:
        options: all options, by name with dashes or underscores.
        numactl: it is on the box or will be installed.
    """
    given = {name.replace("-", "_"): value for name, value in options.items()}
    if given.get("numa_bind") is not True or numactl:
        return []
    return [
        Finding(
            "error",
            "options",
            "numa_bind is set, and there is no numactl",
            "numactl, through which vLLM binds its ranks",
            "add numactl to python_env_extra_packages, or take numa_bind out of serving_options",
        )
    ]


def type_faults(tensors: Mapping[str, str], types: Iterable[str]) -> list[tuple[str, str, str]]:
    """Quantization types that the loader has no kernels for: measured, wanted, remedy of each.

    Args:
        tensors: name to quantization type.
        types: those that the loader reads.
    """
    by_type: dict[str, list[str]] = {}
    allowed = set(types)
    expert_allowed = allowed - UNQUANTIZED  # a loop over experts, which CUDA graphs cannot hold
    wanted = f"for experts one of: {', '.join(sorted(expert_allowed))}; elsewhere also: "
    wanted += ", ".join(sorted(allowed - expert_allowed))
    for name, kind in tensors.items():
        if kind not in (expert_allowed if name.endswith("_exps.weight") else allowed):
            by_type.setdefault(kind, []).append(name)
    return [
        (
            f"{len(names)} tensors of quantization type {kind}, the first is {names[0]}",
            wanted,
            "take another quantization of the model",
        )
        for kind, names in sorted(by_type.items())
    ]


def check_header(config: Mapping[str, Any] | None, keys: Mapping[str, int | None]) -> list[Finding]:
    """config.json, which sizes the layers, against the GGUF, which fills them.

    Args:
        config: config.json, None when it is not there yet.
        keys: whole numbers of the GGUF's header by key, of all shards.
    """
    found = []
    for key, name in HEADER_SIZES.items():
        value, stored = (config or {}).get(name), keys.get(f"{ARCHITECTURE}.{key}")
        if not isinstance(value, int) or stored is None or value == stored:
            continue
        found.append((f"{name} {value} in config.json, {key} {stored} in the GGUF", name))
    blocks = keys.get(f"{ARCHITECTURE}.block_count")
    layers, more = (
        (config or {}).get(name) for name in ("num_hidden_layers", "num_nextn_predict_layers")
    )
    more = more if isinstance(more, int) else 0
    # a conversion may leave the next-token layers out
    if isinstance(layers, int) and blocks is not None and blocks not in (layers, layers + more):
        text = f"num_hidden_layers {layers} and {more} next-token layers in config.json"
        found.append((f"{text}, block_count {blocks} in the GGUF", "num_hidden_layers"))
    return [
        Finding(
            "error",
            "config",
            measured,
            f"one {name}: they are of one model",
            "put the config.json of this very model beside the GGUF",
        )
        for measured, name in found
    ]


def check_tensors(
    architecture: str | None,
    tensors: Mapping[str, str],
    types: Iterable[str],
    config: Mapping[str, Any] | None = None,
    complete: bool = True,
) -> list[Finding]:
    """What the stack's loader makes of the GGUF's tensors.

    The server's own loader refuses the same (patch 0017), but only once it has been installed and
    the shards have been merged.

    Args:
        architecture: ``general.architecture``, None when no header says it.
        tensors: name to quantization type, of all shards; empty when there is no model yet.
        types: quantization types that the loader has kernels for.
        config: config.json; its ``indexer_types`` says which layers share another one's indexer.
        complete: the set is; what an absent shard holds is not missing from the model.
    """
    if not tensors:
        return []
    indexers = (config or {}).get("indexer_types")
    indexers = indexers if isinstance(indexers, list) else []
    found = []
    if architecture != ARCHITECTURE:
        found.append((f"architecture {architecture or 'unknown'}", ARCHITECTURE, "serve GLM-5"))
    found += type_faults(tensors, types)
    layers = sorted({int(match[1]) for name in tensors if (match := _LAYER.match(name))})
    mixed = [
        f"{layer} ({kinds[0]}, {kinds[1]})"
        for layer in layers
        if None not in (kinds := [tensors.get(f"blk.{layer}.{part}") for part in GATE_AND_UP])
        and kinds[0] != kinds[1]
    ]
    if mixed:
        found.append(
            (
                f"gate and up experts of two types in layers {', '.join(mixed)}",
                "one type: they are one matrix in vLLM",
                "take another quantization of the model",
            )
        )
    missing = [
        name
        for layer in layers
        if layer >= len(indexers) or indexers[layer] != "shared"
        for part in INDEXER
        if (name := f"blk.{layer}.indexer.{part}") not in tensors
    ]
    if complete and missing and architecture == ARCHITECTURE:
        found.append(
            (
                f"{len(missing)} tensors of the indexer are missing, the first is {missing[0]}",
                "an indexer in every layer: without it sparse attention picks tokens at random",
                "take a file that was converted with the indexer's tensors",
            )
        )
    return [Finding("error", "model", *parts) for parts in found]


def check_source(source: str, exists: bool, merged: str, made: bool | None) -> list[Finding]:
    """There is something to serve.

    Args:
        source: shard that was asked for; empty to serve ``merged`` as it is.
        exists: it is there, or will be fetched.
        made: ``merged`` is there and what was asked for; False where it is another, None where
            there is none.
    """
    if exists or made:
        return []
    return [
        Finding(
            "error",
            "model",
            f"gguf_model_source {source or 'is not set'}{' does not exist' if source else ''}, and "
            + (f"there is no {merged}" if made is None else f"{merged} was not made of its set"),
            "a shard of the set on the box, or the merged file",
            "put the shards there and set gguf_model_source to any one of them"
            + ("" if made is None else "; leave it empty to serve that file as it is"),
        )
    ]


def check_shards(faults: Iterable[GpuboxError]) -> list[Finding]:
    """What reading the headers of the set found; the merge would refuse it hours later."""
    return [
        Finding("error", "model", fault.measured, fault.wanted, fault.remedy) for fault in faults
    ]


def check_companions(missing: Iterable[str], folders: Iterable[str]) -> list[Finding]:
    """config.json and the tokenizer lie beside the shards, or are in place already."""
    names = sorted(missing)
    if not names:
        return []
    return [
        Finding(
            "error",
            "model",
            f"no {', '.join(names)} in {' or '.join(folders)}",
            "the files that gguf_model_companions names",
            "put them beside the shards, or take those that the model has not out of "
            "gguf_model_companions",
        )
    ]


def check_user(name: str, passwd: str) -> list[Finding]:
    """The service user is made by us or looks as if: changing a person's account locks them out.

    Args:
        name: the service user.
        passwd: text of /etc/passwd.
    """
    for line in passwd.splitlines():
        fields = line.split(":")
        if fields[0] != name or len(fields) < 7:
            continue
        shell = fields[6].strip()
        if fields[2] == "0" or shell.rpartition("/")[2] not in ("nologin", "false"):
            return [
                Finding(
                    "error",
                    "user",
                    f"user {name} exists with uid {fields[2]} and shell {shell or '/bin/sh'}",
                    "a user of the service alone, who cannot log in",
                    f"set serving_user to another name, or `usermod --shell /usr/sbin/nologin "
                    f"{name}` if nobody logs in by it",
                )
            ]
    return []


def check_unit(name: str, load_state: str, text: str | None, ours: bool) -> list[Finding]:
    """The unit's name is free, or is that of our own unit, and systemd may start it.

    Args:
        name: the unit with its suffix.
        load_state: LoadState as systemd says, empty when it was not asked.
        text: text of the unit's file, None when there is none to read.
        ours: the text is in the form of gpubox's unit.
    """
    if load_state == "masked":
        return [
            Finding(
                "error",
                "unit",
                f"{name} is masked",
                "a unit that systemd may start",
                f"systemctl unmask {name}",
            )
        ]
    if text is not None and not ours:
        return [
            Finding(
                "error",
                "unit",
                f"{name} exists and gpubox did not write it",
                "a name that is free or gpubox's own",
                f"set serving_unit to another name, or remove the file (systemctl cat {name})",
            )
        ]
    return []


def check_directories(files: Iterable[str]) -> list[Finding]:
    """Nothing but a directory lies where a directory is needed."""
    return [
        Finding(
            "error",
            "directory",
            f"{path} is there and no directory",
            "a directory, or nothing yet",
            f"look at it (ls -l {path}) and move it away",
        )
        for path in files
    ]


def check_port(port: int, holders: Iterable[tuple[int, str]]) -> list[Finding]:
    """Nobody but our own unit listens on the port.

    Args:
        holders: process id and command of each foreign listener; 0 is a process that could not
            be read.
    """
    return [
        Finding(
            "error",
            "port",
            f"port {port} is held by {f'PID {pid} ({command})' if pid else command}",
            f"port {port} free for the unit",
            f"stop that process ({f'ps -fp {pid}' if pid else f'ss -ltnp sport = :{port}'}), "
            "or set serving_port",
        )
        for pid, command in sorted(holders)
    ]


def plan_findings(faults: Iterable[Mapping[str, str]]) -> list[Finding]:
    """The faults of the plan, as part of the one verdict."""
    return [Finding("error", "plan", one["measured"], one["wanted"], one["do"]) for one in faults]


def unwritten_report(path: str, error: OSError) -> Finding:
    """The verdict could not be written for machines."""
    return Finding(
        "warning",
        "report",
        f"{path}: {error.strerror or error}",
        "a file for the verdict",
        "correct preflight_report or the file system, or leave preflight_report empty",
    )


def verdict(findings: Iterable[Finding]) -> dict[str, Any]:
    """Findings as data and as text; ``passed`` when none is an error."""
    ordered = sorted(findings, key=lambda finding: (finding.severity, finding.check))
    errors = [finding for finding in ordered if finding.severity == "error"]
    return {
        "passed": not errors,
        "findings": [asdict(finding) for finding in ordered],
        "text": "\n".join(finding.sentence() for finding in ordered) or "nothing stands in the way",
    }
