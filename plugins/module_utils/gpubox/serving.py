# SPDX-License-Identifier: Apache-2.0
"""The command line of ``vllm serve``, from plain data and in a fixed order."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from .errors import GpuboxError


def render_flag(name: str, value: object) -> list[str]:
    """One option of ``vllm serve``.

    ``True`` is a bare flag, ``False`` and ``None`` leave the option out, mappings and lists become
    JSON with sorted keys, anything else its text.
    """
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False or value is None:
        return []
    if isinstance(value, Mapping | list):
        return [flag, json.dumps(value, sort_keys=True, separators=(",", ":"))]
    return [flag, str(value)]


def serve_arguments(model: str, *layers: Mapping[str, object]) -> list[str]:
    """Arguments after ``vllm serve``; later layers override earlier ones, names sorted.

    Raises:
        GpuboxError: an option name is not a lower-case word.
    """
    options: dict[str, object] = {}
    for layer in layers:
        for name, value in layer.items():
            key = name.replace("-", "_")
            if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
                raise GpuboxError(
                    f"option {name!r}", "a name such as max_model_len", "correct the name"
                )
            options[key] = value
    return [model, *(word for name in sorted(options) for word in render_flag(name, options[name]))]
