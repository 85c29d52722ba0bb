# SPDX-License-Identifier: Apache-2.0
"""The action plugin: which merges it watches, and what it shows of them."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "plugins" / "action" / "gguf_merge.py"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gguf_merge_action", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    monkeypatch.setattr(loaded, "INTERVAL", 0.0)
    monkeypatch.setattr(loaded.ActionBase, "run", lambda *_: {})
    return loaded


class Box:
    """Stands in for the connection: answers as the modules would."""

    def __init__(self, plugin: ModuleType, predicted: dict[str, Any], **args: Any) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.lines: list[str] = []
        self._predicted = predicted
        self._polls = 3
        action = plugin.ActionModule.__new__(plugin.ActionModule)
        action._task = SimpleNamespace(
            args={"src": "/a", "dest": "/b/c.gguf", **args}, check_mode=False, async_val=0
        )
        action._display = SimpleNamespace(display=lambda text, **_: self.lines.append(text))
        action._execute_module = self._execute
        action._low_level_execute_command = lambda command: {"stdout": f"{command} {self._polls}\n"}
        action.get_shell_option = lambda _, default: default
        self.action = action

    def _execute(self, **given: Any) -> dict[str, Any]:
        name = given.get("module_name", "gguf_merge").rpartition(".")[2]
        self.calls.append((name, self.action._task.check_mode))
        if given.get("wrap_async"):
            assert self.action._task.async_val > 86_400
            assert given["module_args"]["progress_file"] == "/b/.c.gguf.gpubox-progress"
            return {"ansible_job_id": "j1", "started": 1}
        if name == "async_status":
            assert given["module_args"]["jid"] == "j1"
            self._polls -= 1
            done = {"finished": 1, "changed": True, "action": "merged", "ansible_job_id": "j1"}
            return done if self._polls <= 0 else {"finished": 0}
        if self.action._task.check_mode and self._predicted.get("changed"):
            assert not given["module_args"]["verify"]
        return self._predicted


def test_nothing_to_do_is_asked_once(plugin: ModuleType) -> None:
    box = Box(plugin, {"changed": False, "size": 1 << 40})
    assert box.action.run() == {"changed": False, "size": 1 << 40}
    assert box.calls == [("gguf_merge", True)]
    assert box.action._task.check_mode is False


@pytest.mark.parametrize("answer", [{"failed": True, "msg": "2 faults"}, {"changed": True}])
def test_faults_and_check_mode_end_with_the_prediction(
    plugin: ModuleType, answer: dict[str, Any]
) -> None:
    box = Box(plugin, answer)
    box.action._task.check_mode = "failed" not in answer
    assert box.action.run() == answer
    assert box.calls == [("gguf_merge", True)]


def test_a_short_merge_is_waited_for(plugin: ModuleType) -> None:
    box = Box(plugin, {"changed": True, "size": plugin.LONG - 1})
    box.action.run()
    assert box.calls == [("gguf_merge", True), ("gguf_merge", False)]
    assert not box.lines


@pytest.mark.parametrize("verify", [False, True])
def test_a_long_merge_shows_where_it_is(plugin: ModuleType, verify: bool) -> None:
    box = Box(plugin, {"changed": not verify, "size": plugin.LONG}, verify=verify)
    assert box.action.run() == {"changed": True, "action": "merged"}
    assert box.lines == [f"    … cat /b/.c.gguf.gpubox-progress {left}" for left in (2, 1)]
    assert box.calls[-1] == ("async_status", False)  # cleaned up
    assert box.action._task.async_val == 0


def test_a_merge_that_was_killed_is_not_awaited_for_ever(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(plugin, {"changed": True, "size": plugin.LONG})
    box._polls = 1_000_000
    clock = itertools.count(step=plugin.LIMIT // 3)
    stopped = SimpleNamespace(sleep=lambda _: None, monotonic=lambda: next(clock))
    monkeypatch.setattr(plugin, "time", stopped)
    answer = box.action.run()
    assert answer["failed"]
    assert "no answer of the merge" in answer["msg"]
    assert len(box.lines) == 3
