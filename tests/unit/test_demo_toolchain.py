# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from demo import ROOT, settings
from tests.unit.demo_stand_ins import StandIn

SCRIPT = ROOT / "tools" / "toolchain.sh"
TOOLS = ("bash", "cat", "cp", "dirname", "env", "mkdir", "rm", "sed", "sha256sum", "tr")


def tracked() -> list[Path]:
    """Files of the repository; of the folder where there is no git (a release archive)."""
    found = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode == 0:
        return [ROOT / name for name in found.stdout.split("\0") if name]
    return [path for path in ROOT.rglob("*") if ".venv" not in path.parts]


def test_no_file_names_a_host_of_a_package_registry() -> None:
    """Packages come from wherever the operator's settings say; uv.lock must not say otherwise."""
    hosts = [
        ".".join(parts).encode()
        for parts in (
            ("pypi", "org"),
            ("files", "pythonhosted", "org"),
            ("deb", "debian", "org"),
            ("security", "debian", "org"),
            ("registry", "npmjs", "org"),
        )
    ]
    files = [path for path in tracked() if path.is_file()]
    assert len(files) > 50
    named = {
        str(path.relative_to(ROOT)): host.decode()
        for path in files
        for host in hosts
        if host in path.read_bytes()
    }
    assert named == {}


def test_the_controller_s_uv_is_the_one_that_boxes_get() -> None:
    pinned = (ROOT / "tools/uv.txt").read_text().splitlines()[0].split()[0]
    defaults = yaml.safe_load((ROOT / "roles/python_env/defaults/main.yml").read_text())
    assert pinned == f"uv=={defaults['python_env_uv_version']}"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The toolchain script in a repository of its own, to break as one likes."""
    repository = tmp_path / "repository"
    (repository / "tools").mkdir(parents=True)
    for name in ("uv.lock", "pyproject.toml", "tools/uv.txt", "tools/toolchain.sh"):
        shutil.copy(ROOT / name, repository / name)
    return repository


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A PATH with the basic commands only."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    return folder


def call(
    repository: Path, machine: Path, what: str, **more: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(machine), "HOME": str(repository), **more}
    return subprocess.run(
        ["bash", str(repository / "tools/toolchain.sh"), what],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def user(machine: Path, number: int) -> None:
    (machine / "id").write_text(f"#!/bin/sh\necho {number}\n")
    (machine / "id").chmod(0o755)


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=ubuntu\nID_LIKE=debian\n", "sudo apt-get install -y podman"),
        ("ID=debian\n", "sudo apt-get install -y podman"),
        ('ID=rocky\nID_LIKE="rhel centos fedora"\n', "sudo dnf install -y podman"),
        ("ID=unheardof\n", "install podman 4.3 or newer"),
    ],
)
def test_without_root_the_exact_command_is_printed(
    copy: Path, machine: Path, release: str, command: str
) -> None:
    user(machine, 1000)
    (copy / "os-release").write_text(release)
    result = call(copy, machine, "system", GPUBOX_OS_RELEASE=str(copy / "os-release"))
    assert result.returncode == 1
    assert result.stderr.startswith("measured: there is no podman on PATH")
    assert f"do: run: {command}" in result.stderr


def test_as_root_only_what_is_missing_is_installed(copy: Path, machine: Path) -> None:
    user(machine, 0)
    apt = StandIn(machine, "apt-get")
    apt.answer({"update": (0, "", ""), "install": (0, "", "")})
    for name in ("podman", "runc", "conmon", "iptables", "newuidmap"):
        StandIn(machine, name)
    result = call(copy, machine, "system")
    assert result.returncode == 0, result.stderr
    assert [one[0] for one in apt.calls()] == ["update", "install"]
    packages = [word for word in apt.calls()[1][1:] if not word.startswith("-")]
    assert packages == ["mmdebstrap", "zstd", "netavark", "aardvark-dns"]


def test_nothing_is_installed_when_nothing_is_missing(copy: Path, machine: Path) -> None:
    user(machine, 1000)
    StandIn(machine, "podman")
    result = call(copy, machine, "system")
    assert (result.returncode, result.stdout) == (0, "")


def uv_and_python(machine: Path) -> StandIn:
    pin = (ROOT / "tools/uv.txt").read_text().split("==")[1].split()[0]
    uv = StandIn(machine, "uv")
    uv.answer(
        {"--version": (0, f"uv {pin}\n", ""), **dict.fromkeys(("export", "pip"), (0, "", ""))}
    )
    (machine / "python3.13").symlink_to(sys.executable)
    (machine / "python3.12").symlink_to(sys.executable)
    return uv


def test_the_environment_is_synced_once_with_hashes(copy: Path, machine: Path) -> None:
    uv = uv_and_python(machine)
    (copy / ".venv/bin").mkdir(parents=True)
    (copy / ".venv/bin/python").symlink_to(sys.executable)
    first = call(copy, machine, "python")
    assert first.returncode == 0, first.stderr
    sync = next(one for one in uv.calls() if one[:2] == ["pip", "sync"])
    assert "--require-hashes" in sync
    calls = len(uv.calls())
    second = call(copy, machine, "python")
    assert (second.returncode, second.stdout) == (0, "")
    assert len(uv.calls()) == calls
    (copy / "uv.lock").write_text("another\n")
    call(copy, machine, "python")
    assert len(uv.calls()) > calls


def test_an_index_that_does_not_answer_leaves_no_stamp(copy: Path, machine: Path) -> None:
    uv = uv_and_python(machine)
    uv.answer(
        {
            "--version": (
                0,
                "uv " + (ROOT / "tools/uv.txt").read_text().split("==")[1].split()[0],
                "",
            ),
            "export": (0, "", ""),
            "pip": (2, "", "error: Failed to fetch: dns error"),
        }
    )
    (copy / ".venv/bin").mkdir(parents=True)
    (copy / ".venv/bin/python").symlink_to(sys.executable)
    result = call(copy, machine, "python")
    assert result.returncode == 1
    assert "dns error" in result.stderr
    assert "do: check the network, or set UV_DEFAULT_INDEX" in result.stderr
    assert not (copy / ".venv/.gpubox-toolchain").exists()


def test_the_lock_names_no_host() -> None:
    text = (ROOT / "uv.lock").read_text()
    assert 'registry = "https://index.invalid/simple"' in text
    assert 'url = "https://files.invalid/' in text


def test_pip_s_index_is_handed_to_uv(copy: Path, machine: Path) -> None:
    uv = uv_and_python(machine)
    told = machine / "told"
    real = uv.path.rename(machine / "uv-answers")
    uv.path.write_text(f'#!/bin/sh\necho "$UV_DEFAULT_INDEX" >> {told}\nexec {real} "$@"\n')
    uv.path.chmod(0o755)
    (copy / ".venv/bin").mkdir(parents=True)
    (copy / ".venv/bin/python").symlink_to(sys.executable)
    url = "https://mirror.example/simple"
    result = call(copy, machine, "python", PIP_INDEX_URL=url)
    assert result.returncode == 0, result.stderr
    assert set(told.read_text().split()) == {url}


def test_help_names_the_targets_and_the_settings() -> None:
    result = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("setup", "demo", "demo-down", "check", "test", "lock"):
        assert f"make {target} " in result.stdout
    source = Path(settings.__file__).read_text() + (ROOT / "demo/image.py").read_text()
    for name in sorted(set(re.findall(r'"(DEMO_\w+|GPUBOX_\w+)"', source))):
        assert f"  {name} " in result.stdout
