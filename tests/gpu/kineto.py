# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, from a trace that PyTorch's profiler wrote (Kineto's Chrome format).

vLLM annotates each step: execute_context_<requests>(<tokens>)_generation_<requests>(<tokens>)
(vllm 0.33, v1/worker/gpu_worker.py, annotate_profile). A kernel belongs to the step in which it was
launched: its correlation names the launch, for kernels of a CUDA graph the launch of the graph.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
STEP = re.compile(r"execute_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)")
TOP = 12  # kernels that are named
PRODUCT = r"nvjet|gemm|gemv|cutlass|xmma|cublas|splitK"
# group: what the names of its kernels have in them; the first that fits
GROUPS = (
    ("between", r"^triton_(poi|per|red)_"),  # what torch.compile fused
    ("experts", r"moe_vec_q|moe_q\d|_moe_kernel|gate_up_kernel|down_kernel"),
    ("experts", r"large_batch_kernel|packed_experts_kernel"),
    ("linear", r"mul_mat|_gemm_kernel\b|dequant|linear_kernel|packed_kernel"),
    ("rounding to 8 bits", r"quantize_q8_1|quantize_row_q8"),
    ("attention", r"mla|flash|fmha|attn|join_parts|get_mla_metadata"),
    ("indexer", r"mqa_logits|indexer|top_?k_?per_?row|persistent_topk|radix|hadamard|_req_index"),
    ("routing", r"moe_align|count_and_sort|grouped_topk|topk|moe_sum|router|gating"),
    ("matrices in bfloat16", PRODUCT),
    ("sampling", r"argmax|softmax|sample|distribution|exponential|multinomial|penal|bernoulli"),
    ("copies", r"^memcpy|^memset|copy|CatArray"),
    ("between", r"norm|rotary|rope|silu|act_and_mul|elementwise|reduce|Fill|fused"),
)


class Work(NamedTuple):
    """A kernel, copy or fill: microseconds, and the stream on which it waited for others."""

    began: float
    duration: float
    name: str
    stream: int = 0


@dataclass
class Step:
    """A step of the engine: what ran in it, in order of time; microseconds."""

    contexts: int
    context_tokens: int
    generations: int
    work: list[Work] = field(default_factory=list)


@dataclass(frozen=True)
class Profile:
    """Milliseconds a step: ``busy`` while any kernel runs, ``period`` from step to step."""

    steps: int
    busy: float
    period: float
    groups: dict[str, tuple[float, float]]  # milliseconds, calls
    kernels: dict[str, tuple[float, float]]


def load(path: Path) -> list[dict[str, Any]]:
    """The events of a trace.

    Raises:
        ValueError: it is no trace, or only a part of one.
    """
    data = path.read_bytes()
    try:
        found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise ValueError(f"{path.name}: {fault}") from fault
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{path.name} has no list of events")
    return events


def short(event: dict[str, Any]) -> str:
    """A kernel's name without its template arguments, but with what tells its jobs apart."""
    name = str(event.get("name", "?"))
    plain = re.sub(r"^(void|static) ", "", name)
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", plain)
    plain = re.split(r"[<(]", plain, maxsplit=1)[0].strip() or name
    if "elementwise" in plain or "reduce" in plain:  # what they do is in the argument
        inner = re.findall(r"(\w+(?:Functor|_kernel_cuda|Ops|Op))\b", name)
        plain += f" {inner[0]}" if inner else ""
    if plain in ("large_batch_kernel", "linear_kernel", "packed_kernel"):
        plain += f" {event.get('args', {}).get('grid', '')}"
    return plain[:90]


def group(name: str, before: str = "") -> str:
    """The group of a kernel; ``before``: the one before it on its stream.

    Patches 0013, 0019 and 0023 add up sums with kernels of one name, each after its own. A product
    of matrices with weights that were just dequantised is one of a linear layer.
    """
    if "dequant" in before and re.search(PRODUCT, name, re.I):
        return "linear"
    if name == "sum_kernel":
        return "linear" if before.startswith(("linear_kernel", "packed_kernel")) else "experts"
    return next((one for one, words in GROUPS if re.search(words, name, re.I)), "rest")


