#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""One verdict with every failure at once, before anything is changed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: What stands in the way, all of it at once
description:
  - Compares the box with the plan and returns findings; changes nothing and never stops at the
    first. A later task decides on C(passed).
options:
  hardware: {description: The facts of hardware_facts., type: dict, required: true}
  device: {description: What the box computes on., type: str, choices: [cpu, cuda], required: true}
  stack: {description: Name of the stack., type: str, required: true}
  stack_device:
    description: What the stack is for.
    type: str
    choices: [cpu, cuda]
    required: true
  environment: {description: Directory of the environment., type: path, required: true}
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
  model: {description: Path of the merged file., type: path, required: true}
  companions:
    description: Files that are to lie beside the merged file.
    type: list
    elements: str
    default: []
  user: {description: Name of the service user., type: str, required: true}
  unit: {description: Name of our unit., type: str, required: true}
  port: {description: TCP port of the service., type: int, required: true}
  root: {description: Directory that holds C(proc)., type: path, default: /}
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
    environment: /opt/gpubox/environments/0123456789abcdef
    tensor_parallel_size: 8
    max_model_len: 131072
    options: {dtype: bfloat16, kv_cache_dtype: fp8}
    quantization_types: [F32, Q4_K, Q8_0]
    model_source: /shared/shards/GLM-5-00001-of-00010.gguf
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

import os
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox import preflight
from ansible.module_utils.gpubox.errors import GpuboxError
from ansible.module_utils.gpubox.gguf import Header
from ansible.module_utils.gpubox.gguf_merge import read_set, shard_paths
from ansible.module_utils.gpubox.model_facts import read_config
from ansible.module_utils.gpubox.preflight_cards import check_cards, check_driver
from ansible.module_utils.gpubox.readiness import port_listeners
from ansible.module_utils.gpubox.units import unit_properties


def free_bytes(path: Path) -> int:
    """Bytes free for root on the file system that ``path`` is or will be on."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def shard_bytes(source: Path) -> int:
    """Bytes of the set that ``source`` is a shard of, 0 when it is not there."""
    stem, separator, count = source.name.rpartition("-of-")
    if not separator:
        return source.stat().st_size if source.is_file() else 0
    pattern = f"{stem.rpartition('-')[0]}-*-of-{count}"
    return sum(path.stat().st_size for path in source.parent.iterdir() if path.match(pattern))


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
    return sorted(str(one) for one in found if os.path.lexists(one) and not one.is_dir())


def collect(module: AnsibleModule) -> list[preflight.Finding]:
    """Measure the box and compare it with the plan."""
    given = module.params
    root, model = Path(given["root"]), Path(given["model"])
    source = Path(given["model_source"]) if given["model_source"] else None
    facts = {name: fact.get("value") for name, fact in given["hardware"].items()}
    try:
        init = (root / "proc/1/comm").read_text(encoding="utf-8").strip()
    except OSError:
        init = ""
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
    installed = (environment / "environment.json").is_file()
    needed = 0 if installed else preflight.ENVIRONMENT_BYTES[given["stack_device"]]
    source_exists = source is not None and source.is_file()
    to_fetch = given["fetch_bytes"]
    merge = (
        shard_bytes(source) if source is not None and source_exists and not model.exists() else 0
    )
    # headers only: of what is served, or of what it will be made of
    headers, faults = [], []
    if model.exists():
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
        if not any((folder / name).is_file() for folder in [*folders, model.parent])
    ]
    fragment = state.get("FragmentPath")
    unit_text = text_of(Path(fragment)) if fragment else None
    return [
        *preflight.check_host(init, facts.get("os_release"), facts.get("architecture")),
        *preflight.check_device(given["stack"], given["stack_device"], given["device"]),
        *check_cards(given["hardware"], processes_of(root, state.get("ControlGroup", ""))),
        *check_driver(given["hardware"]),
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
        *preflight.check_space("environment", str(environment), needed, free_bytes(environment)),
        *preflight.check_space("merged model", str(model), merge, free_bytes(model)),
        *preflight.check_source(
            str(source or ""), source_exists or to_fetch > 0, str(model), model.exists()
        ),
        *preflight.check_shards([*faults, *([config_fault] if config_fault else [])]),
        *preflight.check_tensors(
            architecture_of(headers),
            {one.name: one.quantization_type.name for header in headers for one in header.tensors},
            given["quantization_types"],
            config,
        ),
        *preflight.check_companions(
            missing if not to_fetch and (source_exists or model.exists()) else [],
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
    ]


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "hardware": {"type": "dict", "required": True},
            "device": {"type": "str", "choices": ["cpu", "cuda"], "required": True},
            "stack": {"type": "str", "required": True},
            "stack_device": {"type": "str", "choices": ["cpu", "cuda"], "required": True},
            "environment": {"type": "path", "required": True},
            "tensor_parallel_size": {"type": "int", "required": True},
            "max_model_len": {"type": "int", "required": True},
            "options": {"type": "dict", "default": {}},
            "quantization_types": {"type": "list", "elements": "str", "required": True},
            "model_source": {"type": "str", "required": True},
            "fetch_bytes": {"type": "int", "default": 0},
            "model": {"type": "path", "required": True},
            "companions": {"type": "list", "elements": "str", "default": []},
            "user": {"type": "str", "required": True},
            "unit": {"type": "str", "required": True},
            "port": {"type": "int", "required": True},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **preflight.verdict(collect(module)))


if __name__ == "__main__":
    main()
