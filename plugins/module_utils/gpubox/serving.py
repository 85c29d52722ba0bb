# SPDX-License-Identifier: Apache-2.0
"""The command line of ``vllm serve``, from plain data and in a fixed order."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from .errors import GpuboxError

# vLLM 0.33, entrypoints/common/cli_args.py: lists that are one JSON text, and one flag for each
# item; every other list has nargs="+" (engine/arg_utils.py, collection_to_kwargs)
JSON_LISTS = frozenset(["allowed_headers", "allowed_methods", "allowed_origins"])
REPEATED = frozenset(["middleware"])


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def render_flag(name: str, value: object) -> list[str]:
    """One option of ``vllm serve``.

    ``True`` is a bare flag, ``False``, ``None`` and an empty list leave the option out, mappings
    become JSON with sorted keys, anything else its text. The items of a list are words after one
    flag, but for the few lists that vLLM reads in another way.
    """
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    if value is False or value is None:
        return []
    key = name.replace("-", "_")
    if isinstance(value, Mapping) or (isinstance(value, list) and key in JSON_LISTS):
        return [flag, _json(value)]
    if isinstance(value, list):
        words = [_json(item) if isinstance(item, Mapping | list) else str(item) for item in value]
        if key in REPEATED:
            return [part for word in words for part in (flag, word)]
        return [flag, *words] if words else []
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
