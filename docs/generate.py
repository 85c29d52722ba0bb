# SPDX-License-Identifier: Apache-2.0
"""Writes the pages that are made from the code (`python docs/generate.py`)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "plugins" / "module_utils"))

from gpubox.variables import role_options  # noqa: E402 - the path is set above


def variables() -> str:
    """Every public variable, from the argument specs, in the order of the site."""
    lines = [
        "# Variables",
        "",
        "Made by `python docs/generate.py` from the argument specs of the roles; do not edit.",
        "A name with a role's prefix that is not in this list is refused.",
    ]
    plays = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text(encoding="utf-8"))
    options = role_options(ROOT / "roles")
    for role in [entry["role"] for entry in plays[0]["roles"]]:
        path = ROOT / "roles" / role / "meta" / "argument_specs.yml"
        main = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]
        lines += ["", f"## {role}", "", f"{main['short_description']}.", ""]
        lines += ["| variable | type | default | meaning |", "|---|---|---|---|"]
        for name, option in options[role].items():
            default = json.dumps(option["default"])
            meaning = re.sub(r"\bC\(([^)]*)\)", r"`\1`", option["description"].strip())
            lines.append(f"| `{name}` | {option['type']} | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def patches() -> str:
    """Every patch of every series, from series.yml."""
    lines = [
        "# Patch series",
        "",
        "Made by `python docs/generate.py` from `files/patches/*/series.yml`; do not edit.",
        "A series for `cpu` is refused on a box with an NVIDIA device.",
    ]
    for path in sorted((ROOT / "files" / "patches").glob("*/series.yml")):
        series = yaml.safe_load(path.read_text(encoding="utf-8"))
        name, version, device = series["distribution"], series["version"], series["device"]
        lines += ["", f"## {path.parent.name}", ""]
        lines += [f"{series['purpose'].strip()} Target: {name} {version}, device: {device}.", ""]
        lines += ["| patch | purpose | upstream | fails without it |", "|---|---|---|---|"]
        for patch in series["patches"]:
            lines.append(
                f"| `{patch['file']}` | {' '.join(patch['purpose'].split())} "
                f"| {patch['upstream']['status']} | `{patch['test']}` |"
            )
    return "\n".join(lines) + "\n"


PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "variables.md": variables,
    ROOT / "docs" / "patches.md": patches,
}


if __name__ == "__main__":
    for target, render in PAGES.items():
        target.write_text(render(), encoding="utf-8")
