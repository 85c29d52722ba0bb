# SPDX-License-Identifier: Apache-2.0
"""A copy of installed, patched Python sources with one patch of a series left out.

The product applies a series exactly (patch_series). A series with a hole cannot be applied exactly:
what follows the hole stands on other lines. So this applies hunks at any offset, as long as the old
text occurs once, and with no fuzz at all.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
Hunk = tuple[list[str], list[str]]


def parse(text: str) -> dict[str, list[Hunk] | None]:
    """Hunks (old lines, new lines) by path; files that the patch creates have one, with no old."""
    files: dict[str, list[Hunk]] = {}
    lines = text.splitlines(keepends=True)
    position = 0
    while position < len(lines):
        if lines[position].startswith("+++ b/"):
            hunks = files.setdefault(lines[position][len("+++ b/") :].strip(), [])
        elif match := _HUNK.match(lines[position]):
            left_old, left_new = int(match[1] or 1), int(match[2] or 1)
            old: list[str] = []
            new: list[str] = []
            while left_old or left_new:
                position += 1
                kind, line = lines[position][0], lines[position][1:]
                if kind in " -":
                    old.append(line)
                    left_old -= 1
                if kind in " +":
                    new.append(line)
                    left_new -= 1
            hunks.append((old, new))
        position += 1
    return files


def apply(root: Path, patch: Path, *, reverse: bool = False) -> None:
    """Apply or take back one patch below ``root``. Raises ValueError where it does not fit."""
    for name, hunks in parse(patch.read_text()).items():
        path = root / name
        content = path.read_text() if path.exists() else ""
        for old_lines, new_lines in hunks:
            old, new = "".join(old_lines), "".join(new_lines)
            if reverse:
                old, new = new, old
            if not old and content:
                raise ValueError(f"{patch.name}: {name} exists already")
            if old and content.count(old) != 1:
                raise ValueError(f"{patch.name}: a hunk of {name} fits {content.count(old)} times")
            content = content.replace(old, new) if old else new
        if content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        else:
            path.unlink()


def series(folder: Path) -> list[Path]:
    """The patches of a series in order."""
    patches = sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.patch"))
    if not patches:
        raise FileNotFoundError(f"no patches in {folder}")
    return patches


def _copy(site_packages: Path, package: str, target: Path) -> None:
    """The Python files of an installed package in a new folder ``target``."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(
        site_packages / package,
        target / package,
        ignore=shutil.ignore_patterns("*.so", "csrc", "__pycache__"),
    )


def package_before(site_packages: Path, package: str, patches: list[Path], target: Path) -> Path:
    """Copy ``package`` to ``target`` and take back ``patches``, the last ones that were applied."""
    _copy(site_packages, package, target)
    for patch in reversed(patches):
        apply(target, patch, reverse=True)
    return target


def package_without(
    site_packages: Path, package: str, stack: list[Path], left_out: Sequence[str], target: Path
) -> Path:
    """Copy the Python files of ``package`` to ``target`` and leave patches of ``stack`` out.

    ``left_out`` holds ``<series folder name>/<first four digits>``. Returns ``target``, which
    belongs in front of sys.path. Raises ValueError when the installed package does not hold the
    whole stack.
    """
    package_before(site_packages, package, stack, target)
    kept = [p for p in stack if f"{p.parent.name}/{p.name[:4]}" not in left_out]
    if len(kept) != len(stack) - len(left_out):
        raise ValueError(f"{left_out} are not patches of the stack")
    for patch in kept:
        apply(target, patch)
    return target


def files_without(site_packages: Path, patch: Path, target: Path) -> dict[str, str]:
    """Copies of the modules that ``patch`` changes, without it: module name to source file."""
    sources = {}
    for name in parse(patch.read_text()):
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site_packages / name, copy)
        sources[name.removesuffix(".py").replace("/", ".")] = str(copy)
    apply(target, patch, reverse=True)
    return sources
