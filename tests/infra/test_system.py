# SPDX-License-Identifier: Apache-2.0
"""The box as a whole."""

from __future__ import annotations

from typing import Any

import pytest


def test_no_unit_has_failed(host: Any) -> None:
    failed = host.check_output("systemctl --failed --no-legend --plain")
    assert failed == ""


def test_systemd_is_up(host: Any) -> None:
    assert host.run("systemctl is-system-running").stdout.strip() == "running"


@pytest.mark.bare
def test_what_was_not_asked_for_is_not_there(host: Any, bare: dict[str, Any]) -> None:
    assert [path for path in bare["absent"] if host.file(path).exists] == []
