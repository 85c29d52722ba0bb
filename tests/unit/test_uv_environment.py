# SPDX-License-Identifier: Apache-2.0
"""The module that makes environments, with a stand-in for uv that only writes metadata."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Not uv: makes the folders of a venv and a .dist-info for each pin, and notes what it was told.
STAND_IN = """#!{python}
import os, pathlib, re, sys
log = pathlib.Path(os.environ["UV_STAND_IN_LOG"])
with log.open("a") as stream:
    again = " --reinstall" if "--reinstall" in sys.argv else ""
    stream.write(" ".join(sys.argv[1:3]) + again + "\\n")
if os.environ.get("UV_STAND_IN_FAILS") == sys.argv[1]:
    sys.exit("no route to the index")
if sys.argv[1] == "venv":
    target = pathlib.Path(sys.argv[-1])
    (target / "bin").mkdir(parents=True)
    (target / "bin" / "python").touch()
    (target / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
else:
    venv = pathlib.Path(sys.argv[sys.argv.index("--python") + 1]).parent.parent
    packages = venv / "lib" / "python3.11" / "site-packages"
    for line in pathlib.Path(sys.argv[sys.argv.index("-r") + 1]).read_text().splitlines():
        match = re.match(r"([\\w.-]+)==([^ ]+)", line)
        if match:
            info = packages / f"{{match[1]}}-{{match[2]}}.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").touch()
"""


class Box:
    """One environment on disk and the module that looks after it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.uv = folder / "uv"
        self.uv.write_text(STAND_IN.format(python=sys.executable))
        self.uv.chmod(self.uv.stat().st_mode | stat.S_IXUSR)
        self.path = folder / "environment"
        self.packages = self.path / "venv" / "lib" / "python3.11" / "site-packages"

    def run(self, requirements: str, *, check: bool = False, fails: str = "", **more: Any) -> Any:
        self.log.write_text("")
        arguments = {
            "path": str(self.path),
            "uv": str(self.uv),
            "python": "3.11",
            "requirements": requirements,
            "_ansible_check_mode": check,
            "_ansible_remote_tmp": str(self.path.parent),
            **more,
        }
        paths = [str(ROOT / "plugins" / "module_utils")]
        code = (
            "import ansible.module_utils as m, sys, runpy;"
            f"m.__path__.append({paths[0]!r});"
            "from ansible.module_utils.testing import patch_module_args;"
            "import json;"
            "args = json.loads(sys.stdin.read());"
            "context = patch_module_args(args); context.__enter__();"
            f"runpy.run_path({str(ROOT / 'plugins/modules/uv_environment.py')!r},"
            " run_name='__main__')"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(arguments),
            env={**os.environ, "UV_STAND_IN_LOG": str(self.log), "UV_STAND_IN_FAILS": fails},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def calls(self) -> list[str]:
        return self.log.read_text().split("\n")[:-1]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def test_made_once_and_then_left_alone(box: Box) -> None:
    first = box.run("a==1\nb==2\n")
    assert (first["changed"], box.calls()) == (True, ["venv --python", "pip install"])
    assert first["site_packages"] == str(box.packages)
    assert (box.run("a==1\nb==2\n")["changed"], box.calls()) == (False, [])


def test_check_mode_writes_nothing_and_says_where_it_would_be(box: Box) -> None:
    result = box.run("a==1\n", check=True)
    assert (result["changed"], result["exists"]) == (True, False)
    assert result["site_packages"] == str(box.packages)
    assert not box.path.exists()
    assert box.calls() == []


def test_drift_is_seen_and_mended(box: Box) -> None:
    box.run("a==1\n")
    (box.packages / "a-1.dist-info" / "METADATA").unlink()
    result = box.run("a==1\n")
    assert (result["changed"], result["wrong"]) == (True, {"a": "absent, wanted 1"})
    assert box.run("a==1\n")["changed"] is False


def test_a_run_killed_before_the_stamp_is_installed_over(box: Box) -> None:
    box.run("a==1\n")
    (box.path / "environment.json").unlink()
    assert box.run("a==1\n")["changed"] is True
    assert box.calls() == ["pip install --reinstall"]


def test_a_venv_without_interpreter_is_made_again(box: Box) -> None:
    box.run("a==1\n")
    (box.path / "venv" / "bin" / "python").unlink()
    assert box.run("a==1\n")["changed"] is True
    assert box.calls() == ["venv --python", "pip install"]


def test_a_failure_is_told_in_three_parts_and_a_rerun_recovers(box: Box) -> None:
    failed = box.run("a==1\n", fails="pip")
    assert failed["failed"] is True
    for part in ("measured: uv pip ended with 1", "no route to the index", "wanted:", "do:"):
        assert part in failed["msg"]
    assert box.run("a==1\n")["changed"] is True
    assert box.run("a==1\n")["changed"] is False


def test_only_some_with_a_stamp_of_their_own(box: Box) -> None:
    box.run("a==1\nb==2\n", only=["a"], stamp="foundation")
    assert sorted(path.name for path in box.packages.iterdir()) == ["a-1.dist-info"]
    assert box.run("a==1\nb==2\n")["wrong"] == {"b": "absent, wanted 2"}
    assert box.run("a==1\nb==2\n", only=["a"], stamp="foundation")["changed"] is False
