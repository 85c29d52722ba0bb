# SPDX-License-Identifier: Apache-2.0
"""Loads a module of plugins/modules as Ansible would, and runs it in this process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

MODULES = Path(__file__).resolve().parents[2] / "plugins" / "modules"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_module", MODULES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def run(
    name: str, arguments: dict[str, Any], capsys: pytest.CaptureFixture[str], failed: bool = False
) -> dict[str, Any]:
    """What the module answers."""
    with patch_module_args(arguments), pytest.raises(SystemExit) as ended:
        load(name).main()
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert ended.value.code == int(failed), answer
    return answer
