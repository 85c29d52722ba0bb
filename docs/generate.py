# SPDX-License-Identifier: Apache-2.0
"""Writes docs/variables.md from the argument specs of the roles (`python docs/generate.py`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "plugins" / "module_utils"))

from gpubox.variables import role_options  # noqa: E402 - the path is set above

TARGET = ROOT / "docs" / "variables.md"


def phases() -> list[str]:
    """Roles in the order of the site."""
    plays = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text(encoding="utf-8"))
    return [entry["role"] for entry in plays[0]["roles"]]


def render() -> str:
    """The whole page."""
    lines = [
        "# Variables",
        "",
        "Made by `python docs/generate.py` from the argument specs of the roles; do not edit.",
        "A name with a role's prefix that is not in this list is refused.",
    ]
    options = role_options(ROOT / "roles")
    for role in phases():
        path = ROOT / "roles" / role / "meta" / "argument_specs.yml"
        main = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]["main"]
        lines += ["", f"## {role}", "", f"{main['short_description']}.", ""]
        lines += ["| variable | type | default | meaning |", "|---|---|---|---|"]
        for name, option in options[role].items():
            default = json.dumps(option["default"])
            lines.append(
                f"| `{name}` | {option['type']} | `{default}` | {option['description'].strip()} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
