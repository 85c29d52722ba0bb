# SPDX-License-Identifier: Apache-2.0
"""Series and the transaction that applies them, on real directories."""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import py_compile
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from gpubox import patches
from gpubox.errors import GpuboxError
from gpubox.patches import Plan, converge, read_stack, read_texts

pytestmark = pytest.mark.forks

ROOT = Path(__file__).resolve().parents[2]

WHEEL = {
    "demo_plugin/__init__.py": b"from . import adapter\n",
    "demo_plugin/adapter.py": b"".join(b"VALUE_%d = %d\n" % (n, n) for n in range(30)),
    "demo_plugin/loader.py": b"def load():\r\n    return 'old'\r\n",
    "demo_plugin/gone.py": b"DEAD = True\n",
}
ADAPTER_1 = WHEEL["demo_plugin/adapter.py"].replace(b"VALUE_3 = 3\n", b"VALUE_3 = 'three'\n")
ADAPTER_2 = ADAPTER_1.replace(b"VALUE_25 = 25\n", b"VALUE_25 = 'twenty-five'\nEXTRA = 1\n")
LOADER_1 = b"def load():\r\n    return 'new'\r\n"
NEW_1 = b"def glm():\n    return 5\n"
CPU_1 = ADAPTER_2.replace(b"EXTRA = 1\n", b"EXTRA = 'cpu'\n")

Edits = dict[str, tuple[bytes | None, bytes | None]]
MAIN: list[Edits] = [
    {
        "demo_plugin/adapter.py": (WHEEL["demo_plugin/adapter.py"], ADAPTER_1),
        "demo_plugin/sub/glm.py": (None, NEW_1),
    },
    {
        "demo_plugin/adapter.py": (ADAPTER_1, ADAPTER_2),
        "demo_plugin/loader.py": (WHEEL["demo_plugin/loader.py"], LOADER_1),
        "demo_plugin/gone.py": (WHEEL["demo_plugin/gone.py"], None),
    },
]
ON_TOP: list[Edits] = [{"demo_plugin/adapter.py": (ADAPTER_2, CPU_1)}]


