# SPDX-License-Identifier: Apache-2.0
"""Says what a long task is doing and for how long, so that no step looks like a hang."""

from __future__ import annotations

import threading
import time
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: progress
type: aggregate
short_description: Elapsed time of tasks that take long
description:
  - Prints one line each O(interval) seconds while a task runs, with its name and its age.
options:
  interval:
    description: Seconds between two lines, and the age at which a task counts as long.
    type: int
    default: 15
    env: [{name: GPUBOX_PROGRESS_INTERVAL}]
    ini: [{section: callback_progress, key: interval}]
requirements:
  - enable in configuration
"""


def elapsed(seconds: float) -> str:
    """Render an age in seconds the way a person reads it, for example ``2 min 05 s``."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Prints the age of the running task from a timer thread."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "progress"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._began = 0.0
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def _watch(self, interval: int) -> None:
        while not self._wake.wait(interval):
            age = time.monotonic() - self._began
            if self._name and age >= interval:
                line = f"    … {self._name}: {elapsed(age)} so far"
                # for people; what the play itself says may be read by a program
                self._display.display(line, color="bright gray", stderr=True)

    def _begin(self, name: str) -> None:
        self._name, self._began = name, time.monotonic()
        if self._thread is None:
            interval = int(self.get_option("interval"))
            self._thread = threading.Thread(target=self._watch, args=(interval,), daemon=True)
            self._thread.start()

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:  # noqa: ARG002 - Ansible's interface
        self._begin(task.get_name())

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        self._begin(task.get_name())

    def v2_playbook_on_stats(self, stats: Any) -> None:  # noqa: ARG002 - Ansible's interface
        self._name = ""
        self._wake.set()
