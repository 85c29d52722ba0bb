#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""One verdict with every failure at once, before anything is changed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: What stands in the way, all of it at once
description:
  - Compares the box with the plan and returns findings; changes nothing but O(report) and never
    stops at the first. A later task decides on C(passed).
options:
  hardware: {description: The facts of hardware_facts., type: dict, required: true}
  device: {description: What the box computes on., type: str, choices: [cpu, cuda], required: true}
  stack: {description: Name of the stack., type: str, required: true}
  stack_device:
    description: What the stack is for.
    type: str
    choices: [cpu, cuda]
    required: true
  driver:
    description: Version of the NVIDIA driver that must be loaded; empty for any.
    type: str
    default: ""
  toolkits:
    description: CUDA toolkits that must be there.
    type: list
    elements: str
    default: []
  torch_cuda: {description: CUDA version of torch's wheels., type: str, default: ""}
  environment: {description: Directory of the environment., type: path, required: true}
  cache: {description: Directory of the service's caches., type: path, required: true}
  plan_faults: {description: Faults of the plan., type: list, elements: dict, default: []}
  ranks: {description: Processes of the server that share memory., type: int, default: 1}
  tensor_parallel_size: {description: Ranks of the plan., type: int, required: true}
  max_model_len: {description: Longest context in tokens., type: int, required: true}
  options:
    description: All options of C(vllm serve), names with dashes or underscores.
    type: dict
    default: {}
  quantization_types:
    description: Types that the stack's loader has kernels for.
    type: list
    elements: str
    required: true
  model_source: {description: Any shard of the set; may be empty., type: str, required: true}
  fetch_bytes:
    description: Bytes of the set where it is fetched later; it need not be there then.
    type: int
    default: 0
  merge_method:
    description: How the set becomes one file, which decides about the space that it takes.
    type: str
    choices: [copy, in_place, reflink]
    default: copy
  origin:
    description: What tells a fetched set from others, empty when nothing is fetched.
    type: str
    default: ""
  model: {description: Path of the merged file., type: path, required: true}
  companions:
    description: Files that are to lie beside the merged file.
    type: list
    elements: str
    default: []
  packages:
    description: System packages that will be installed.
    type: list
    elements: str
    default: []
  user: {description: Name of the service user., type: str, required: true}
  unit: {description: Name of our unit., type: str, required: true}
  port: {description: TCP port of the service., type: int, required: true}
  root: {description: Directory that holds C(proc)., type: path, default: /}
  report:
    description: File of the box that gets the verdict as JSON; empty for none.
    type: str
    default: ""
attributes:
  check_mode: {support: full, description: Reads only.}
  diff_mode: {support: none, description: Changes nothing.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: The verdict is known
  preflight:
    hardware: "{{ __hardware_facts }}"
    device: cuda
    stack: glm5-cu130
    stack_device: cuda
    driver: 590.48.01
    toolkits: ["13.1", "13.0"]
    torch_cuda: "13.0"
    environment: /opt/gpubox/environments/0123456789abcdef
    cache: /var/cache/vllm-glm5
    ranks: 8
    tensor_parallel_size: 8
    max_model_len: 131072
    options: {dtype: bfloat16, kv_cache_dtype: fp8}
    quantization_types: [F32, Q4_K, Q8_0]
    model_source: /shared/shards/GLM-5-00001-of-00010.gguf
    origin: 0123456789abcdef
    model: /shared/glm5-gguf/GLM-5.gguf
    companions: [config.json, tokenizer.json]
    user: vllm
    unit: vllm-glm5.service
    port: 8000
"""

RETURN = r"""
passed: {description: No finding is an error., type: bool, returned: always}
findings:
  description: Each with severity, check, measured, wanted and remedy.
  type: list
  returned: always
text: {description: The findings for people., type: str, returned: always}
"""

import json
import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox import preflight
from ansible.module_utils.gpubox.errors import GpuboxError
from ansible.module_utils.gpubox.gguf import Header
from ansible.module_utils.gpubox.gguf_merge import (
    Method,
    bytes_besides,
    bytes_held,
    known_result,
    read_set,
    shard_paths,
)
from ansible.module_utils.gpubox.mirror import settled
from ansible.module_utils.gpubox.model_facts import read_config
from ansible.module_utils.gpubox.preflight_cards import (
    check_cards,
    check_cuda_link,
    check_driver,
    check_links,
    check_toolkits,
)
from ansible.module_utils.gpubox.preflight_packages import check_packages
from ansible.module_utils.gpubox.preflight_places import (
    check_mounts,
    check_reach,
    check_shared_memory,
    check_space,
    check_walk,
)
from ansible.module_utils.gpubox.readiness import port_listeners
from ansible.module_utils.gpubox.release import write_atomically
from ansible.module_utils.gpubox.units import unit_properties
from ansible.module_utils.gpubox.walk import (
    account_of,
    first_denied,
    hidden,
    is_directory,
    is_file,
    sizes,
    status_of,
    unreachable,
)


def space_needs(given: dict[str, Any], source: Path | None) -> list[tuple[str, str, int]]:
    """Purpose, path and bytes of everything that the run will write."""
    environment, model = Path(given["environment"]), Path(given["model"])
    built = is_file(environment / "environment.json")
    needs = [
        (
            "environment",
            str(environment.parent.parent),
            0 if built else preflight.ENVIRONMENT_BYTES[given["stack_device"]],
        )
    ]
    if source is None:
        return needs
    try:
        shards = shard_paths(source)
    except GpuboxError:
        return needs  # a name that is none is told with the headers
    fetch = given["fetch_bytes"]
    if settled(shards, model, given["origin"], remote=fetch > 0):
        fetch = 0
    there = sizes(source.parent)
    needs.append(("shards", str(source), max(fetch - sum(there.values()), 0) if fetch else 0))
    if model not in shards and (fetch or status_of(model) is None):
        method = Method(given["merge_method"])
        size = fetch or sum(there.get(path.name, 0) for path in shards)
        left = max(bytes_besides(method, size) - bytes_held(method, model, shards), 0)
        needs.append(("merged model", str(model), left))
    return needs


def is_asked_for(source: Path | None, model: Path, origin: str) -> bool:
    """The model that is there is what ``source`` names, not what was asked for before."""
    if source is None:
        return True
    try:
        shards = shard_paths(source)
    except GpuboxError:
        return False  # a name that is none is told with the headers
    return model in shards or known_result(shards, model, origin=origin) is not None


def read_headers(source: Path) -> tuple[list[Header], list[GpuboxError]]:
    """Headers of the set that ``source`` is a shard of, and what is wrong with it."""
    try:
        return read_set(shard_paths(source))
    except GpuboxError as error:
        return [], [error]


def architecture_of(headers: list[Header]) -> str | None:
    """``general.architecture`` of the first header that says it."""
    entries = [header.keys.get("general.architecture") for header in headers]
    return next((str(entry.value) for entry in entries if entry is not None), None)


def text_of(path: Path) -> str | None:
    """The text of a file, None when there is none to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def processes_of(root: Path, group: str) -> set[int]:
    """Process ids of a unit's control group, those below it included."""
    if not group:
        return set()
    lists = (root / "sys/fs/cgroup" / group.lstrip("/")).rglob("cgroup.procs")
    words = [word for path in lists for word in (text_of(path) or "").split()]
    return {int(word) for word in words if word.isdecimal()}


def no_directories(*paths: Path) -> list[str]:
    """Those of the paths or of their parents that are there and are no directory."""
    found = {one for path in paths for one in (path, *path.parents)}
    return sorted(str(one) for one in found if os.path.lexists(one) and not is_directory(one))


def collect(module: AnsibleModule) -> list[preflight.Finding]:
    """Measure the box and compare it with the plan."""
    given = module.params
    root, model = Path(given["root"]), Path(given["model"])
    source = Path(given["model_source"]) if given["model_source"] else None
    facts = {name: fact.get("value") for name, fact in given["hardware"].items()}
    output = ""
    if module.get_bin_path("systemctl"):
        command = [
            "systemctl",
            "show",
            "-p",
            "ControlGroup,MainPID,LoadState,FragmentPath",
            "--",
            given["unit"],
        ]
        _, output, _ = module.run_command(command, environ_update={"LC_ALL": "C.UTF-8"})
    state = unit_properties(output)
    listeners = port_listeners(
        root, given["port"], state.get("ControlGroup", ""), int(state.get("MainPID") or 0)
    )

    environment = Path(given["environment"])
    interpreter = environment / "venv/bin/python"
    source_exists = source is not None and is_file(source)
    model_exists = status_of(model) is not None
    to_fetch = given["fetch_bytes"]
    places = facts.get("paths") or {}
    ways = {interpreter: os.X_OK, model: os.R_OK}
    unseen = {str(path): where for path in ways if (where := hidden(path))}
    made = is_asked_for(source, model, given["origin"]) if model_exists else None
    # headers only: of what is served, or of what it will be made of
    headers, faults = [], []
    if made:
        headers, faults = read_headers(model)
    elif source is not None and source_exists:
        headers, faults = read_headers(source)
    config, config_fault = read_config(
        *([source.parent] if source is not None else []), model.parent
    )
    folders = [source.parent] if source is not None else []
    missing = [
        name
        for name in given["companions"]
        if not any(is_file(folder / name) for folder in [*folders, model.parent])
    ]
    fragment = state.get("FragmentPath")
    unit_text = text_of(Path(fragment)) if fragment else None
    return [
        *preflight.check_host(
            (text_of(root / "proc/1/comm") or "").strip(),
            facts.get("os_release"),
            facts.get("architecture"),
        ),
        *preflight.check_device(given["stack"], given["stack_device"], given["device"]),
        *check_cards(given["hardware"], processes_of(root, state.get("ControlGroup", ""))),
        *check_driver(given["hardware"], given["driver"]),
        *check_links(given["hardware"]),
        *check_packages(given["hardware"]),
        *check_toolkits(given["hardware"], given["toolkits"], given["torch_cuda"]),
        *check_cuda_link(given["hardware"], given["toolkits"]),
        *preflight.check_model(
            config,
            given["device"],
            given["tensor_parallel_size"],
            given["max_model_len"],
        ),
        *preflight.check_options(
            given["options"],
            config,
            [str(gpu.get("compute_capability")) for gpu in facts.get("gpus") or []],
        ),
        *preflight.check_numa_bind(
            given["options"],
            module.get_bin_path("numactl") is not None
            or "numactl" in {name.partition("=")[0] for name in given["packages"]},
        ),
        *preflight.check_header(
            config,
            {name: entry.integer for header in headers for name, entry in header.keys.items()},
        ),
        *check_reach(unreachable([environment, model, *([source] if source is not None else [])])),
        *check_space(space_needs(given, source), places),
        *check_mounts(
            [
                (str(environment.parent.parent), "runs"),
                (given["cache"], "runs"),
                (str(model.parent), "written"),
            ],
            places,
        ),
        *check_shared_memory(given["ranks"], places),
        *check_walk(
            given["user"],
            first_denied(ways, account_of(given["user"])),
            unseen,
        ),
        *preflight.check_source(str(source or ""), source_exists or to_fetch > 0, str(model), made),
        *preflight.check_shards([*faults, *([config_fault] if config_fault else [])]),
        *preflight.check_tensors(
            architecture_of(headers),
            {one.name: one.quantization_type.name for header in headers for one in header.tensors},
            given["quantization_types"],
            config,
            complete=not faults,
        ),
        *preflight.check_companions(
            missing if not to_fetch and (source_exists or model_exists) else [],
            [str(folder) for folder in dict.fromkeys([*folders, model.parent])],
        ),
        *preflight.check_directories(no_directories(environment, model.parent)),
        *preflight.check_user(given["user"], text_of(root / "etc/passwd") or ""),
        *preflight.check_unit(
            given["unit"],
            state.get("LoadState", ""),
            unit_text,
            "gpubox" in (unit_text or "").partition("\n")[0],
        ),
        *preflight.check_port(given["port"], listeners),
        *preflight.plan_findings(given["plan_faults"]),
    ]


def write_report(path: Path, stack: str, verdict: dict[str, Any]) -> None:
    """The verdict for machines, whatever it is; a record of this run and no state of the box."""
    content = {name: verdict[name] for name in ("passed", "findings")} | {"stack": stack}
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "hardware": {"type": "dict", "required": True},
            "device": {"type": "str", "choices": ["cpu", "cuda"], "required": True},
            "stack": {"type": "str", "required": True},
            "stack_device": {"type": "str", "choices": ["cpu", "cuda"], "required": True},
            "driver": {"type": "str", "default": ""},
            "toolkits": {"type": "list", "elements": "str", "default": []},
            "torch_cuda": {"type": "str", "default": ""},
            "environment": {"type": "path", "required": True},
            "cache": {"type": "path", "required": True},
            "plan_faults": {"type": "list", "elements": "dict", "default": []},
            "ranks": {"type": "int", "default": 1},
            "tensor_parallel_size": {"type": "int", "required": True},
            "max_model_len": {"type": "int", "required": True},
            "options": {"type": "dict", "default": {}},
            "quantization_types": {"type": "list", "elements": "str", "required": True},
            "model_source": {"type": "str", "required": True},
            "fetch_bytes": {"type": "int", "default": 0},
            "merge_method": {
                "type": "str",
                "choices": [method.value for method in Method],
                "default": "copy",
            },
            "origin": {"type": "str", "default": ""},
            "model": {"type": "path", "required": True},
            "companions": {"type": "list", "elements": "str", "default": []},
            "packages": {"type": "list", "elements": "str", "default": []},
            "user": {"type": "str", "required": True},
            "unit": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "root": {"type": "path", "default": "/"},
            "report": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    findings = collect(module)
    verdict = preflight.verdict(findings)
    if module.params["report"] and not module.check_mode:
        try:
            write_report(Path(module.params["report"]), module.params["stack"], verdict)
        except OSError as error:  # the verdict itself is not lost for that
            verdict = preflight.verdict(
                [*findings, preflight.unwritten_report(module.params["report"], error)]
            )
    module.exit_json(changed=False, **verdict)


if __name__ == "__main__":
    main()