def sha(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def git_patch(edits: Edits) -> bytes:
    """What ``git diff`` says of some edits."""
    return _git_patch(tuple(edits.items()))


@functools.cache
def _git_patch(edits: tuple[tuple[str, tuple[bytes | None, bytes | None]], ...]) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        return run_git(dict(edits), Path(directory))


def run_git(edits: Edits, scratch: Path) -> bytes:
    """Write both sides below ``scratch`` and compare them."""
    for side in ("a", "b"):
        (scratch / side).mkdir(parents=True)
    for path, contents in edits.items():
        for side, content in zip(("a", "b"), contents, strict=True):
            if content is not None:
                target = scratch / side / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
    command = ["git", "diff", "--no-index", "--no-prefix", "--no-renames", "a", "b"]
    return subprocess.run(command, cwd=scratch, capture_output=True, check=False).stdout


class Box:
    """A site-packages with one installed distribution, series and a state directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.site = root / "site-packages"
        self.state = root / "state"
        self.definitions: dict[str, Any] = {}
        self.install("0.0.5", WHEEL)

    def install(self, version: str, files: dict[str, bytes]) -> None:
        """What an installer leaves of a wheel."""
        info = self.site / f"Demo_Plugin-{version}.dist-info"
        for old in self.site.glob("Demo_Plugin-*.dist-info"):
            for path in (old / "RECORD").read_text().splitlines():
                (self.site / path.split(",")[0]).unlink(missing_ok=True)
            (old / "METADATA").unlink()
            (old / "RECORD").unlink()
            old.rmdir()
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: Demo-Plugin\nVersion: {version}\n")
        rows = []
        for path, content in files.items():
            target = self.site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            rows.append(f"{path},sha256={digest},{len(content)}\n")
        (info / "RECORD").write_text("".join(rows))

    def series(self, name: str, edits: list[Edits], **top: str) -> str:
        """Write a series as it lies in files/patches."""
        directory = self.root / "patches" / name
        directory.mkdir(parents=True, exist_ok=True)
        listed = []
        for number, edit in enumerate(edits, start=1):
            file = f"{number:04d}-edit.patch"
            (directory / file).write_bytes(git_patch(edit))
            listed.append(
                {
                    "file": file,
                    "purpose": f"edit {number}",
                    "upstream": {"status": "not sent"},
                    "test": "tests/unit/test_patches.py",
                    "files": [
                        {"path": path, "before": sha(old), "after": sha(new)}
                        for path, (old, new) in edit.items()
                    ],
                }
            )
        self.definitions[name] = {
            "distribution": "demo-plugin",
            "version": "0.0.5",
            "device": "any",
            "purpose": "a test",
            **top,
            "patches": listed,
        }
        return name

    def run(self, *names: str, device: str = "cpu", check: bool = False) -> Plan:
        stack = read_stack([(name, self.definitions[name]) for name in names])
        texts: dict[str, bytes] = {}
        for series in stack:
            texts |= read_texts(self.root / "patches" / series.name, series)
        return converge(self.site, self.state, stack, texts, device, check)

    def files(self) -> dict[str, bytes]:
        """Every file of the package, whatever made it."""
        return {
            str(path.relative_to(self.site)): path.read_bytes()
            for path in sorted((self.site / "demo_plugin").rglob("*"))
            if path.is_file()
        }


PATCHED = {
    "demo_plugin/__init__.py": WHEEL["demo_plugin/__init__.py"],
    "demo_plugin/adapter.py": ADAPTER_2,
    "demo_plugin/loader.py": LOADER_1,
    "demo_plugin/sub/glm.py": NEW_1,
}


@pytest.fixture
def box(tmp_path: Path) -> Box:
    box = Box(tmp_path)
    box.series("main", MAIN)
    box.series("cpu", ON_TOP, device="cpu")
    return box


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file, to see that nothing was touched."""
    return {str(p): (p.stat().st_ino, p.stat().st_mtime_ns) for p in root.rglob("*")}


# --- the way it should go -------------------------------------------------------------------------


def test_applies_and_then_changes_nothing(box: Box) -> None:
    assert box.run("main").changed
    assert box.files() == PATCHED
    before = listing(box.root)
    again = box.run("main")
    assert not again.changed
    assert listing(box.root) == before


def test_stack_and_unstack(box: Box) -> None:
    box.run("main", "cpu")
    assert box.files() == PATCHED | {"demo_plugin/adapter.py": CPU_1}
    assert not box.run("main", "cpu").changed
    assert box.run("main").changed
    assert box.files() == PATCHED


def test_absent_restores_everything(box: Box) -> None:
    (box.site / "demo_plugin/gone.py").chmod(0o640)
    box.run("main", "cpu")
    assert box.run().changed
    assert box.files() == WHEEL
    assert (box.site / "demo_plugin/gone.py").stat().st_mode & 0o777 == 0o640
    assert not (box.site / "demo_plugin/sub").exists()
    assert not box.state.exists()
    assert not box.run().changed
    assert not box.state.exists()


def test_changed_series_starts_from_pristine(box: Box) -> None:
    box.run("main", "cpu")
    other = WHEEL["demo_plugin/adapter.py"].replace(b"VALUE_3 = 3\n", b"VALUE_3 = -3\n")
    box.series("other", [{"demo_plugin/adapter.py": (WHEEL["demo_plugin/adapter.py"], other)}])
    assert box.run("other").changed
    assert box.files() == WHEEL | {"demo_plugin/adapter.py": other}
    assert not (box.site / "demo_plugin/sub").exists()
    kept = sorted(path.name for path in (box.state / "pristine").iterdir())
    assert kept == [sha(WHEEL["demo_plugin/adapter.py"])]


def test_changed_lower_series_takes_the_upper_with_it(box: Box) -> None:
    box.run("main", "cpu")
    two = ADAPTER_2.replace(b"VALUE_9 = 9\n", b"VALUE_9 = 'nine'\n")
    top = two.replace(b"EXTRA = 1\n", b"EXTRA = 'cpu'\n")
    edits = [MAIN[0], MAIN[1] | {"demo_plugin/adapter.py": (ADAPTER_1, two)}]
    box.series("main", edits)
    box.series("cpu", [{"demo_plugin/adapter.py": (two, top)}], device="cpu")
    box.run("main", "cpu")
    assert box.files()["demo_plugin/adapter.py"] == top


def test_check_writes_nothing_and_sees_the_same(box: Box) -> None:
    before = listing(box.root)
    planned = box.run("main", check=True)
    assert planned.changed
    assert listing(box.root) == before
    done = box.run("main")
    assert [(s.path, s.target) for s in done.steps] == [(s.path, s.target) for s in planned.steps]
    assert not box.run("main", check=True).changed


def test_a_hard_link_into_a_cache_is_not_written_through(box: Box) -> None:
    cache = box.root / "cache"
    cache.mkdir()
    for path in WHEEL:
        os.link(box.site / path, cache / path.replace("/", "-"))
    box.run("main", "cpu")
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == {
        path.replace("/", "-"): content for path, content in WHEEL.items()
    }
    assert (box.site / "demo_plugin/adapter.py").stat().st_nlink == 1


def test_mode_is_kept_and_a_created_file_is_readable(box: Box) -> None:
    adapter = box.site / "demo_plugin/adapter.py"
    adapter.chmod(0o755)
    old = os.umask(0o077)
    try:
        box.run("main")
    finally:
        os.umask(old)
    assert adapter.stat().st_mode & 0o777 == 0o755
    assert (box.site / "demo_plugin/sub/glm.py").stat().st_mode & 0o777 == 0o644
    assert (box.site / "demo_plugin/sub").stat().st_mode & 0o777 == 0o755


def run_python(box: Box, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(box.site)}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    "invalidation",
    [py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.UNCHECKED_HASH],
)
def test_compiled_copies_do_not_outlive_their_source(
    box: Box, invalidation: py_compile.PycInvalidationMode
) -> None:
    loader = box.site / "demo_plugin/loader.py"
    ask = "from demo_plugin.loader import load; print(load())"
    py_compile.compile(str(loader), invalidation_mode=invalidation, doraise=True)
    neighbour = py_compile.compile(str(box.site / "demo_plugin/__init__.py"), doraise=True)
    assert run_python(box, ask) == "old"
    stamp = loader.stat()
    box.run("main")
    # the worst case: same size and same time as the file that was compiled
    os.utime(loader, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert run_python(box, ask) == "new"
    assert Path(str(neighbour)).exists()


# --- refusals: everything stays as it was ---------------------------------------------------------


def refused(box: Box, *names: str, device: str = "cpu") -> str:
    """The message of a run that has to fail and to change nothing."""
    before = listing(box.site)
    recorded = box.state.exists()
    with pytest.raises(GpuboxError) as caught:
        box.run(*names, device=device)
    assert listing(box.site) == before
    assert box.state.exists() == recorded
    return str(caught.value)


def test_drifted_second_file_leaves_the_first_alone(box: Box) -> None:
    (box.site / "demo_plugin/loader.py").write_bytes(b"mine\n")
    message = refused(box, "main")
    assert "demo_plugin/loader.py" in message
    assert str(sha(b"mine\n")) in message
    assert str(sha(WHEEL["demo_plugin/loader.py"])) in message
    assert "changed since it was installed" in message


def test_every_drifted_file_is_named(box: Box) -> None:
    for name in ("loader", "adapter"):
        (box.site / f"demo_plugin/{name}.py").write_bytes(b"mine\n")
    message = refused(box, "main")
    assert "demo_plugin/loader.py" in message
    assert "demo_plugin/adapter.py" in message
    assert "2 faults" in message


def test_missing_file_is_named(box: Box) -> None:
    (box.site / "demo_plugin/loader.py").unlink()
    assert "demo_plugin/loader.py: found no file" in refused(box, "main")


def test_another_build_of_the_wheel_is_told_apart(box: Box) -> None:
    box.install("0.0.5", WHEEL | {"demo_plugin/loader.py": b"def load(): pass\n"})
    assert "another build" in refused(box, "main")


def test_file_to_create_is_there_already(box: Box) -> None:
    target = box.site / "demo_plugin/sub/glm.py"
    target.parent.mkdir()
    target.write_bytes(b"somebody's\n")
    assert "not made by an earlier run" in refused(box, "main")


def test_edit_of_a_patched_file_is_not_lost(box: Box) -> None:
    box.run("main")
    (box.site / "demo_plugin/adapter.py").write_bytes(ADAPTER_2 + b"DEBUG = 1\n")
    assert "demo_plugin/adapter.py" in refused(box, "main")
    assert "demo_plugin/adapter.py" in refused(box)


def test_wrong_version_names_both(box: Box) -> None:
    box.install("0.0.6", WHEEL)
    message = refused(box, "main")
    assert "demo-plugin 0.0.6 is installed" in message
    assert "0.0.5" in message


def test_distribution_is_not_installed(box: Box) -> None:
    box.series("main", MAIN, distribution="other-plugin")
    assert "other-plugin is not installed" in refused(box, "main")


def test_two_versions_side_by_side(box: Box) -> None:
    info = box.site / "demo_plugin-0.0.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: demo-plugin\n")
    assert "0.0.5 and 0.0.4" in refused(box, "main")


