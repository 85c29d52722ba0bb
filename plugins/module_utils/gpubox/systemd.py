# SPDX-License-Identifier: Apache-2.0
"""Values and command lines of unit files, quoted so that systemd gives back what was put in.

Rules: systemd.syntax(7) "Quoting" and systemd.unit(5) "Specifiers"; ``$`` is expanded in command
lines only (systemd.service(5) "Command lines").
"""

from __future__ import annotations

from collections.abc import Iterable

from .errors import GpuboxError

_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%"}


def _quote(value: str, escapes: dict[str, str]) -> str:
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise GpuboxError(
            f"a control character in {value!r}",
            "a unit value of one line of printable text",
            "remove the line break or control character from the variable",
        )
    return '"' + "".join(escapes.get(character, character) for character in value) + '"'


def quote_assignment(name: str, value: object) -> str:
    """``NAME=value`` as one word for ``Environment=``."""
    return _quote(f"{name}={value}", _ESCAPES)


def quote_command(arguments: Iterable[object]) -> str:
    """A command line for ``ExecStart=``; each argument arrives as it is."""
    escapes = {**_ESCAPES, "$": "$$"}
    words = [str(argument) for argument in arguments]
    if not words or not words[0].startswith("/"):
        raise GpuboxError(
            f"command {words[:1]}", "a command that starts with an absolute path", "give the path"
        )
    return " ".join([words[0], *(_quote(word, escapes) for word in words[1:])])
