# SPDX-License-Identifier: Apache-2.0
"""Pages that are made from the code are as the code is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_variables_is_up_to_date() -> None:
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert specification is not None
    assert specification.loader is not None
    generate = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generate)
    assert generate.TARGET.read_text() == generate.render(), "run python docs/generate.py"
