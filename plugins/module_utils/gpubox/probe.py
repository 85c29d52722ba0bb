# SPDX-License-Identifier: Apache-2.0
"""Asking a box: commands and files, whose failure is an answer too.

A fact is a value or *unknown* with the reason; no answer is never taken for "none" (field report
A3).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND_SECONDS = 30
# ECMA-48 and ECMA-35: control sequences, choices of a character set, single escapes
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[ -/]+[0-~]|[@-Z\\-_])")


def strip_ansi(text: str) -> str:
    """The text without terminal control sequences."""
    return _ANSI.sub("", text)


@dataclass(frozen=True)
class Output:
    """What a command printed; ``fault`` says why there is nothing to read."""

    stdout: str = ""
    stderr: str = ""
    code: int = 0
    fault: str | None = None


Run = Callable[[Sequence[str]], Output]


def run_command(command: Sequence[str]) -> Output:
    """Run a command of PATH in the C locale; whatever goes wrong is a fault in the answer."""
    environment = {**os.environ, "LC_ALL": "C", "LANGUAGE": "C"}
    try:
        done = subprocess.run(
            list(command),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        return Output(fault=f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return Output(fault=f"{command[0]} did not answer within {COMMAND_SECONDS} s")
    except OSError as error:
        return Output(fault=f"{command[0]} cannot be run: {error.strerror or error}")
    return Output(done.stdout, done.stderr, done.returncode)


@dataclass(frozen=True)
class Fact:
    """A value, or the reason why there is none; and where it comes from."""

    value: Any
    unknown: str | None
    source: str


def known(value: Any, source: str) -> Fact:
    """A fact that was measured."""
    return Fact(value, None, source)


def unknown(reason: str, source: str) -> Fact:
    """A fact that could not be measured."""
    return Fact(None, reason, source)


def tail(output: Output) -> str:
    """The last words of a command that gave no answer."""
    if output.fault:
        return output.fault
    lines = [line.strip() for line in strip_ansi(output.stdout + "\n" + output.stderr).splitlines()]
    words = "; ".join([line for line in lines if line][-3:])
    return (words or "no output") + (f" (exit status {output.code})" if output.code else "")


def read_text(path: Path) -> tuple[str | None, str]:
    """Content of a file, or None and the reason."""
    try:
        return path.read_text(encoding="utf-8", errors="replace"), ""
    except OSError as error:
        return None, f"{path}: {error.strerror or error}"
    except ValueError as error:  # a path with a byte that no path can have
        return None, f"{path!r}: {error}"
