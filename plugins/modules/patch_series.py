#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Series of patches on installed Python distributions, as one transaction."""

from __future__ import annotations

DOCUMENTATION = r"""
module: patch_series
short_description: Installed Python distributions hold exactly a stack of patch series
description:
  - Applies unified diffs to files below C(site_packages) with zero fuzz, all of them or none.
  - Every file must be as its wheel has it (C(before) of the series) or as an earlier run left it.
    Everything is computed and proved by hash before the first byte is written; new contents are
    swapped in by rename, so hard links into a cache are never written through.
  - A run that was killed is made good by the next one. A changed series starts from pristine files.
  - All series of one environment belong in one call. What an earlier call applied and this one does
    not name is restored.
  - The RECORD of a distribution keeps the hashes of its wheel. Files that a patch creates are not
    in it, so uninstalling the distribution leaves them behind; use O(state=absent) first.
options:
  series:
    description:
      - The series in the order in which they are applied; a later one starts from what the earlier
        ones leave. Required when O(state=present).
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name for messages and the record, the directory's name.
        type: str
        required: true
      path:
        description: Directory on the box that holds the patch files.
        type: path
        required: true
      definition:
        description:
          - Content of series.yml, read on the controller (C(lookup('ansible.builtin.file', ...) |
            from_yaml)), because the box need not have a YAML library.
        type: dict
        required: true
  site_packages: {description: Directory of the distributions., type: path, required: true}
  state_dir:
    description: Directory for the pristine copies and the record. Only this module writes there.
    type: path
    required: true
  device:
    description: What the box computes on. A series for C(cpu) is refused on a C(cuda) box.
    type: str
    choices: [cpu, cuda]
    required: true
  state:
    description: C(absent) restores the files of the wheels and removes what patches created.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    support: full
    description: Nothing is written. What an earlier task would have put there is listed as awaited.
  diff_mode: {support: full, description: The difference of each file.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: The GGUF plugin knows GLM-5
  patch_series:
    series:
      - name: vllm-gguf-plugin-0.0.5
        path: /opt/gpubox/patches/vllm-gguf-plugin-0.0.5
        definition: "{{ lookup('ansible.builtin.file', 'series.yml') | from_yaml }}"
    site_packages: /opt/gpubox/environments/0123456789abcdef/venv/lib/python3.12/site-packages
    state_dir: /opt/gpubox/environments/0123456789abcdef/patches
    device: cuda

- name: The distributions are as their wheels
  patch_series:
    site_packages: /opt/gpubox/environments/0123456789abcdef/venv/lib/python3.12/site-packages
    state_dir: /opt/gpubox/environments/0123456789abcdef/patches
    device: cuda
    state: absent
"""

RETURN = r"""
applied:
  description:
    - Each series with its name, distribution, version, digest and patches (file, purpose, sha256).
  type: list
  returned: always
files:
  description:
    - Each file that is or was patched, with the sha256 of its pristine, former and new content.
  type: list
  returned: always
recovered:
  description: Whether an earlier run had been interrupted.
  type: bool
  returned: always
awaited:
  description: What earlier tasks would have to bring first (check mode).
  type: list
  returned: always
"""

import difflib
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox.errors import GpuboxError
from ansible.module_utils.gpubox.patches import (
    Plan,
    Series,
    converge,
    describe,
    find_distribution,
    read_stack,
    read_texts,
    sha256,
)


def awaited(site_packages: str, stack: list[Series], texts: dict[str, bytes]) -> list[str]:
    """What has to be there before the stack can be tried."""
    missing = [
        f"{series.name}/{patch.file}"
        for series in stack
        for patch in series.patches
        if f"{series.name}/{patch.file}" not in texts
    ]
    if not site_packages or not Path(site_packages).is_dir():
        return [site_packages or "the environment", *missing]
    for series in stack:
        if find_distribution(Path(site_packages), series.distribution) is None:
            missing.append(f"{series.distribution} {series.version}")
    return sorted(set(missing))


def file_diffs(plan: Plan) -> list[dict[str, str]]:
    """One entry of ``--diff`` for each file that changes."""
    entries = []
    for step in plan.steps:
        if step.changes:
            before, after = (
                (content or b"").decode("utf-8", "backslashreplace")
                for content in (step.now.content, step.target)
            )
            lines = difflib.unified_diff(
                before.splitlines(keepends=True),
                after.splitlines(keepends=True),
                f"a/{step.path}" if step.now.content is not None else "/dev/null",
                f"b/{step.path}" if step.target is not None else "/dev/null",
            )
            entries.append({"prepared": "".join(lines)})
    return entries


def run(module: AnsibleModule) -> dict[str, object]:
    """Converge and report."""
    present = module.params["state"] == "present"
    if present and not module.params["series"]:
        raise GpuboxError("no series", "at least one for state present", "name a series, or absent")
    entries = module.params["series"] if present else []
    stack = read_stack([(entry["name"], entry["definition"]) for entry in entries])
    texts: dict[str, bytes] = {}
    for entry, series in zip(entries, stack, strict=True):
        texts |= read_texts(Path(entry["path"]), series)
    site_packages = module.params["site_packages"]
    missing = awaited(site_packages, stack, texts)
    if missing and module.check_mode:
        return {
            "changed": present,
            "applied": describe(stack, texts),
            "files": [],
            "recovered": False,
            "awaited": missing,
            "diff": [],
        }
    if not site_packages or not Path(site_packages).is_dir():
        raise GpuboxError(
            f"no directory {site_packages!r}", "the environment's site-packages", "make it first"
        )
    plan = converge(
        Path(site_packages),
        Path(module.params["state_dir"]),
        stack,
        texts,
        module.params["device"],
        module.check_mode,
    )
    return {
        "changed": plan.changed,
        "applied": plan.record.series,
        "files": [
            {
                "path": step.path,
                "pristine": step.state.pristine,
                "before": sha256(step.now.content),
                "after": sha256(step.target),
            }
            for step in plan.steps
        ],
        "recovered": plan.interrupted,
        "awaited": [],
        "diff": file_diffs(plan),
    }


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "series": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "name": {"type": "str", "required": True},
                    "path": {"type": "path", "required": True},
                    "definition": {"type": "dict", "required": True},
                },
            },
            "site_packages": {"type": "path", "required": True},
            "state_dir": {"type": "path", "required": True},
            "device": {"type": "str", "choices": ["cpu", "cuda"], "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module))
    except GpuboxError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
