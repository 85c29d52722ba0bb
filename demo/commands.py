# SPDX-License-Identifier: Apache-2.0
"""Commands of the host: Ctrl-C ends them in order, errors carry their last lines."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE = 15.0  # seconds a command gets to end after it was interrupted


@dataclass(frozen=True)
class Outcome:
    """Exit status and what a command printed (stdout and stderr apart)."""

    code: int
    output: str
    errors: str

    def tail(self, lines: int = 12) -> str:
        """Last lines of what it said, for an error message."""
        text = "\n".join(part for part in (self.output.strip(), self.errors.strip()) if part)
        return "\n".join(text.splitlines()[-lines:])


def _end(child: subprocess.Popen[str]) -> None:
    """End a child that may already be ending because it shares the terminal's Ctrl-C."""
    for number, patience in ((signal.SIGINT, 1.0), (signal.SIGTERM, GRACE)):
        try:
            child.wait(patience)
            return
        except subprocess.TimeoutExpired:
            child.send_signal(number)
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    cwd: Path | None = None,
) -> Outcome:
    """Run a command to its end and keep what it prints.

    Raises:
        FileNotFoundError: there is no such command.
    """
    with subprocess.Popen(
        argv,
        env={**os.environ, **(env or {})},
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=cwd,
    ) as child:
        try:
            output, errors = child.communicate(stdin)
        except BaseException:
            _end(child)
            raise
    return Outcome(child.returncode, output, errors)


def pipe(
    source: Sequence[str],
    sink: Sequence[str],
    *,
    source_env: Mapping[str, str],
    sink_env: Mapping[str, str],
) -> tuple[Outcome, Outcome]:
    """Run ``source | sink``; the outcomes of both, the source's output having gone to the sink."""
    with (
        subprocess.Popen(
            source,
            env={**os.environ, **source_env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as first,
        subprocess.Popen(
            sink,
            env={**os.environ, **sink_env},
            stdin=first.stdout,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as second,
    ):
        assert first.stdout is not None and first.stderr is not None  # noqa: S101, PT018 - PIPEs
        first.stdout.close()  # the sink holds it now: a dead sink must end the source
        try:
            source_errors = first.stderr.read().decode(errors="replace")
            output, errors = second.communicate()
            first.wait()
        except BaseException:
            first.terminate()
            second.terminate()
            raise
    return Outcome(first.returncode, "", source_errors), Outcome(second.returncode, output, errors)


def stream(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    log: Path,
    show: Callable[[str], None],
) -> int:
    """Run a command, each line to ``show`` and to the file ``log``; its exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w", encoding="utf-8") as record,
        subprocess.Popen(
            argv,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            cwd=cwd,
        ) as child,
    ):
        assert child.stdout is not None  # noqa: S101 - PIPE above
        try:
            for line in child.stdout:
                record.write(line)
                record.flush()
                show(line.rstrip("\n"))
            child.wait()
        except BaseException:
            _end(child)
            raise
    return child.returncode
