# SPDX-License-Identifier: Apache-2.0
"""Pages that are made from the code are as the code is."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PAGES = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "generate.py"))["PAGES"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_generated_page_is_up_to_date(page: Path) -> None:
    assert page.read_text() == PAGES[page](), "run python docs/generate.py"
