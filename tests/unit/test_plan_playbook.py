# SPDX-License-Identifier: Apache-2.0
"""playbooks/plan.yml through Ansible itself, on recorded boxes: what people and programs see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import boxes

ROOT = Path(__file__).resolve().parents[2]


def shown(
    tmp_path: Path, box: str, *more: str, failed: bool = False, callback: str = "plan_json"
) -> subprocess.CompletedProcess[str]:
    """What plan.yml says of a recorded box; the plan last applied lies in ``tmp_path``."""
    root, stand_ins = boxes.unpack(box, tmp_path / "box")
    (tmp_path / "hosts").write_text("[gpubox]\nthe-box ansible_connection=local\n")
    given = {
        "ansible_become": False,
        "ansible_python_interpreter": sys.executable,
        "gguf_model_dir": str(tmp_path / "model"),
        "hardware_root": str(root),
        "python_env_root": str(tmp_path / "opt"),
    }
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", f"{tmp_path}/hosts"]
    command += ["playbooks/plan.yml", "-e", json.dumps(given), *more]
    environment = {
        **os.environ,
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": callback,
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "ansible"),
        "GPUBOX_PROGRESS_INTERVAL": "1",  # its lines are no part of the JSON
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == failed, done.stdout + done.stderr
    assert "[DEPRECATION WARNING]" not in done.stderr
    return done


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)["the-box"]
    return found


def test_from_two_cards_to_eight_and_nothing_is_remembered_of_the_two(tmp_path: Path) -> None:
    json_only = ("-e", "plan_format=json")
    two = answer(shown(tmp_path, "reference-2", "--check", *json_only))
    assert two == answer(shown(tmp_path, "reference-2", *json_only))  # check mode sees the same
    assert two["changed"] == ["nothing was applied before"]
    assert not (tmp_path / "opt").exists()

    applied = tmp_path / "opt/current/plan.json"
    applied.parent.mkdir(parents=True)
    applied.write_text(json.dumps(two["plan"]))
    said = shown(tmp_path, "reference-8", callback="default").stdout
    line = " ".join(said.split())
    assert (
        "changed since the plan last applied: 2 → 8 GPUs; RAM 288 → 432 GiB; MAX_JOBS 12 → 18; "
        "tensor_parallel_size 2 → 8; CPUs of the unit 0-31 → all'"
    ) in line
    assert (
        "redone because of the plan: environment no, flash-attn no, unit yes, restart yes" in line
    )
    assert json.loads(applied.read_text()) == two["plan"]


@pytest.mark.parametrize("more", [["-e", "plan_formt=json"], ["-e", "plan_format=xml"]])
def test_a_refusal_is_no_part_of_the_json(tmp_path: Path, more: list[str]) -> None:
    done = shown(tmp_path, "reference-2", *more, failed=True)
    assert json.loads(done.stdout) == {}
    assert "plan_form" in done.stderr
