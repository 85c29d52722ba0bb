# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpubox.errors import GpuboxError

from demo import ROOT, commands, lock, model, report, site
from demo.__main__ import main
from demo.console import Console, elapsed
from demo.engine import Podman
from tests.unit.demo_stand_ins import on_path
from tests.unit.timing import AT_ONCE

OUTPUT = """\
PLAY [Take the box from bare to a served GLM-5] ****
TASK [validate : Ansible is new enough] ****

PLAY RECAP *********************************************************************
gpubox-demo                : ok=61   changed=24   unreachable=0    failed=0    skipped=9
other                      : ok=1    changed=0    unreachable=1    failed=0    skipped=0
"""


def test_the_recap_is_that_of_the_host() -> None:
    assert site.recap(OUTPUT, "gpubox-demo") == site.Recap(61, 24, 0, 0)
    assert site.recap(OUTPUT, "other") == site.Recap(1, 0, 1, 0)
    assert site.recap(OUTPUT, "gpubox") is None


def test_the_recap_is_read_through_colours() -> None:
    line = "\x1b[0;33mgpubox-demo\x1b[0m : \x1b[0;32mok=3   \x1b[0m \x1b[0;33mchanged=1   \x1b[0m"
    assert site.recap(f"{line} unreachable=0    failed=0\n", "gpubox-demo") == site.Recap(
        3, 1, 0, 0
    )


def test_ages_are_read_as_a_person_reads_them() -> None:
    assert (elapsed(3.14), elapsed(59.9), elapsed(125)) == ("3.1 s", "59.9 s", "2 min 05 s")


def test_a_long_step_gives_signs_of_life(capsys: pytest.CaptureFixture[str]) -> None:
    with Console(interval=0.05).step("the long one"):
        time.sleep(0.2)
    text = capsys.readouterr().out
    assert text.startswith("==> the long one\n")
    assert "… the long one: 0.1 s so far" in text
    assert "done in 0.2 s" in text


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    with (
        lock.alone(tmp_path / "demo.lock", "another run"),
        pytest.raises(GpuboxError, match=f"another run is already running \\(PID {os.getpid()}\\)"),
        lock.alone(tmp_path / "demo.lock", "another run"),
    ):
        pytest.fail("held twice")
    with lock.alone(tmp_path / "demo.lock", "another run"):
        pass  # free again


def test_a_status_while_the_demo_is_made_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpubox/demo.lock"
    on_path(monkeypatch, tmp_path, "podman")["podman"].answer({"version": (0, "4.3.1\n", "")})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DEMO_SUITE", raising=False)
    assert lock.holder(path) is None
    with lock.alone(path, "another run"):
        assert main(["status"]) == 0
        assert f"is at work (PID {os.getpid()})" in capsys.readouterr().out
    assert lock.holder(path) is None  # the file stays, and nobody holds it


def test_errors_have_three_parts_and_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_path(monkeypatch, tmp_path, only=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DEMO_SUITE", raising=False)
    assert main(["up"]) == 1
    said = capsys.readouterr().err
    assert "measured: there is no podman on PATH\nwanted: podman 4.3 or newer\ndo: run" in said


SLOW_PODMAN = """\
#!/bin/sh
# stand-in for podman that never ends its work, and says when it was interrupted
case "$1" in
  version) echo 4.3.1 ;;
  image) exit 125 ;;
  *) trap 'echo interrupted >> {log}; exit 130' INT TERM; touch {log}; sleep 60 & wait ;;
esac
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_what_runs_and_says_where_it_stopped(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    podman = tmp_path / "podman"
    podman.write_text(SLOW_PODMAN.format(log=log))
    podman.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "demo", "up"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        deadline = time.monotonic() + AT_ONCE
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert log.exists(), "the stand-in was never reached"
        run.send_signal(number)
        _, errors = run.communicate(timeout=AT_ONCE)
    assert run.returncode == 130
    assert "in: looking for docker.io/library/debian:bookworm-slim" in errors
    assert "run it again, it continues from there" in errors
    assert "Traceback" not in errors
    assert log.read_text() == "interrupted\n"


@pytest.mark.parametrize("command", ["status", "down"])
def test_only_a_status_ends_quietly_when_nobody_reads_on(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    podman = on_path(monkeypatch, tmp_path, "podman")["podman"]
    podman.answer({"version": (0, "4.3.1\n", "")})
    ours, theirs = os.pipe()
    os.close(ours)  # as `head` does when it has its lines
    done = subprocess.run(
        [sys.executable, "-m", "demo", command],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    if command == "status":
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode != 0
        assert "BrokenPipeError" in done.stderr


def test_what_a_command_prints_is_shown_and_recorded(tmp_path: Path) -> None:
    shown: list[str] = []
    log = tmp_path / "logs/x.log"
    argv = ["sh", "-c", "echo one; echo two >&2; exit 3"]
    assert commands.stream(argv, env={}, cwd=tmp_path, log=log, show=shown.append) == 3
    assert shown == ["one", "two"]
    assert log.read_text() == "one\ntwo\n"


def test_a_failed_source_of_a_pipe_is_told_from_its_sink() -> None:
    first, second = commands.pipe(
        ["sh", "-c", "echo data; echo broken >&2; exit 4"], ["cat"], source_env={}, sink_env={}
    )
    assert (first.code, first.errors, second.code, second.output) == (4, "broken\n", 0, "data\n")


def test_the_model_is_copied_once_and_again_when_it_was_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "a-00001-of-00002.gguf").write_bytes(b"GGUF1")
    (source / model.SUMS).write_text(model.checksums(source))
    sums = (source / model.SUMS).read_text()
    assert sums.endswith("  a-00001-of-00002.gguf\n")
    podman = on_path(monkeypatch, tmp_path, "podman")["podman"]
    check = "exec box sh -c cd /srv/models/shards && sha256sum"
    works = {"exec": (0, "", ""), "cp": (0, "", "")}

    podman.answer({**works, "exec box cat": (0, sums, ""), check: (0, "", "")})
    assert model.put(Podman({}), "box", source) is False
    podman.answer({**works, "exec box cat": (0, sums, ""), check: (1, "a: FAILED", "")})
    assert model.put(Podman({}), "box", source) is True
    podman.answer({**works, "exec box cat": (1, "", "No such file")})
    assert model.put(Podman({}), "box", source) is True
    copies = [call for call in podman.calls() if call[0] == "cp"]
    # into a folder of another name, which only becomes the model when it is complete
    assert copies == [["cp", f"{source}/.", "box:/srv/models/shards.part"]] * 2


def test_a_missing_report_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    podman = on_path(monkeypatch, tmp_path, "podman")["podman"]
    podman.answer({"exec": (1, "", "cat: No such file or directory")})
    with pytest.raises(GpuboxError, match="No such file"):
        report.read(Podman({}), "gpubox-demo")


def test_the_summary_says_what_a_person_wants_to_know() -> None:
    found = {
        "address": "http://127.0.0.1:8000",
        "model": "glm-5",
        "prompt": "the quick brown fox",
        "text": " jumps",
        "tokens_per_second": 21.5,
        "time_to_first_token_seconds": 0.21,
        "unit": "vllm-glm5.service",
        "release": "0123456789abcdef",
    }
    text = report.summary(found, "gpubox-demo", 18001, "site.log")
    for part in (
        "http://127.0.0.1:18001/v1",
        "glm-5",
        "the quick brown fox",
        "' jumps'",
        "21.5 tokens/s",
        "journalctl -u vllm-glm5",
        "systemctl stop vllm-glm5",
        "make demo-down",
    ):
        assert part in text