def steps(events: Iterable[dict[str, Any]], categories: Sequence[str] = ON_DEVICE) -> list[Step]:
    """The annotated steps in order, with what each launched."""
    begins: list[tuple[float, Step]] = []
    launches: dict[Any, float] = {}
    work: list[tuple[Work, Any]] = []
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", ""))
        if event.get("ph") != "X" or "ts" not in event:
            continue
        began = float(event["ts"])
        if kind == "user_annotation" and (match := STEP.match(name)):
            numbers = [int(text) for text in match.groups()]
            begins.append((began, Step(numbers[0], numbers[1], numbers[2])))
        elif kind in ("cuda_runtime", "cuda_driver"):
            launches[event.get("args", {}).get("correlation")] = began
        elif kind in categories:
            facts = event.get("args", {})
            one = Work(began, float(event.get("dur", 0)), short(event), facts.get("stream", 0))
            work.append((one, facts.get("correlation")))
    begins.sort(key=lambda pair: pair[0])
    times = [began for began, _ in begins]
    for one, correlation in sorted(work, key=lambda pair: pair[0].began):
        launched = launches.get(correlation)
        if launched is None:
            if launches:
                continue  # launched before the trace began
            launched = one.began  # what runs on the CPU
        number = bisect.bisect_right(times, launched) - 1
        if number >= 0:
            begins[number][1].work.append(one)
    return [step for _, step in begins]


def covered(work: Iterable[Work]) -> float:
    """Microseconds in which something ran; ``work`` in order of time."""
    total, until = 0.0, float("-inf")
    for one in work:
        end = one.began + one.duration
        total += max(0.0, end - max(one.began, until))
        until = max(until, end)
    return total


def decoding(found: Sequence[Step], clients: int) -> list[Step]:
    """The steps in which all clients decode, without the first and the last one."""
    inner = found[1:-1] if len(found) > 3 else found
    return [step for step in inner if step.generations == clients and not step.contexts]


def prefilling(found: Sequence[Step]) -> list[Step]:
    """The steps of a prompt as one: a long one may take several."""
    parts = [step for step in found if step.contexts and step.work]
    if not parts:
        return []
    tokens = sum(step.context_tokens for step in parts)
    return [Step(1, tokens, 0, sorted(one for step in parts for one in step.work))]


def unassigned(events: Iterable[dict[str, Any]], found: Sequence[Step]) -> float:
    """Share of the card's time in a trace that is in no step."""
    times = [float(event.get("dur", 0)) for event in events if event.get("cat") in ON_DEVICE]
    assigned = sum(one.duration for step in found for one in step.work)
    return 1 - assigned / sum(times) if sum(times) else 0.0


def summarize(chosen: Sequence[Step]) -> Profile | None:
    """The mean of some steps; None without any work in them."""
    chosen = [step for step in chosen if step.work]
    if not chosen:
        return None
    groups: dict[str, list[float]] = {}
    kernels: dict[str, list[float]] = {}
    for step in chosen:
        before: dict[int, str] = {}
        for one in step.work:
            of = group(one.name, before.get(one.stream, ""))
            for sums, key in ((groups, of), (kernels, one.name)):
                entry = sums.setdefault(key, [0.0, 0.0])
                entry[0] += one.duration
                entry[1] += 1
            before[one.stream] = one.name

    def mean(sums: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
        count = len(chosen)
        parts = {key: (ms / count / 1e3, calls / count) for key, (ms, calls) in sums.items()}
        return dict(sorted(parts.items(), key=lambda part: -part[1][0]))

    first = [step.work[0].began for step in chosen]
    last = max(one.began + one.duration for one in chosen[-1].work)
    period = (first[-1] - first[0]) / (len(first) - 1) if len(first) > 1 else last - first[0]
    busy = sum(covered(step.work) for step in chosen) / len(chosen)
    return Profile(len(chosen), busy / 1e3, period / 1e3, mean(groups), mean(kernels))


def table(title: str, profile: Profile) -> list[str]:
    """Lines: groups, then the kernels that take most."""
    per = f"{profile.steps} steps, ms a step: busy {profile.busy:.3f}, period {profile.period:.3f}"
    lines = [f"-- {title}: {per}"]
    whole = sum(ms for ms, _ in profile.groups.values()) or 1.0
    rows = [(name, *numbers) for name, numbers in profile.groups.items()]
    kernels = list(profile.kernels.items())
    rows.append(("kernels:", 0.0, 0.0))
    rows += [(f"  {name}", *numbers) for name, numbers in kernels[:TOP]]
    if rest := kernels[TOP:]:
        time, calls = (sum(numbers[i] for _, numbers in rest) for i in (0, 1))
        rows.append((f"  {len(rest)} others", time, calls))
    for name, milliseconds, calls in rows:
        if name == "kernels:":
            lines.append("   kernels:")
            continue
        numbers = f"{milliseconds:9.4f} ms {milliseconds / whole:6.1%} {calls:7.1f} calls"
        lines.append(f"   {name:<64.64} {numbers}")
    return lines
