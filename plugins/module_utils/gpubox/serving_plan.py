# SPDX-License-Identifier: Apache-2.0
"""What will run on this box: sizes, memory and limits, from facts; pure, and never a silent guess.

Everything that the planner cannot accept is a fault with its numbers; everything that it cannot
know yet is None and a note says what the number waits for. docs/plan.md has the arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import decode_model

GIB = 1024**3
MIB = 1024**2
# flash-attention pull request 2079: 3.2 to 5 GB a thread of nvcc, measured there with CUDA 12.8
MEMORY_PER_THREAD_BYTES = 5 * GIB
NVCC_THREADS = 4  # flash-attention's own default of NVCC_THREADS
BUILD_SHARE_PERCENT = 85  # of free memory; flash-attention pull requests 2494 and 2548
MOST_JOBS = 32  # the cap of the same pull requests
DEFAULT_UTILIZATION_PERCENT = 92  # vLLM 0.33, config/cache.py
# Assumptions, not measurements: vLLM profiles the true sizes at start and prints them.
OUTSIDE_BYTES = 4 * GIB  # a card's CUDA context, NCCL buffers and CUDA graphs, outside the share
ACTIVATION_BYTES = 4 * GIB  # inside the share, the peak of a step of 8,192 tokens
FP8_DS_MLA_BYTES = 656  # a token and layer; vLLM 0.33, layers/attention/mla_attention.py
K_BLOCK = 256  # elements that share a scale in a K-quant
LOWEST_CAPABILITY = (9, 0)  # no sparse MLA backend below (field report V5)
TRITON = "triton"  # patch 0020, which registers vLLM's backend CUSTOM
BLOCK_TOKENS = 64  # the context is a multiple of a KV cache block of sparse MLA
NOFILE = 1048576
READ_SPEED_ASSUMED = 500_000_000  # bytes a second when none was measured
READ_SAFETY = 3
KEPT_SAFETY = 1.5  # what an applied limit must still have, so that it does not move with each run
JIT_FLOOR_SECONDS = 1200  # assumed; FlashInfer's first sampler alone took 100 s on an H200
START_SECONDS_UNKNOWN = 1800  # assumed, while the size of the model is unknown
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_CPU_LIST = re.compile(r"[0-9]+([,-][0-9]+)*")


@dataclass
class Plan:
    """The plan; ``to_dict`` is plain JSON. Bytes, tokens and seconds as the names say."""

    device: str
    box: dict[str, Any] = field(default_factory=dict)
    gpus: list[str] = field(default_factory=list)
    gpus_left_out: list[dict[str, str]] = field(default_factory=list)
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_tokens: int | None = None
    kv_cache_bytes_per_token_per_gpu: int | None = None
    max_model_len: int | None = None
    speculative_tokens: int = 0
    attention_backend: str | None = None
    concurrent_contexts: float | None = None
    weights_bytes_per_gpu: int | None = None
    build: dict[str, Any] = field(default_factory=dict)
    nccl: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    numa: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    faults: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    def refuse(self, measured: str, wanted: str, do: str) -> None:
        """One more fault."""
        self.faults.append({"measured": measured, "wanted": wanted, "do": do})


def _value(facts: Mapping[str, Any], name: str) -> Any:
    fact = facts.get(name)
    return fact.get("value") if isinstance(fact, Mapping) else None


def _whole(value: Any) -> int | None:
    """A whole number of up to 18 digits, else unknown. Text too, because ``-e`` gives text."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18:
        return value
    return None


def _size(facts: Mapping[str, Any] | None, name: str) -> int | None:
    return _whole((facts or {}).get(name))


def _rows(value: Any) -> list[Mapping[str, Any]]:
    """The entries of a list of devices that carry an address, in order of address."""
    found = value if isinstance(value, Sequence) and not isinstance(value, str) else []
    sound = [
        row for row in found if isinstance(row, Mapping) and isinstance(row.get("address"), str)
    ]
    return [row for _, row in sorted({row["address"]: row for row in sound}.items())]


def gib(size: int) -> str:
    """Bytes for people, without a decimal that is none."""
    return f"{size / GIB:.1f}".removesuffix(".0") + " GiB"


