# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for commands of the host: programs on PATH that record how they were called."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest


class StandIn:
    """A program that answers by the first words of its arguments.

    ``answers`` maps a prefix of the arguments, joined by blanks, to exit status, stdout and stderr;
    the longest prefix that fits wins, and a call that none fits fails with 125. With the argument
    ``-`` it reads its input to the end, so that no program before it in a pipe is cut off.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.calls_file = folder / f"{name}.calls"
        self.answers_file = folder / f"{name}.answers"
        self.path = folder / name
        self.path.write_text(
            f"#!{sys.executable}\n"
            "import json, sys\n"
            f"with open({str(self.calls_file)!r}, 'a') as calls:\n"
            "    print(json.dumps(sys.argv[1:]), file=calls)\n"
            "if '-' in sys.argv: sys.stdin.buffer.read()\n"
            f"answers = json.load(open({str(self.answers_file)!r}))\n"
            "said = ' '.join(sys.argv[1:])\n"
            "fits = [key for key in answers if said.startswith(key)]\n"
            "code, out, err = answers[max(fits, key=len)] if fits else (125, '', 'no answer')\n"
            "sys.stdout.write(out); sys.stderr.write(err); sys.exit(code)\n",
            encoding="utf-8",
        )
        self.path.chmod(0o755)
        self.answer({})

    def answer(self, answers: dict[str, tuple[int, str, str]]) -> None:
        self.answers_file.write_text(json.dumps(answers), encoding="utf-8")

    def calls(self) -> list[list[str]]:
        if not self.calls_file.exists():
            return []
        return [json.loads(line) for line in self.calls_file.read_text("utf-8").splitlines()]


def on_path(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str, only: bool = False
) -> dict[str, StandIn]:
    """Stand-ins by name, first on PATH (or alone on it)."""
    folder /= "bin"
    folder.mkdir()
    rest = [] if only else [os.environ["PATH"]]
    monkeypatch.setenv("PATH", ":".join([str(folder), *rest]))
    return {name: StandIn(folder, name) for name in names}
