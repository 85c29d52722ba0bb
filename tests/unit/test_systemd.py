# SPDX-License-Identifier: Apache-2.0
"""Quoting of unit values, against an independent reading of systemd.syntax(7)."""

from __future__ import annotations

import pytest
from gpubox.errors import GpuboxError
from gpubox.systemd import quote_assignment, quote_command
from hypothesis import given
from hypothesis import strategies as st

printable = st.text(
    alphabet=st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs"])
)


def unquote(word: str, *, command: bool) -> str:
    """What systemd makes of one quoted word: escapes, then specifiers, then ``$$``."""
    assert word[0] == word[-1] == '"'
    out, index, body = "", 0, word[1:-1]
    while index < len(body):
        two = body[index : index + 2]
        if two in ("\\\\", '\\"', "%%") or (command and two == "$$"):
            out += two[1]
            index += 2
        else:
            assert body[index] not in '\\"%', word
            assert not (command and body[index] == "$"), word
            out += body[index]
            index += 1
    return out


@given(printable)
def test_assignment_comes_back_as_it_was(value: str) -> None:
    assert unquote(quote_assignment("NAME", value), command=False) == f"NAME={value}"


@given(printable)
def test_argument_comes_back_as_it_was(value: str) -> None:
    line = quote_command(["/bin/true", value])
    assert unquote(line.removeprefix("/bin/true "), command=True) == value


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("95%done", '/bin/x "95%%done"'),
        ("$HOME", '/bin/x "$$HOME"'),
        ('{"method":"mtp"}', '/bin/x "{\\"method\\":\\"mtp\\"}"'),
        ("a b", '/bin/x "a b"'),
        ("", '/bin/x ""'),
    ],
)
def test_known_lines(value: str, line: str) -> None:
    assert quote_command(["/bin/x", value]) == line


@pytest.mark.parametrize("value", ["a\nb", "a\tb", "\x00", "\x7f"])
def test_control_characters_are_refused(value: str) -> None:
    with pytest.raises(GpuboxError, match="control character"):
        quote_assignment("NAME", value)


@pytest.mark.parametrize("command", [[], ["vllm"]])
def test_a_command_needs_an_absolute_path(command: list[str]) -> None:
    with pytest.raises(GpuboxError, match="absolute path"):
        quote_command(command)