# --- parts of the plan ----------------------------------------------------------------------------


def build_jobs(free: int | None, cpus: int | None, most: int) -> dict[str, Any]:
    """MAX_JOBS of a flash-attn build: memory per job x threads within the share of free memory.

    Args:
        free: bytes of memory that are available within the control groups, None when unknown.
        cpus: CPUs that may be used, None when unknown.
        most: highest number of jobs.

    Returns:
        ``max_jobs`` (0: not even one fits; None: memory unknown) and the arithmetic as a sentence.
    """
    job = MEMORY_PER_THREAD_BYTES * NVCC_THREADS
    result = {"threads_per_job": NVCC_THREADS, "memory_per_job_bytes": job}
    if free is None:
        return {**result, "max_jobs": None, "arithmetic": "the free memory is unknown"}
    share = free * BUILD_SHARE_PERCENT // 100
    jobs = min(share // job, most, *([max(cpus, 1)] if cpus is not None else []))
    text = (
        f"{BUILD_SHARE_PERCENT} % of {gib(free)} free is {gib(share)}; one job is {NVCC_THREADS} "
        f"threads x {gib(MEMORY_PER_THREAD_BYTES)} = {gib(job)}, so {share // job} fit; "
        f"at most {most}{'' if cpus is None else f' and one a CPU ({cpus})'}: {jobs}"
    )
    return {**result, "max_jobs": jobs, "arithmetic": text}


def tensor_parallel_fault(size: int, model: Mapping[str, Any] | None) -> str | None:
    """Why the model cannot be divided over ``size`` ranks, None when it can (or is unknown)."""
    for name, text in (("heads", "attention heads"), ("index_heads", "index heads")):
        heads = _size(model, name)
        if heads and heads % size:
            return f"{heads} {text} do not divide by {size}"
    rows = (model or {}).get("row_parallel")
    pairs = [
        (_whole(pair[0]), _whole(pair[1]))
        for pair in (rows if isinstance(rows, list) else [])
        if isinstance(pair, list | tuple) and len(pair) == 2
    ]
    inner = _size(model, "expert_intermediate_size")
    if not pairs and inner:
        pairs = [(inner, K_BLOCK)]
    for elements, block in pairs:
        if elements and block and elements % (size * block):
            return f"rows of {elements} do not divide into {size} x blocks of {block}"
    return None


def _choose_cards(
    plan: Plan, hardware: Mapping[str, Any], overrides: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The usable cards in order of address; lost, fewer, other and mixed ones are faults."""
    devices = _rows(_value(hardware, "nvidia_devices"))
    seen = _rows(_value(hardware, "gpus"))
    # "no devices were found" is an answer too, and not the same as none
    answered = isinstance(_value(hardware, "gpus"), list)
    by_address = {row["address"]: row for row in seen}
    held = _value(hardware, "driver_gpus")
    taken = {one for one in (held if isinstance(held, list) else []) if isinstance(one, str)}
    cards: list[Mapping[str, Any]] = []
    for device in devices or seen:
        address = device["address"]
        reason = ""
        if device.get("revision") == "ff":
            reason = "it has fallen off the bus (rev ff)"
        elif answered and address not in by_address:
            reason = "the driver does not reach it"
        elif not answered and taken and address not in taken:
            reason = "the driver has not taken it (/proc/driver/nvidia/gpus)"
        if reason:
            _lose(plan, hardware, address, reason, len(devices))
        else:
            cards.append({**device, **by_address.get(address, {})})
    if devices:
        on_bus = {device["address"] for device in devices}
        for address in sorted((taken | set(by_address)) - on_bus):
            _lose(plan, hardware, address, "the driver has it, the PCI bus not", len(on_bus) + 1)
    if not answered:
        plan.notes.append("memory and kind of the cards wait for the driver (nvidia-smi)")
    expected = _whole(overrides.get("expected_gpus")) or 0
    applied = overrides.get("applied")
    before = applied.get("gpus") if isinstance(applied, Mapping) else None
    if expected and len(cards) != expected:
        plan.refuse(
            f"{len(cards)} usable cards",
            f"plan_expected_gpus: {expected}",
            f"find the missing cards, or set plan_expected_gpus: {len(cards)}",
        )
    elif not expected and isinstance(before, list) and len(cards) < len(before):
        addresses = {card["address"] for card in cards}
        gone = [str(one) for one in before if one not in addresses]
        plan.refuse(
            f"{len(cards)} usable cards; gone: {', '.join(gone)}",
            f"the {len(before)} of the plan last applied",
            f"find the missing cards, or set plan_expected_gpus: {len(cards)}",
        )
    _check_kinds(plan, cards, overrides)
    return cards


def _lose(plan: Plan, hardware: Mapping[str, Any], address: str, reason: str, wanted: int) -> None:
    """A card that cannot be used, with the words of nvidia-smi and of the kernel about it."""
    said = _said_of(hardware, address)
    remedy = (
        "read dmesg for NVRM and Xid lines of that address, then power the box off and on "
        "(a reboot does not reset the slot); if it comes back, reseat or replace the card"
    )
    if "RmInitAdapter" in said:  # field report D4
        remedy = (
            f"switch Above 4G decoding and Resizable BAR on in the firmware; if they are, {remedy}"
        )
    plan.gpus_left_out.append({"address": address, "reason": reason + said})
    plan.refuse(f"card {address}: {reason}{said}", f"{wanted} cards that answer", remedy)


def _said_of(hardware: Mapping[str, Any], address: str) -> str:
    """What is said about a card, in brackets; Xid lines leave the function out."""
    slot = address.partition(".")[0]
    said = []
    for name in ("nvidia_smi_messages", "kernel_messages"):
        messages = _value(hardware, name)
        lines = messages if isinstance(messages, list) else []
        of_it = [line for line in lines if isinstance(line, str) and slot in line.lower()]
        said += of_it[-2:]
    return f" ({'; '.join(said)})" if slot and said else ""


def _check_kinds(
    plan: Plan, cards: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any]
) -> None:
    wanted = overrides.get("expected_gpu_model") or ""
    kinds: dict[str, list[str]] = {}
    for card in cards:
        memory = _whole(card.get("memory_total_mib"))
        text = f"{card.get('name') or 'unknown'}{'' if memory is None else f', {memory} MiB'}"
        kinds.setdefault(text, []).append(card["address"])
        capability = re.fullmatch(
            r"([0-9]{1,3})\.([0-9]{1,3})", str(card.get("compute_capability"))
        )
        if capability and (int(capability[1]), int(capability[2])) < LOWEST_CAPABILITY:
            plan.refuse(
                f"card {card['address']} has compute capability {capability[0]}",
                "9.0 or higher: below there is no sparse MLA backend",
                "use cards of compute capability 9.0 or higher",
            )
        if wanted and str(wanted) not in text:
            plan.refuse(
                f"card {card['address']} is {text}",
                f"plan_expected_gpu_model: {wanted}",
                "correct plan_expected_gpu_model, or exchange the card",
            )
    if len(kinds) > 1 and overrides.get("allow_mixed_gpus") is not True:
        plan.refuse(
            "a mixed set: " + "; ".join(f"{len(kinds[kind])} x {kind}" for kind in sorted(kinds)),
            "cards of one model and memory size",
            "take the odd cards out, or set plan_allow_mixed_gpus: true (the smallest sets sizes)",
        )


def _parallel(plan: Plan, cards: int, model: Any, overrides: Mapping[str, Any]) -> None:
    """Divide the cards: all of them by tensor parallel, then by pipeline stages."""
    asked = _whole(overrides.get("tensor_parallel_size")) or 0
    stages = _whole(overrides.get("pipeline_parallel_size")) or 0
    layers = _size(model, "layers")
    plan.data_parallel_size = max(_whole(overrides.get("data_parallel_size")) or 1, 1)
    each = cards // plan.data_parallel_size
    if each == 0:
        plan.refuse(
            f"{cards} cards",
            f"at least one for each of plan_data_parallel_size: {plan.data_parallel_size}",
            "lower plan_data_parallel_size",
        )
        plan.data_parallel_size, each = 1, cards
    if stages > min(each, layers or each):
        plan.refuse(
            f"{each} cards for each copy of the model"
            + (f" of {layers} layers" if layers is not None else ""),
            f"plan_pipeline_parallel_size: {stages}",
            "set plan_pipeline_parallel_size: 0, which plans it",
        )
        stages = 0
    most = each // max(stages, 1)
    if asked:
        reason = tensor_parallel_fault(asked, model)
        if reason or asked > most:
            within = f" and {stages} pipeline stages" if stages else ""
            plan.refuse(
                reason or f"{each} cards for each copy of the model{within}",
                f"plan_tensor_parallel_size: {asked}",
                "set plan_tensor_parallel_size: 0, which plans it",
            )
            asked = 0
    fitting = [n for n in range(1, most + 1) if not tensor_parallel_fault(n, model)]
    if asked or stages:
        plan.tensor_parallel_size = asked or max(fitting or [1])
        plan.pipeline_parallel_size = max(stages, 1)
        return
    # all cards first, then few stages: a stage waits for the one before it
    whole = [n for n in fitting if each % n == 0 and (layers is None or each // n <= layers)]
    plan.tensor_parallel_size = max(whole or fitting or [1])
    if whole and plan.tensor_parallel_size < each:
        plan.pipeline_parallel_size = each // plan.tensor_parallel_size
        why = tensor_parallel_fault(each, model)
        plan.notes.append(
            f"pipeline parallel {plan.pipeline_parallel_size}, because {why}; "
            "nobody has measured it with a GGUF"
        )


def _memory(
    plan: Plan, cards: Sequence[Mapping[str, Any]], model: Any, options: Mapping[str, Any]
) -> int | None:
    """Share of the cards' memory, weights and KV cache; the tokens that fit, None when unknown."""
    plan.kv_cache_dtype = str(options.get("kv_cache_dtype") or "auto")
    tp, pp = plan.tensor_parallel_size, plan.pipeline_parallel_size
    weights = (model or {}).get("weights")
    if isinstance(weights, Mapping):
        prefixes = ["", "mtp_"] if plan.speculative_tokens else [""]
        divided = sum(_whole(weights.get(f"{one}divided")) or 0 for one in prefixes)
        whole = sum(_whole(weights.get(f"{one}replicated")) or 0 for one in prefixes)
        plan.weights_bytes_per_gpu = -(-(-(-divided // tp) + whole) // pp)
    plan.kv_cache_bytes_per_token_per_gpu = _kv_bytes(plan, model, options)
    plan.gpu_memory_utilization = _share(plan, options)
    totals = {card["address"]: _whole(card.get("memory_total_mib")) for card in cards}
    untold = [address for address, size in totals.items() if not size]
    if untold and len(untold) < len(totals):
        plan.notes.append(f"nvidia-smi does not tell the memory of card {', '.join(untold)}")
    elif untold and any(card.get("uuid") or card.get("name") for card in cards):
        plan.notes.append(
            "nvidia-smi tells the memory of no card: weights, KV cache and context are not "
            "checked against it"
        )
    known = [size * MIB for size in totals.values() if size]
    if untold or not known:
        return None
    total = min(known)
    percent = min(DEFAULT_UTILIZATION_PERCENT, max(total - OUTSIDE_BYTES, 0) * 100 // total)
    if plan.gpu_memory_utilization is None:
        plan.gpu_memory_utilization = percent / 100
    share = int(total * plan.gpu_memory_utilization)
    if total - share < min(OUTSIDE_BYTES, total):
        plan.notes.append(
            f"gpu_memory_utilization {plan.gpu_memory_utilization} leaves {gib(total - share)} of "
            f"a card; {gib(OUTSIDE_BYTES)} are assumed to be needed outside"
        )
    if plan.weights_bytes_per_gpu is None or not plan.kv_cache_bytes_per_token_per_gpu:
        return None
    room = share - plan.weights_bytes_per_gpu - ACTIVATION_BYTES
    if room < plan.kv_cache_bytes_per_token_per_gpu * BLOCK_TOKENS:
        plan.refuse(
            f"{gib(plan.weights_bytes_per_gpu)} of weights a card and {gib(ACTIVATION_BYTES)} for "
            f"activations, {plan.gpu_memory_utilization:.2f} of {gib(total)} is {gib(share)}",
            "room for the KV cache besides",
            "add cards, or take a smaller quantisation of the model",
        )
        return None
    return room // plan.kv_cache_bytes_per_token_per_gpu


def _share(plan: Plan, options: Mapping[str, Any]) -> float | None:
    """gpu-memory-utilization of the stack or of serving_options, None where neither has it."""
    given = options.get("gpu_memory_utilization")
    if given is None:
        return None
    # what is no number at all has no comparison either
    if re.fullmatch(r"(0?\.[0-9]{1,9}|1(\.0{1,9})?)", str(given)) and float(str(given)) > 0:
        return float(str(given))
    plan.refuse(
        f"gpu_memory_utilization {given}",
        "a number above 0 and up to 1",
        "correct it in serving_options, or leave it out",
    )
    return None


def _kv_bytes(plan: Plan, model: Any, options: Mapping[str, Any]) -> int | None:
    """KV cache of a token on one card; MLA keeps one latent vector, whole on every rank."""
    layers, rank, rope = (_size(model, n) for n in ("layers", "kv_lora_rank", "qk_rope_head_dim"))
    if layers is None or rank is None or rope is None:
        return None
    layers = -(-layers // plan.pipeline_parallel_size)
    layers += (_size(model, "mtp_layers") or 0) if plan.speculative_tokens else 0
    if plan.device == "cpu":  # dense MLA, no indexer
        return layers * (rank + rope) * _DTYPE_BYTES.get(str(options.get("dtype")), 2)
    latent = _latent_bytes(plan, rank + rope)
    # keys in fp8 and a scale of four bytes for each 128 (models/deepseek_v32/attention.py:96)
    head = _size(model, "index_head_dim") or 0
    return layers * (latent + head + head // 128 * 4)


def _latent_bytes(plan: Plan, elements: int) -> int:
    """KV cache of a token in one layer on a card, without the keys of the indexer."""
    return FP8_DS_MLA_BYTES if plan.kv_cache_dtype.startswith("fp8") else elements * 2


def _attention(plan: Plan, overrides: Mapping[str, Any], options: dict[str, Any]) -> None:
    """The backend that is asked for, and the layout of the KV cache that comes with it.

    vLLM packs an fp8 cache (fp8_ds_mla) by itself for its own backends only; what serving_options
    says of it is kept, and judged in preflight.
    """
    asked = overrides.get("attention_backend") or None
    if asked is None:
        return
    if plan.device != "cuda" or asked != TRITON:
        plan.refuse(
            f"plan_attention_backend: {asked}"
            + ("" if plan.device == "cuda" else ", and a stack that computes on the CPU"),
            f"{TRITON} with a stack for cards, or empty",
            'set plan_attention_backend: ""',
        )
        return
    plan.attention_backend = TRITON
    given = overrides.get("options")
    own = {str(name).replace("-", "_") for name in given} if isinstance(given, Mapping) else set()
    if "kv_cache_dtype" not in own and str(options.get("kv_cache_dtype")) in ("fp8", "fp8_e4m3"):
        options["kv_cache_dtype"] = "fp8_ds_mla"


def _settings(stack: Any, overrides: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``options`` or ``environment`` of the server: the stack's, and the operator's over them."""
    serve = stack.get("serve") if isinstance(stack, Mapping) else None
    found: dict[str, Any] = {}
    for layer in (serve, overrides):
        given = layer.get(name) if isinstance(layer, Mapping) else None
        for key, value in given.items() if isinstance(given, Mapping) else ():
            found[str(key).replace("-", "_") if name == "options" else str(key)] = value
    return found


def _cpu_tokens(
    plan: Plan,
    hardware: Mapping[str, Any],
    model: Any,
    options: Mapping[str, Any],
    variables: Mapping[str, Any],
) -> int | None:
    """Tokens of the CPU's KV cache; a model larger than the free memory is a fault."""
    plan.kv_cache_bytes_per_token_per_gpu = _kv_bytes(plan, model, options)
    size, free = _size(model, "tensor_bytes"), _whole(_value(hardware, "memory_available_bytes"))
    if size is not None and free is not None and size > free:
        plan.refuse(
            f"{gib(size)} of weights, {gib(free)} of free memory",
            "a model that fits in memory",
            "take a smaller model, or a box with NVIDIA cards",
        )
    space = _size(variables, "VLLM_CPU_KVCACHE_SPACE")
    if space is None or not plan.kv_cache_bytes_per_token_per_gpu:
        return None
    return space * GIB // plan.kv_cache_bytes_per_token_per_gpu


def _check_cpu_overrides(
    plan: Plan, hardware: Mapping[str, Any], overrides: Mapping[str, Any]
) -> None:
    """What is asked for cards is refused where the stack uses none."""
    expected = _whole(overrides.get("expected_gpus")) or 0
    if expected:
        found = len(_rows(_value(hardware, "nvidia_devices")))
        plan.refuse(
            f"{found} cards, and a stack that computes on the CPU",
            f"plan_expected_gpus: {expected}",
            "set plan_stack: glm5-cu130, or plan_expected_gpus: 0",
        )
    kind = overrides.get("expected_gpu_model")
    if kind:
        plan.refuse(
            "a stack that computes on the CPU",
            f"plan_expected_gpu_model: {kind}",
            'set plan_stack: glm5-cu130, or plan_expected_gpu_model: ""',
        )
    for name, least in (("data_parallel_size", 1), ("pipeline_parallel_size", 0)):
        asked = _whole(overrides.get(name)) or 1
        if asked > 1:
            plan.refuse(
                "a stack that computes on the CPU, which holds one copy of the model in one stage",
                f"plan_{name}: {asked}",
                f"set plan_{name}: {least}",
            )


def _context(plan: Plan, tokens: int | None, model: Any, overrides: Mapping[str, Any]) -> None:
    plan.kv_cache_tokens = None if tokens is None else tokens // BLOCK_TOKENS * BLOCK_TOKENS
    asked = _whole(overrides.get("max_model_len")) or 0
    bounds = [_size(model, "max_position_embeddings"), plan.kv_cache_tokens]
    if plan.device == "cpu":  # dense attention is the same only up to there
        bounds.append(_size(model, "index_topk"))
    known = [bound for bound in bounds if bound]
    if asked:
        plan.max_model_len = asked
        if plan.kv_cache_tokens is not None and asked > plan.kv_cache_tokens:
            plan.refuse(
                f"{plan.kv_cache_tokens} tokens of KV cache fit",
                f"plan_max_model_len: {asked}",
                "set plan_max_model_len: 0, which plans it, or a lower one",
            )
    elif known:
        plan.max_model_len = min(known)
    if plan.max_model_len and plan.kv_cache_tokens is not None:
        plan.concurrent_contexts = round(plan.kv_cache_tokens / plan.max_model_len, 2)


def _links(plan: Plan, hardware: Mapping[str, Any]) -> None:
    """NCCL variables by the worst link between the cards that are used."""
    if len(plan.gpus) < 2:
        return
    matrix = _value(hardware, "gpu_links")
    matrix = matrix if isinstance(matrix, Mapping) else {}
    classes = set()
    for one in plan.gpus:
        row = matrix.get(one)
        for other in plan.gpus:
            if one != other:
                link = row.get(other) if isinstance(row, Mapping) else None
                classes.add(link if isinstance(link, str) else None)
    if classes == {"nvlink"}:
        plan.notes.append("NVLink between all cards: NCCL's own choices are kept")
    elif "nvlink" in classes or not classes <= {"pcie_switch", "pcie_socket", "pcie_cross_socket"}:
        plan.notes.append(
            "the links between the cards are mixed or unknown: no NCCL variable is set"
        )
    else:
        # glm5-on-vllm: 43 to 57 tokens/s with LL on the historic stack. How far P2P reaches stays
        # NCCL's own choice: nobody measured another one here, and P2P can hang (field report V1)
        plan.nccl = {"NCCL_PROTO": "LL"}
        plan.notes.append(
            "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=1 may be faster: measure on the box"
        )
        bridges = _value(hardware, "acs_redirecting")
        if _value(hardware, "iommu") == "on" and isinstance(bridges, list) and bridges:
            plan.notes.append(
                f"the IOMMU translates and ACS redirects at {len(bridges)} bridges: NCCL may hang "
                "(field report V1); if it does, switch both off in the firmware or set "
                "NCCL_P2P_DISABLE=1"
            )


def _numa(
    plan: Plan,
    cards: Sequence[Mapping[str, Any]],
    hardware: Mapping[str, Any],
    overrides: Mapping[str, Any],
    options: Mapping[str, Any],
) -> None:
    """CPUs of the unit: those of the node that all cards hang on, where the box has others too.

    Memory follows, because Linux takes it from the node of the CPU that first writes it. Where the
    nodes are unknown, the same cards keep what is applied. Of cards on several nodes vLLM binds
    each rank to the node of its card, if ``numa_bind`` is asked for.
    """
    nodes = [_whole(card.get("numa_node")) for card in cards if card["address"] in plan.gpus]
    by_rank = plan.device == "cuda" and options.get("numa_bind") is True
    plan.numa = {"nodes": nodes, "node": None, "cpus": "", "by_rank": by_rank}
    facts = _value(hardware, "numa_nodes")
    if not nodes or None in nodes or not isinstance(facts, list):
        applied = overrides.get("applied")
        before = applied.get("numa") if isinstance(applied, Mapping) else None
        same = isinstance(applied, Mapping) and applied.get("gpus") == plan.gpus and plan.gpus
        if same and isinstance(before, Mapping) and _CPU_LIST.fullmatch(str(before.get("cpus"))):
            plan.numa |= {"node": _whole(before.get("node")), "cpus": str(before["cpus"])}
        return
    if len(set(nodes)) > 1:
        if not by_rank:
            plan.notes.append(
                "cards on several NUMA nodes, and no rank is bound to that of its card: "
                "serving_options: {numa_bind: true} and python_env_extra_packages: [numactl] bind "
                "them; nobody has measured it, so measure it on the box"
            )
        return
    cpus = {
        _whole(one.get("node")): str(one["cpus"])
        for one in facts
        if isinstance(one, Mapping) and _CPU_LIST.fullmatch(str(one.get("cpus")))
    }
    if len(cpus) > 1 and nodes[0] in cpus:
        plan.numa |= {"node": nodes[0], "cpus": cpus[nodes[0]]}


def _limits(
    plan: Plan, hardware: Mapping[str, Any], model: Any, overrides: Mapping[str, Any]
) -> None:
    """Start and readiness limit: what the operator asks, what is applied and still enough, or new.

    The disk's rate differs from run to run. An applied limit is kept while it leaves half of the
    safety, so that no server is restarted because of a measurement.
    """
    size = _size(model, "tensor_bytes")
    speeds = _value(hardware, "read_speeds")
    known = [_whole(one) for one in speeds.values()] if isinstance(speeds, Mapping) else []
    measured = min((one for one in known if one), default=None)
    speed = measured or READ_SPEED_ASSUMED
    applied = overrides.get("applied")
    limits = applied.get("limits") if isinstance(applied, Mapping) else None
    before = _size(limits, "start_timeout_seconds") if isinstance(limits, Mapping) else None
    asked = _whole(overrides.get("start_timeout"))
    least = 0
    if size is None:
        seconds = before or START_SECONDS_UNKNOWN
        text = f"the size of the model is unknown: {seconds} s"
    else:
        least = int(size / speed * KEPT_SAFETY) + JIT_FLOOR_SECONDS
        seconds = -(-size // speed) * READ_SAFETY + JIT_FLOOR_SECONDS
        text = (
            f"{size / 1e9:.1f} GB at {speed / 1e9:.2f} GB/s "
            f"({'measured' if measured else 'assumed'}) x {READ_SAFETY}, and {JIT_FLOOR_SECONDS} s "
            f"for the first compiles: {seconds} s"
        )
        if before and before >= least and before != seconds:
            seconds = before
            text += f"; the applied {before} s are kept"
    if asked:
        if asked < least and plan.device == "cuda":
            plan.notes.append(f"serving_start_timeout {asked} s may be too short ({text})")
        seconds, text = asked, f"serving_start_timeout: {asked} s ({text})"
    plan.limits = {
        "memlock": "infinity",
        "nofile": NOFILE,
        "start_timeout_seconds": seconds,
        "ready_timeout_seconds": seconds,
        "arithmetic": text,
    }


def _expect(
    plan: Plan, cards: Sequence[Mapping[str, Any]], model: Any, variables: Mapping[str, Any]
) -> None:
    """What one stream can expect, as the server is started; it decides nothing."""
    kind = decode_model.NCCL_DEFAULT
    if str(variables.get("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC")) == "1":
        kind = decode_model.PCIE_IPC
    elif {**plan.nccl, **variables}.get("NCCL_PROTO") == "LL":
        kind = decode_model.NCCL_LL
    elements = (_size(model, "kv_lora_rank") or 0) + (_size(model, "qk_rope_head_dim") or 0)
    plan.expected = decode_model.expected(
        model,
        [card.get("name") for card in cards],
        ranks=(
            plan.tensor_parallel_size,
            plan.pipeline_parallel_size,
            plan.data_parallel_size,
        ),
        pcie=bool(plan.nccl),
        latent=_latent_bytes(plan, elements),
        kind=kind,
        drafts=plan.speculative_tokens,
    )


def plan(
    hardware: Mapping[str, Any],
    model: Mapping[str, Any] | None,
    stack: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> Plan:
    """Decide what runs. Never raises on facts of any shape: what is not understood is unknown.

    Args:
        hardware: the result of ``hardware_facts``.
        model: the result of ``model_facts``, None when there is no model on the box yet.
        stack: of ``load_stack``; ``device`` and ``serve`` are read.
        overrides: the variables plan_* without their prefix, 0 and "" meaning "planned" or "any";
            ``options``, ``environment`` and ``start_timeout`` are those of serving_*, ``applied``
            is the plan last applied.
    """
    device = "cuda" if stack.get("device") == "cuda" else "cpu"
    result = Plan(device=device)
    result.speculative_tokens = _whole(overrides.get("speculative_tokens")) or 0
    free = _whole(_value(hardware, "memory_available_bytes"))
    cpus = _whole(_value(hardware, "cpu_count"))
    result.build = build_jobs(free, cpus, _whole(overrides.get("max_jobs")) or MOST_JOBS)
    if not model:
        result.notes.append("weights, KV cache, context and start limit wait for the model")
    faults = (model or {}).get("faults")
    result.notes += [str(fault) for fault in (faults if isinstance(faults, list) else [])]
    options = _settings(stack, overrides, "options")
    variables = _settings(stack, overrides, "environment")
    _attention(result, overrides, options)
    if device == "cpu":
        result.tensor_parallel_size = _whole(overrides.get("tensor_parallel_size")) or 1
        reason = tensor_parallel_fault(result.tensor_parallel_size, model)
        if reason:
            result.refuse(
                reason,
                f"plan_tensor_parallel_size: {result.tensor_parallel_size}",
                "set plan_tensor_parallel_size: 0, which plans it",
            )
        _check_cpu_overrides(result, hardware, overrides)
        tokens = _cpu_tokens(result, hardware, model, options, variables)
        cards: list[Mapping[str, Any]] = []
    else:
        cards = _choose_cards(result, hardware, overrides)
        if not cards:
            result.refuse(
                "no usable NVIDIA card",
                "at least one",
                "seat or power the cards; for tests without any set plan_stack: glm5-cpu",
            )
        _parallel(result, max(len(cards), 1), model, overrides)
        used = (
            result.tensor_parallel_size * result.pipeline_parallel_size * result.data_parallel_size
        )
        result.gpus = [card["address"] for card in cards[:used]]
        for card in cards[used:]:
            reason = f"{used} of {len(cards)} cards are what the parallel sizes use"
            result.gpus_left_out.append({"address": card["address"], "reason": reason})
        tokens = _memory(result, cards[:used], model, options)
        if result.build["max_jobs"] == 0:
            result.notes.append(f"no flash-attn build fits: {result.build['arithmetic']}")
    _context(result, tokens, model, overrides)
    _links(result, hardware)
    if device == "cuda":
        _expect(result, cards[: len(result.gpus)], model, variables)
    _numa(result, cards, hardware, overrides, options)
    _limits(result, hardware, model, overrides)
    total = _whole(_value(hardware, "memory_total_bytes"))
    result.box = {"cpus": cpus, "memory_total_bytes": total}
    return result