def test_cpu_series_is_refused_on_a_cuda_box(box: Box) -> None:
    assert "series cpu is for CPU-only boxes" in refused(box, "main", "cpu", device="cuda")
    assert box.run("main", device="cuda").changed


def test_link_of_a_link_mode_environment_is_refused(box: Box) -> None:
    outside = box.root / "cached.py"
    target = box.site / "demo_plugin/adapter.py"
    target.rename(outside)
    target.symlink_to(outside)
    message = refused(box, "main")
    assert "symbolic link" in message
    assert outside.read_bytes() == WHEEL["demo_plugin/adapter.py"]


def test_directory_that_leads_out_is_refused(box: Box) -> None:
    outside = box.root / "elsewhere"
    outside.mkdir()
    (box.site / "demo_plugin/sub").symlink_to(outside)
    assert "symbolic link" in refused(box, "main")
    assert list(outside.iterdir()) == []


def test_file_in_the_way_of_a_directory(box: Box) -> None:
    (box.site / "demo_plugin/sub").write_bytes(b"")
    assert "is a file" in refused(box, "main")


def test_directory_in_the_way_of_a_file(box: Box) -> None:
    (box.site / "demo_plugin/loader.py").unlink()
    (box.site / "demo_plugin/loader.py").mkdir()
    assert "not a regular file" in refused(box, "main")


