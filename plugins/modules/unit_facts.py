#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""The running state of a systemd unit, for a restart decided from state and not from `changed`."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_facts
short_description: Running state of a systemd unit
description:
  - Reads what systemd says of a unit and chosen variables of its main process's environment.
  - A unit that does not exist is C(inactive) with no process; this module fails only when systemd
    itself does not answer and then says so.
options:
  unit: {description: Name of the unit., type: str, required: true}
  variables:
    description: Environment variables to read from the main process. Others are never returned.
    type: list
    elements: str
    default: []
  root: {description: Directory that holds C(proc)., type: path, default: /}
attributes:
  check_mode: {support: full, description: Reads only.}
  diff_mode: {support: none, description: Changes nothing.}
author: [gpubox]
"""

EXAMPLES = r"""
- name: Know which release is running
  unit_facts: {unit: vllm-glm5.service, variables: [GPUBOX_RELEASE]}
"""

RETURN = r"""
exists: {description: systemd knows the unit., type: bool, returned: always}
active_state: {description: As systemd says., type: str, returned: always}
main_pid: {description: 0 when there is none., type: int, returned: always}
need_daemon_reload: {description: The unit file on disk is newer., type: bool, returned: always}
environment: {description: Chosen variables of the main process., type: dict, returned: always}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpubox.errors import GpuboxError
from ansible.module_utils.gpubox.units import process_environment, unit_properties


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "variables": {"type": "list", "elements": "str", "default": []},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    command = ["systemctl", "show", "-p", "LoadState,ActiveState,MainPID,NeedDaemonReload"]
    code, output, error = module.run_command([*command, "--", module.params["unit"]])
    if code != 0:
        module.fail_json(
            msg=str(
                GpuboxError(
                    f"systemctl show ended with {code}: {error.strip()}",
                    "a machine that runs systemd",
                    "boot the machine with systemd as PID 1 and run again",
                )
            )
        )
    state = unit_properties(output)
    pid = int(state.get("MainPID") or 0)
    module.exit_json(
        changed=False,
        exists=state.get("LoadState") not in (None, "not-found"),
        active_state=state.get("ActiveState", "unknown"),
        main_pid=pid,
        need_daemon_reload=state.get("NeedDaemonReload") == "yes",
        environment=process_environment(
            Path(module.params["root"]), pid, set(module.params["variables"])
        ),
    )


if __name__ == "__main__":
    main()
