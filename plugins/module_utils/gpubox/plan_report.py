# SPDX-License-Identifier: Apache-2.0
"""The plan for people, what differs from the plan last applied, and what is redone therefore."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from . import decode_model
from .serving_plan import TRITON, gib

# what a running server was started with
RUNS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "max_model_len",
    "speculative_tokens",
    "attention_backend",
    "nccl",
    "environment",
)


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={value[key]}" for key in sorted(value)) or "none"
    return str(value)


def _size(bytes_: Any) -> str:
    return "unknown" if bytes_ is None else gib(bytes_)


def _rows(plan: Mapping[str, Any]) -> dict[str, str]:
    """What is shown, by name."""
    box = plan.get("box") or {}
    runs = {name: _shown(plan.get(name)) for name in RUNS}
    runs["attention_backend"] = plan.get("attention_backend") or "vLLM's choice"
    return {
        "GPUs": str(len(plan.get("gpus") or [])),
        "RAM": _size(box.get("memory_total_bytes")),
        "CPUs": _shown(box.get("cpus")),
        "MAX_JOBS": _shown((plan.get("build") or {}).get("max_jobs")),
        **runs,
        "weights per GPU": _size(plan.get("weights_bytes_per_gpu")),
        "KV cache tokens": _shown(plan.get("kv_cache_tokens")),
        "concurrent contexts": _shown(plan.get("concurrent_contexts")),
        **{name: _shown(value) for name, value in _unit(plan).items()},
    }


def _unit(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What systemd is told of the server, and what its ranks are bound to."""
    seconds = (plan.get("limits") or {}).get("start_timeout_seconds")
    numa = plan.get("numa") or {}
    nodes = (numa.get("nodes") or ["unknown"]) if numa.get("by_rank") else []
    bound = ["unknown" if node is None else str(node) for node in nodes]
    return {
        "start limit": None if seconds is None else f"{seconds} s",
        "CPUs of the unit": numa.get("cpus") or "all",
        "NUMA nodes of the ranks": " ".join(bound) or "not bound",
    }


def table(plan: Mapping[str, Any]) -> list[str]:
    """The plan as aligned lines: the numbers, what is left out, notes and faults."""
    rows = _rows(plan)
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    lines += [f"left out: {one['address']}: {one['reason']}" for one in plan["gpus_left_out"]]
    lines += [f"build: {plan['build']['arithmetic']}", f"start: {plan['limits']['arithmetic']}"]
    if plan.get("expected"):
        lines += decode_model.lines(plan["expected"])
    lines += [f"note: {note}" for note in plan["notes"]]
    return lines + fault_lines(plan)


def fault_lines(plan: Mapping[str, Any]) -> list[str]:
    """One line for each fault."""
    return [
        f"fault: measured: {one['measured']}; wanted: {one['wanted']}; do: {one['do']}"
        for one in plan["faults"]
    ]


def _change(name: str, old: str, new: str) -> str:
    """``2 → 8 GPUs``, ``RAM 288 → 432 GiB``: what both have in common is said once."""
    if name == "GPUs":
        return f"{old} → {new} {name}"
    number, _, unit = old.partition(" ")
    if unit and new.endswith(f" {unit}") and new.count(" ") == old.count(" ") == 1:
        old = number
    return f"{name} {old} → {new}"


def differences(applied: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> list[str]:
    """What differs from the plan last applied, ``name old → new`` each.

    MAX_JOBS follows the memory that is free at the moment, so it counts only when the box itself
    has changed.
    """
    if not applied:
        return ["nothing was applied before"]
    before, changed = _rows(applied), []
    same_box = applied.get("box") == plan.get("box")
    for name, value in _rows(plan).items():
        if before[name] != value and not (name == "MAX_JOBS" and same_box):
            changed.append(_change(name, before[name], value))
    if applied.get("stack") != plan.get("stack"):
        changed.append(f"stack {applied.get('stack')} → {plan.get('stack')}")
    return changed


def redone(applied: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> dict[str, bool]:
    """What site.yml will do again because of the plan (not of other variables)."""
    stack = not applied or applied.get("stack") != plan.get("stack")
    runs = stack or any((applied or {}).get(name) != plan.get(name) for name in RUNS)
    runs = runs or _unit(applied or {}) != _unit(plan)
    # what is built for a torch lies in its environment
    built = bool(plan.get("flash_attn"))
    built = built and (stack or not (applied or {}).get("flash_attn"))
    return {"environment": stack, "flash-attn": built, "unit": runs, "restart": runs}


def report(applied: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> list[str]:
    """Table, differences and what is redone, as lines."""
    again = ", ".join(
        f"{name} {'yes' if do else 'no'}" for name, do in redone(applied, plan).items()
    )
    changed = "; ".join(differences(applied, plan)) or "nothing"
    return [
        *table(plan),
        f"changed since the plan last applied: {changed}",
        f"redone because of the plan: {again}",
    ]


def record(applied: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> str:
    """The text of plan.json; the one that is there when nothing that counts differs."""
    keep = applied if applied and not differences(applied, plan) else plan
    return json.dumps(keep, indent=1, sort_keys=True) + "\n"


def options(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``vllm serve`` that the plan decides; None leaves an option out."""
    tokens = plan["speculative_tokens"]
    return {
        "tensor_parallel_size": plan["tensor_parallel_size"],
        "max_model_len": plan["max_model_len"],
        "gpu_memory_utilization": plan["gpu_memory_utilization"],
        **{
            name: plan[name]
            for name in ("pipeline_parallel_size", "data_parallel_size")
            if plan[name] > 1
        },
        **(
            {"attention_backend": "CUSTOM", "kv_cache_dtype": plan["kv_cache_dtype"]}
            if plan.get("attention_backend") == TRITON
            else {}
        ),
        "speculative_config": (
            {"method": "mtp", "num_speculative_tokens": tokens} if tokens else None
        ),
    }