def test_patch_that_does_not_apply_and_one_that_is_missing(box: Box) -> None:
    directory = box.root / "patches/main"
    text = (directory / "0001-edit.patch").read_bytes()
    (directory / "0001-edit.patch").write_bytes(text.replace(b" VALUE_2 = 2\n", b" VALUE_2 = 4\n"))
    (directory / "0002-edit.patch").unlink()
    message = refused(box, "main")
    assert "main/0001-edit.patch: line 3 of demo_plugin/adapter.py" in message
    assert "main/0002-edit.patch: the file does not exist" in message


def test_result_must_have_the_declared_hash(box: Box) -> None:
    path = box.root / "patches/main/0002-edit.patch"
    path.write_bytes(path.read_bytes().replace(b"+EXTRA = 1\n", b"+EXTRA = 2\n"))
    message = refused(box, "main")
    found = sha(ADAPTER_2.replace(b"EXTRA = 1\n", b"EXTRA = 2\n"))
    assert f"leaves demo_plugin/adapter.py as {found}, not {sha(ADAPTER_2)}" in message


def test_patch_must_touch_what_it_declares(box: Box) -> None:
    del box.definitions["main"]["patches"][1]["files"][2]
    message = refused(box, "main")
    assert "changes demo_plugin/adapter.py, demo_plugin/gone.py, demo_plugin/loader.py" in message


