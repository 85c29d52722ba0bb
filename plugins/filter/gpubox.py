# SPDX-License-Identifier: Apache-2.0
"""Filters over gpubox's pure functions; nothing is decided here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

# Ansible ships module_utils to the box under a name of its own; on the controller it does not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "module_utils"))

from gpubox import plan_report
from gpubox.errors import GpuboxError
from gpubox.mirror import model_plan
from gpubox.release import digest
from gpubox.serving import serve_arguments
from gpubox.serving_plan import plan
from gpubox.stack import (
    file_digest,
    known_stacks,
    load_stack,
    series_at,
    series_summary,
    texts_of,
)
from gpubox.systemd import quote_assignment, quote_command
from gpubox.values import value_faults
from gpubox.variables import role_options, unknown_variables


def _readable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn our refusals into Ansible's, message and all."""

    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except GpuboxError as error:
            raise AnsibleFilterError(str(error)) from error

    return call


def _planned(hardware: Any, model: Any, stack: Any, overrides: Any) -> dict[str, Any]:
    """The plan, with the digest of its stack and whether flash-attn goes with it."""
    planned = plan(hardware, model, stack, overrides).to_dict()
    return {**planned, "stack": stack["digest"], "flash_attn": bool(overrides.get("flash_attn"))}


class FilterModule:
    """Filters of gpubox."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names of the filters as templates use them."""
        return {
            "gpubox_digest": _readable(digest),
            "gpubox_file_digest": _readable(lambda path: file_digest(Path(path))),
            "gpubox_series_at": _readable(series_at),
            "gpubox_plan": _readable(_planned),
            "plan_options": _readable(plan_report.options),
            "plan_record": _readable(lambda now, applied: plan_report.record(applied, now)),
            "plan_redone": _readable(lambda now, applied: plan_report.redone(applied, now)),
            "plan_differences": _readable(
                lambda now, applied: plan_report.differences(applied, now)
            ),
            "plan_report": _readable(lambda now, applied: plan_report.report(applied, now)),
            "load_stack": _readable(lambda name, root: load_stack(name, Path(root))),
            "model_plan": _readable(model_plan),
            "role_options": _readable(lambda roles: role_options(Path(roles))),
            "serve_arguments": _readable(serve_arguments),
            "series_summary": _readable(series_summary),
            "systemd_assignment": _readable(
                lambda pair: quote_assignment(str(pair["key"]), pair["value"])
            ),
            "systemd_command": _readable(quote_command),
            "texts_of": _readable(lambda folder, names: texts_of(Path(folder), names)),
            "value_faults": _readable(
                lambda values, root: value_faults(values, known_stacks(Path(root)))
            ),
            "unknown_variables": _readable(unknown_variables),
        }
