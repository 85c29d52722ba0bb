# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from demo import ROOT
from tests import scenarios

MEMINFO = "MemTotal:       24684096 kB\nMemFree:          512000 kB\nMemAvailable:   12582912 kB\n"


def test_available_memory_is_not_free_memory() -> None:
    assert scenarios.available(MEMINFO) == 12.0
    assert scenarios.available("") == float("inf")


def test_scenarios_start_together_only_where_both_fit() -> None:
    site = scenarios.MEMORY["site"]
    boxes = scenarios.MEMORY["boxes"]
    assert scenarios.next_to_start(["site", "boxes"], [], 0.5) == "site"
    assert scenarios.next_to_start(["boxes"], ["site"], site + boxes) == "boxes"
    assert scenarios.next_to_start(["boxes"], ["site"], site + boxes - 0.1) is None
    assert scenarios.next_to_start(["site", "boxes"], ["other"], boxes + 4.0) == "boxes"
    assert scenarios.next_to_start([], [], 99.0) is None


LOG = """\
\x1b[36mINFO    \x1b[0m \x1b[32mboxes\x1b[0m ➜ \x1b[33mconverge\x1b[0m: \x1b[36mExecuting\x1b[0m
  \x1b[2m│\x1b[0m TASK [gguf_model : The shards are one file] ****
"""


def test_what_a_scenario_does_is_read_from_its_log() -> None:
    assert scenarios.action(LOG) == "converge: gguf_model : The shards are one file"
    assert scenarios.action(LOG.splitlines()[0]) == "converge"
    assert scenarios.action("") == "starting"


def test_pytest_s_closing_lines_are_kept() -> None:
    text = (
        "x\n\x1b[32m======= \x1b[32m\x1b[1m21 passed\x1b[0m, 3 deselected in 8.10s\x1b[0m =======\n"
    )
    assert scenarios.closing_lines(text) == ["21 passed, 3 deselected in 8.10s"]
    assert scenarios.closing_lines("=== 1 failed, 2 passed in 61.00s (0:01:01) ===") == [
        "1 failed, 2 passed in 61.00s (0:01:01)"
    ]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("print('ok')", ""),
        ("raise SystemExit(3)", "molecule ended with 3"),
        ("print('[DEPRECATION ' + 'WARNING]: x will be removed')", "'[DEPRECATION WARNING]' in"),
        ("print('side_effect: \\x1b[35mExecuted: ' + 'Missing playbook')", "'Executed: Missing"),
    ],
)
def test_a_scenario_passes_only_with_status_0_and_nothing_let_pass(
    tmp_path: Path, script: str, problem: str
) -> None:
    log = tmp_path / "x.log"
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=stream)
        process.wait()
        run = scenarios.Run("x", process, stream, log, time.monotonic())
    assert run.problem().startswith(problem)
    assert bool(run.problem()) == bool(problem)


def test_unknown_scenarios_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert scenarios.main(["bokses"]) == 2
    assert "bokses" in capsys.readouterr().out


def test_scenarios_never_share_a_box() -> None:
    names = [
        platform["name"]
        for path in sorted((ROOT / "molecule").glob("*/molecule.yml"))
        for platform in yaml.safe_load(path.read_text())["platforms"]
    ]
    assert len(names) >= 3
    assert len(set(names)) == len(names)
    assert all(name.startswith("gpubox-mol-") for name in names)