def test_lost_pristine_copy_is_said(box: Box) -> None:
    box.run("main")
    (box.state / "pristine" / str(sha(WHEEL["demo_plugin/loader.py"]))).write_bytes(b"rot\n")
    message = refused(box)
    assert "demo_plugin/loader.py: the pristine copy" in message


def test_record_that_cannot_be_read(box: Box) -> None:
    box.run("main")
    good = (box.state / "record.json").read_text()
    path = "demo_plugin/adapter.py"
    for text in (
        "{",
        "[]",
        "[" * 100_000,
        good.replace('"format": 1', '"format": 2'),
        good.replace(path, "../../etc/passwd"),
        good.replace('demo_plugin/sub"', '/etc"'),
        good.replace('"pristine"', '"unspoilt"'),
    ):
        assert text != good
        (box.state / "record.json").write_text(text)
        assert "record.json cannot be understood" in refused(box, "main")


def test_two_runs_at_once(box: Box) -> None:
    with patches.Store(box.state).lock():
        assert "another run holds" in refused(box, "main")


# --- reinstalled and upgraded distributions -------------------------------------------------------


def test_reinstalled_distribution_is_patched_again(box: Box) -> None:
    box.run("main")
    box.install("0.0.5", WHEEL)
    assert box.run("main").changed
    assert box.files() == PATCHED


