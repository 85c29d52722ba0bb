# SPDX-License-Identifier: Apache-2.0
"""Shows on the controller how far a long merge on the box is."""

from __future__ import annotations

import time
from pathlib import PurePosixPath
from shlex import quote
from typing import Any

from ansible.plugins.action import ActionBase

LONG = 8 << 30  # bytes; less is merged before one could look twice
LIMIT = 7 * 86_400  # seconds that a merge may take
INTERVAL = 15.0  # seconds between two lines


class ActionModule(ActionBase):  # type: ignore[misc]
    """Runs the module; a long merge apart from the connection, with a line of progress."""

    def run(
        self, tmp: str | None = None, task_vars: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Result of the module."""
        super().run(tmp, task_vars)
        arguments = self._task.args
        reads = bool(arguments.get("verify") or arguments.get("sha256"))
        if self._task.check_mode and reads:
            return dict(self._execute_module(task_vars=task_vars))
        predicted = self._predict(task_vars)
        if self._task.check_mode or predicted.get("failed"):
            return predicted
        if not predicted.get("changed") and not arguments.get("verify"):
            return predicted
        if predicted.get("size", 0) < LONG:
            return dict(self._execute_module(task_vars=task_vars))
        return self._watched(task_vars)

    def _predict(self, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        """The module's answer in check mode, where it reads headers only."""
        asked = self._task.check_mode
        self._task.check_mode = True
        try:
            arguments = {**self._task.args, "verify": False, "sha256": {}}
            return dict(self._execute_module(module_args=arguments, task_vars=task_vars))
        finally:
            self._task.check_mode = asked

    def _watched(self, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        dest = PurePosixPath(self._task.args["dest"])
        file = str(dest.with_name(f".{dest.name}.gpubox-progress"))
        arguments = {**self._task.args, "progress_file": file}
        self._task.async_val = LIMIT
        started = self._execute_module(module_args=arguments, task_vars=task_vars, wrap_async=True)
        self._task.async_val = 0
        if "ansible_job_id" not in started:
            return dict(started)
        job = started["ansible_job_id"]
        shown = ""
        deadline = time.monotonic() + LIMIT + INTERVAL
        while True:
            time.sleep(INTERVAL)
            answer = self._job(job, "status", task_vars)
            if not answer.get("finished") and time.monotonic() > deadline:  # killed with its guard
                answer = {"failed": True, "msg": f"no answer of the merge within {LIMIT} s"}
            if answer.get("finished") or answer.get("failed"):
                break
            line = self._low_level_execute_command(f"cat {quote(file)}")["stdout"].strip()
            if line != shown:
                shown = line
                self._display.display(f"    … {line}", color="bright gray")
        self._job(job, "cleanup", task_vars)
        return {
            key: value
            for key, value in answer.items()
            if key not in ("ansible_job_id", "finished", "started", "results_file", "stdout",
                           "stdout_lines", "stderr", "stderr_lines")
        }  # fmt: skip

    def _job(self, job: str, mode: str, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        folder = self.get_shell_option("async_dir", default="~/.ansible_async")
        return dict(
            self._execute_module(
                module_name="ansible.legacy.async_status",
                module_args={"jid": job, "mode": mode, "_async_dir": folder},
                task_vars=task_vars,
            )
        )
