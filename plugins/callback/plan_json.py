# SPDX-License-Identifier: Apache-2.0
"""The plan as one JSON document and nothing else on standard output, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: plan_json
type: stdout
short_description: Only the plan, as JSON
description:
  - With C(-e plan_format=json), C(playbooks/plan.yml) prints one object by the name of the host,
    each with C(plan), C(changed) and C(redone). Failures go to standard error.
requirements:
  - set as stdout in configuration (C(ANSIBLE_STDOUT_CALLBACK=plan_json))
"""


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Keeps what the task of the plan says until the end."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "plan_json"

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[str, Any] = {}

    def v2_runner_on_ok(self, result: Any) -> None:
        said = result.result.get("msg")
        if isinstance(said, Mapping) and {"plan", "changed", "redone"} <= said.keys():
            self._plans[result.host.get_name()] = said

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:  # noqa: ARG002 - Ansible's interface
        self._told(result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._told(result)

    def _told(self, result: Any) -> None:
        said = result.result.get("msg") or "failed"
        text = f"{result.host.get_name()}: {result.task.get_name()}: {said}"
        self._display.display(text, color="red", stderr=True)

    def v2_playbook_on_stats(self, stats: Any) -> None:  # noqa: ARG002 - Ansible's interface
        self._display.display(json.dumps(self._plans, indent=1, sort_keys=True))