def test_lost_record_after_reinstall(box: Box) -> None:
    box.run("main")
    for path in sorted(box.state.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert "demo_plugin/adapter.py" in refused(box, "main")
    box.install("0.0.5", WHEEL)  # what the message says to do; created files survive it
    assert box.run("main").changed
    assert box.files() == PATCHED
    box.run()
    assert box.files() == WHEEL


def test_upgraded_distribution_keeps_its_own_files(box: Box) -> None:
    box.run("main")
    newer = {
        "demo_plugin/__init__.py": b"",
        "demo_plugin/adapter.py": ADAPTER_2,  # upstream took the patch
        "demo_plugin/loader.py": b"def load(): return 6\n",
    }
    box.install("0.0.6", newer)
    assert (box.site / "demo_plugin/sub/glm.py").exists()
    fixed = b"def load(): return 7\n"
    box.series(
        "newer",
        [{"demo_plugin/loader.py": (newer["demo_plugin/loader.py"], fixed)}],
        version="0.0.6",
    )
    box.run("newer")
    assert box.files() == newer | {"demo_plugin/loader.py": fixed}
    box.run()
    assert box.files() == newer


def test_created_file_that_the_upgrade_brings_is_left(box: Box) -> None:
    box.run("main")
    newer = WHEEL | {"demo_plugin/sub/glm.py": NEW_1}
    box.install("0.0.6", newer)
    box.run()
    assert box.files() == newer


def test_file_that_becomes_created_must_not_swallow_the_wheels(box: Box) -> None:
    box.run("main")
    box.series("wrong", [{"demo_plugin/loader.py": (None, NEW_1)}])
    assert "demo_plugin/loader.py" in refused(box, "wrong")


# --- killed, and failing writes -------------------------------------------------------------------

CALLS = ("replace", "rename", "unlink", "mkdir", "rmdir", "fsync", "fchmod")


def in_child(action: Callable[[], object], kill_at: int) -> bool:
    """Run an action in a child that is killed at its n-th change on disk; True when it was."""
    child = os.fork()
    if child == 0:
        counter = itertools.count(1)

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if next(counter) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return wrapper

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def killed_everywhere(make: Callable[[], Box], *names: str) -> Iterator[Box]:
    """Boxes on which a run to ``names`` was killed at each of its changes in turn."""
    for kill_at in itertools.count(1):
        box = make()
        if not in_child(lambda box=box: box.run(*names), kill_at):  # type: ignore[misc]
            assert kill_at > 15  # the calls that are counted are those that are made
            return
        yield box


@pytest.mark.parametrize(
    ("start", "killed", "then", "expected"),
    [
        ((), ("main",), ("main",), PATCHED),
        ((), ("main",), (), WHEEL),
        (("main",), ("main", "cpu"), ("main",), PATCHED),
        (("main", "cpu"), ("small",), ("main",), PATCHED),
        (("main",), (), ("main",), PATCHED),
        (("main",), (), (), WHEEL),
    ],
)
def test_killed_at_any_point(
    tmp_path: Path,
    start: tuple[str, ...],
    killed: tuple[str, ...],
    then: tuple[str, ...],
    expected: dict[str, bytes],
) -> None:
    numbers = itertools.count()
    other = WHEEL["demo_plugin/loader.py"].replace(b"old", b"odd")

    def make() -> Box:
        box = Box(tmp_path / str(next(numbers)))
        box.series("main", MAIN)
        box.series("cpu", ON_TOP, device="cpu")
        box.series("small", [{"demo_plugin/loader.py": (WHEEL["demo_plugin/loader.py"], other)}])
        if start:
            box.run(*start)
        return box

    count = 0
    for box in killed_everywhere(make, *killed):
        count += 1
        box.run(*then)
        assert box.files() == expected
        assert not box.run(*then).changed
        assert not list(box.site.rglob(".*"))
        if not then:
            assert not (box.site / "demo_plugin/sub").exists()
            assert not box.state.exists()
        else:
            box.run()
            assert box.files() == WHEEL
    assert count > 15


def test_killed_twice_with_different_stacks(tmp_path: Path) -> None:
    numbers = itertools.count()

    def make() -> Box:
        box = Box(tmp_path / str(next(numbers)))
        box.series("main", MAIN)
        box.series("cpu", ON_TOP, device="cpu")
        return box

    for box in killed_everywhere(make, "main", "cpu"):
        in_child(lambda box=box: box.run("main"), 12)  # type: ignore[misc]
        in_child(box.run, 17)
        box.run("main")
        assert box.files() == PATCHED


def test_compiled_copy_is_gone_after_a_killed_run_too(tmp_path: Path) -> None:
    numbers = itertools.count()
    stale = "demo_plugin/__pycache__/loader.cpython-313.pyc"

    def make() -> Box:
        box = Box(tmp_path / str(next(numbers)))
        box.series("main", MAIN)
        (box.site / stale).parent.mkdir()
        (box.site / stale).write_bytes(b"compiled before the patch")
        return box

    for box in killed_everywhere(make, "main"):
        box.run("main")
        assert not (box.site / stale).exists()


@pytest.mark.parametrize("nth", range(1, 12))
def test_failing_rename_puts_everything_back(
    box: Box, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = itertools.count(1)
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if "site-packages" in str(self) and next(counter) == nth:
            raise OSError(28, "No space left on device", str(self))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    if nth > 3:  # three files are renamed into place, the fourth is removed
        assert box.run("main").changed
        return
    with pytest.raises(GpuboxError, match="No space left on device"):
        box.run("main")
    assert box.files() == WHEEL
    assert not (box.site / "demo_plugin/sub").exists()
    assert not list(box.site.rglob(".*"))
    assert not box.run(check=True).changed
    monkeypatch.setattr(Path, "replace", replace)
    box.run("main")
    assert box.files() == PATCHED


def test_failing_write_leaves_everything(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    write = patches.write_synced

    def failing(path: Path, *args: Any) -> None:
        if path.name == ".loader.py.gpubox-new":
            raise OSError(28, "No space left on device", str(path))
        write(path, *args)

    monkeypatch.setattr(patches, "write_synced", failing)
    with pytest.raises(GpuboxError, match="No space left on device"):
        box.run("main")
    assert box.files() == WHEEL
    assert not (box.site / "demo_plugin/sub").exists()


# --- series.yml -----------------------------------------------------------------------------------


def faults(*definitions: tuple[str, object]) -> str:
    with pytest.raises(GpuboxError) as caught:
        read_stack(definitions)
    return str(caught.value)


def test_all_faults_of_a_series_at_once(box: Box) -> None:
    bad = copy.deepcopy(box.definitions["main"])
    bad["version"] = 0.5
    bad["device"] = "tpu"
    bad["colour"] = "red"
    del bad["purpose"]
    bad["patches"][0]["file"] = "../evil.patch"
    bad["patches"][0]["upstream"] = {"status": "perhaps"}
    bad["patches"][0]["files"][0]["before"] = "ABC"
    bad["patches"][0]["files"][1]["path"] = "../../etc/passwd"
    del bad["patches"][1]["files"][0]["after"]
    bad["patches"][1]["files"][1]["path"] = "/etc/passwd"
    bad["patches"][1]["test"] = ["x"]
    message = faults(("one", bad), ("two", "text"))
    for part in (
        "version is 0.5",
        "device is 'tpu'",
        "unknown keys: colour",
        "purpose is None",
        "'../evil.patch' is not like",
        "upstream status is 'perhaps'",
        "before is 'ABC'",
        "'../../etc/passwd' has",
        "file 1 has no 'after'",
        "'/etc/passwd' is absolute",
        "test is ['x']",
        "series two: is str, not a mapping",
    ):
        assert part in message, part


def changed(box: Box, edit: Callable[[dict[str, Any]], object]) -> str:
    """Faults of the main series after an edit, with the cpu series on top."""
    main = copy.deepcopy(box.definitions["main"])
    edit(main)
    return faults(("main", main), ("cpu", box.definitions["cpu"]))


def test_chain_must_fit(box: Box) -> None:
    def edit(main: dict[str, Any]) -> None:
        main["patches"][1]["files"][0]["after"] = "0" * 64

    assert f"main/0002-edit.patch leaves {'0' * 64}" in changed(box, edit)
    assert "given 2 times" in faults(*[("main", box.definitions["main"])] * 2)


def test_order_of_the_stack_matters(box: Box) -> None:
    message = faults(("cpu", box.definitions["cpu"]), ("main", box.definitions["main"]))
    assert "demo_plugin/adapter.py before is" in message


def test_versions_of_a_stack_must_agree(box: Box) -> None:
    def edit(main: dict[str, Any]) -> None:
        main.update(version="0.0.6", distribution="Demo_Plugin")

    assert "series cpu is for demo-plugin 0.0.5, series main for 0.0.6" in changed(box, edit)


def test_a_file_belongs_to_one_distribution(box: Box) -> None:
    def edit(main: dict[str, Any]) -> None:
        main.update(distribution="vllm")

    assert "demo_plugin/adapter.py is patched as a file of vllm too" in changed(box, edit)


def test_patch_without_effect_and_wrong_order(box: Box) -> None:
    def edit(main: dict[str, Any]) -> None:
        main["patches"][0]["files"].append({"path": "x", "before": "0" * 64, "after": "0" * 64})

    assert "x is the same before and after" in changed(box, edit)

    def disorder(main: dict[str, Any]) -> None:
        main["patches"][1]["file"] = "0001-again.patch"
        main["patches"].append(dict(main["patches"][1], file="0000-first.patch"))

    message = changed(box, disorder)
    assert "0001-again.patch does not follow 0001-edit.patch" in message
    assert "0000-first.patch does not follow 0001-again.patch" in message


def test_empty_series_is_refused() -> None:
    assert "patches is not a list with at least one item" in faults(
        ("x", {"distribution": "x", "version": "1", "device": "any", "purpose": "p", "patches": []})
    )


# --- the module -----------------------------------------------------------------------------------


def load_module() -> Any:
    path = ROOT / "plugins/modules/patch_series.py"
    spec = importlib.util.spec_from_file_location("patch_series_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parameters(box: Box, *names: str, **others: Any) -> dict[str, Any]:
    return {
        "series": [
            {
                "name": name,
                "path": str(box.root / "patches" / name),
                "definition": box.definitions[name],
            }
            for name in names
        ],
        "site_packages": str(box.site),
        "state_dir": str(box.state),
        "device": "cpu",
        **others,
    }


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def run(arguments: dict[str, Any]) -> dict[str, Any]:
        with patch_module_args(arguments), pytest.raises(SystemExit):
            load_module().main()
        return dict(json.loads(capsys.readouterr().out))

    return run


Call = Callable[[dict[str, Any]], dict[str, Any]]


def test_module_applies_and_reports(box: Box, call: Call) -> None:
    arguments = parameters(box, "main", "cpu")
    checked = call({**arguments, "_ansible_check_mode": True, "_ansible_diff": True})
    assert checked["changed"]
    assert box.files() == WHEEL
    result = call({**arguments, "_ansible_diff": True})
    assert result["diff"] == checked["diff"]
    texts = "".join(entry["prepared"] for entry in result["diff"])
    assert "-VALUE_3 = 3\n+VALUE_3 = 'three'\n" in texts
    assert "--- /dev/null\n+++ b/demo_plugin/sub/glm.py\n" in texts
    assert "--- a/demo_plugin/gone.py\n+++ /dev/null\n" in texts
    assert [one["name"] for one in result["applied"]] == ["main", "cpu"]
    text = (box.root / "patches/main/0001-edit.patch").read_bytes()
    assert result["applied"][0]["patches"][0]["sha256"] == sha(text)
    by_path = {entry["path"]: entry for entry in result["files"]}
    assert by_path["demo_plugin/adapter.py"]["after"] == sha(CPU_1)
    assert by_path["demo_plugin/sub/glm.py"]["pristine"] is None
    again = call(arguments)
    assert not again["changed"]
    assert again["diff"] == []
    gone = call(parameters(box, state="absent"))
    assert gone["changed"]
    assert box.files() == WHEEL


def test_module_says_what_is_wrong(box: Box, call: Call) -> None:
    result = call(parameters(box, "main", "cpu", device="cuda"))
    assert result["failed"]
    assert "CPU-only" in result["msg"]
    assert call(parameters(box))["failed"]
    assert "no directory ''" in call(parameters(box, "main", site_packages=""))["msg"]
    assert "Traceback" not in json.dumps(result)


@pytest.mark.parametrize("missing", ["environment", "distribution", "patches"])
def test_module_in_check_mode_on_a_bare_box(box: Box, call: Call, missing: str) -> None:
    arguments = parameters(box, "main", _ansible_check_mode=True)
    if missing == "environment":
        arguments["site_packages"] = ""
        awaited = ["the environment"]
    elif missing == "distribution":
        (box.site / "Demo_Plugin-0.0.5.dist-info/METADATA").unlink()
        awaited = ["demo-plugin 0.0.5"]
    else:
        arguments["series"][0]["path"] = "/nonexistent"
        awaited = ["main/0001-edit.patch", "main/0002-edit.patch"]
    result = call(arguments)
    assert not result.get("failed")
    assert result["changed"]
    assert result["awaited"] == awaited
    assert call({**arguments, "_ansible_check_mode": False})["failed"]


def test_module_through_ansible(box: Box) -> None:
    """The module as a controller ships it, with check and diff mode."""
    environment = {
        **os.environ,
        "ANSIBLE_LIBRARY": str(ROOT / "plugins/modules"),
        "ANSIBLE_MODULE_UTILS": str(ROOT / "plugins/module_utils"),
        "ANSIBLE_LOCALHOST_WARNING": "false",
    }
    base = [str(Path(sys.executable).with_name("ansible")), "localhost", "-c", "local"]
    base += ["-i", "localhost,", "-m", "patch_series"]
    base += ["-a", json.dumps(parameters(box, "main", "cpu"))]
    base += ["-e", f"ansible_python_interpreter={sys.executable}"]

    def run(*options: str) -> str:
        return subprocess.run(
            [*base, *options], env=environment, capture_output=True, text=True, check=True
        ).stdout

    checked = run("--check", "--diff")
    assert "CHANGED" in checked
    assert "+VALUE_3 = 'three'" in checked
    assert box.files() == WHEEL
    assert "CHANGED" in run()
    assert box.files() == PATCHED | {"demo_plugin/adapter.py": CPU_1}
    assert "SUCCESS" in run("--check", "--diff")
