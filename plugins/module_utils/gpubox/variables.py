# SPDX-License-Identifier: Apache-2.0
"""The public variables of the roles, from their argument specs, and what is none of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


def role_options(roles: Path) -> dict[str, dict[str, Any]]:
    """Options of each role's main entry point, by role name."""
    found = {}
    for path in sorted(roles.glob("*/meta/argument_specs.yml")):
        specification = yaml.safe_load(path.read_text(encoding="utf-8"))
        found[path.parent.parent.name] = dict(
            specification["argument_specs"]["main"].get("options") or {}
        )
    return found


def unknown_variables(names: Iterable[str], options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence for each name that carries a role's prefix and is no variable of that role."""
    known = sorted(name for role in options.values() for name in role)
    prefixes = tuple(f"{role}_" for role in options)
    sentences = []
    for name in sorted(set(names)):
        if not name.startswith(prefixes) or name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]}?" if close else ""
        sentences.append(f"{name} is no variable of any role{hint}")
    return sentences
