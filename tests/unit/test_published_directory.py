# SPDX-License-Identifier: Apache-2.0
"""The module as Ansible runs it: what it writes, what its diff shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit import modules


def shown(answer: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """By name, the texts before and after."""
    return {
        Path(entry["after_header"]).name: (entry["before"], entry["after"])
        for entry in answer["diff"]
    }


def test_a_second_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"path": str(tmp_path / "new"), "files": {"a": "1\n", "b/c": "2\n"}}
    for changed in (True, False):
        answer = modules.run("published_directory", arguments, capsys)
        assert answer["changed"] == changed
    assert (tmp_path / "new/b/c").read_text() == "2\n"
    assert not answer["diff"]


def test_a_check_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"path": str(tmp_path / "new"), "files": {"a": "1\n"}}
    arguments["_ansible_check_mode"] = True
    answer = modules.run("published_directory", arguments, capsys)
    assert answer["changed"]
    assert shown(answer) == {"a": ("", "1\n")}
    assert not list(tmp_path.iterdir())


def test_the_diff_of_a_new_directory_starts_from_the_previous_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").mkdir()
    for name in ("same", "other"):
        (tmp_path / "old" / name).write_text("1\n")
    (tmp_path / "current").symlink_to("old")
    arguments = {
        "path": str(tmp_path / "new"),
        "files": {"same": "1\n", "other": "2\n", "added": "3\n"},
        "previous": str(tmp_path / "current"),
    }
    answer = modules.run("published_directory", arguments, capsys)
    assert answer["changed"]
    assert shown(answer) == {"other": ("1\n", "2\n"), "added": ("", "3\n")}
    headers = {entry["before_header"] for entry in answer["diff"]}
    assert headers == {f"{tmp_path}/current/other", f"{tmp_path}/current/added"}
    assert (tmp_path / "new/same").read_text() == "1\n"
    (tmp_path / "new/same").write_text("broken\n")  # the directory itself comes first
    answer = modules.run("published_directory", arguments, capsys)
    assert shown(answer) == {"same": ("broken\n", "1\n")}


@pytest.mark.parametrize("name", ["/etc/passwd", "../x"])
def test_a_name_outside_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    arguments = {"path": str(tmp_path / "new"), "files": {name: ""}}
    answer = modules.run("published_directory", arguments, capsys, failed=True)
    assert answer["msg"].startswith("measured: file name ")
    assert not list(tmp_path.iterdir())
