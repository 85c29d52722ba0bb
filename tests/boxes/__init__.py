# SPDX-License-Identifier: Apache-2.0
"""Recorded boxes: the texts of a box's tools and files, one file a box.

``python -m tests.boxes reference-8 DIRECTORY`` unpacks one, as the unit tests do. A box is text in
sections; each begins with a line of two dashes, and what comes before the first one is a comment or
``base: NAME``, the box that it differs from::

    -- file proc/meminfo --                        the lines that follow, below DIRECTORY/root
    -- values --                                   a path and its one-line content on each line
    -- links --                                    a path and where it points on each line
    -- command nvidia-smi topo -m --               what a command prints when its arguments begin so
    -- command dkms status exit 1 --               and its exit status
    -- gone proc/driver/nvidia --                  not there, though the base has it
    -- gone command nvidia-smi --

Commands become stand-ins in DIRECTORY/stand-ins, to be put first on PATH.
"""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

BOXES = Path(__file__).resolve().parent
_HEAD = re.compile(
    r"-- (?P<kind>file|values|links|command|gone)(?: (?P<rest>.*?))?(?: exit (?P<code>[0-9]+))? --"
)
# where the real tool lies that a stand-in hides from everybody but gpubox
_REAL = ("/usr/bin", "/usr/sbin")


@dataclass
class Box:
    """Files by path, and for each command its answers by the beginning of its arguments."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    commands: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)

    def gone(self, what: str) -> None:
        """Something of the base is not there."""
        if what.startswith("command "):
            del self.commands[what.removeprefix("command ")]
            return
        found = False
        for texts in (self.files, self.links):
            for path in [path for path in texts if f"{path}/".startswith(f"{what}/")]:
                found = True
                del texts[path]
        if not found:
            raise ValueError(f"{what} is not there to be gone")


def names() -> list[str]:
    """All recorded boxes."""
    return sorted(path.stem for path in BOXES.glob("*.box"))


def read(name: str) -> Box:
    """A box with what it takes from its base."""
    lines = (BOXES / f"{name}.box").read_text(encoding="utf-8").splitlines(keepends=True)
    heads = [(number, _HEAD.fullmatch(line.rstrip("\n"))) for number, line in enumerate(lines)]
    sections = [(number, match) for number, match in heads if match]
    bases = [line.partition(":")[2].strip() for line in lines if line.startswith("base:")]
    box = read(bases[0]) if bases else Box()
    ends = [number for number, _ in sections[1:]] + [len(lines)]
    for (number, match), end in zip(sections, ends, strict=True):
        body = lines[number + 1 : end]
        rest = match["rest"] or ""
        if match["kind"] == "file":
            box.files[rest] = "".join(body)
        elif match["kind"] == "values":
            for line in body:
                path, _, value = line.strip().partition(" ")
                box.files[path] = f"{value}\n" if value else ""
        elif match["kind"] == "links":
            box.links |= dict(line.split() for line in body)
        elif match["kind"] == "command":
            command, _, arguments = rest.partition(" ")
            answers = box.commands.setdefault(command, {})
            answers[arguments] = (int(match["code"] or 0), "".join(body))
        else:
            box.gone(rest)
    return box


def _stand_in(name: str, command: str, folder: Path, answers: list[tuple[str, int]]) -> str:
    lines = ["#!/bin/sh", f"# stand-in for {command}: what the recorded box {name} answers"]
    lines += ['case "$*" in']
    for number, (arguments, code) in enumerate(answers):
        answer = shlex.quote(str(folder / str(number)))
        lines.append(f"{shlex.quote(arguments)}*) /bin/cat {answer}; exit {code} ;;")
    return "\n".join([*lines, "esac", ""])


def unpack(name: str, directory: Path, real_behind: bool = False) -> tuple[Path, Path]:
    """Lay a box out, in the place of one that lies there.

    Args:
        name: of the box.
        directory: gets ``root`` and ``stand-ins``.
        real_behind: what the box has no answer for is asked of the real tool; else it fails.

    Returns:
        The root and the folder of the stand-ins.
    """
    root, stand_ins, answers = (directory / one for one in ("root", "stand-ins", "answers"))
    for old in (root, stand_ins, answers):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
    box = read(name)
    for path, text in box.files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    for path, to in box.links.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(to)
    for command, said in box.commands.items():
        folder = answers / command
        folder.mkdir()
        for number, (_, text) in enumerate(said.values()):
            (folder / str(number)).write_text(text, encoding="utf-8")
        script = _stand_in(name, command, folder, [(key, code) for key, (code, _) in said.items()])
        if real_behind:
            for place in _REAL:
                script += f'[ -x {place}/{command} ] && exec {place}/{command} "$@"\n'
        script += f'echo "stand-in for {command}: no recorded answer for: $*" >&2\nexit 64\n'
        (stand_ins / command).write_text(script, encoding="utf-8")
        (stand_ins / command).chmod(0o755)
    return root, stand_ins
