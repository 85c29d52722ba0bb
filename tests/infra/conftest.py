# SPDX-License-Identifier: Apache-2.0
"""One suite for containers and real boxes; GPUBOX_EXPECT names the file of what to expect.

GPUBOX_EXPECT=tests/infra/expect/demo.yml pytest tests/infra --hosts=podman://gpubox-demo
GPUBOX_EXPECT=my-box.yml pytest tests/infra --hosts=ssh://box --sudo
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

KINDS = ("model", "serving", "bare")


def pytest_configure(config: pytest.Config) -> None:
    for kind in KINDS:
        config.addinivalue_line("markers", f"{kind}: runs where the expectations have `{kind}`")


def expectations() -> dict[str, Any]:
    """The expectations of the box under test, without which nothing can be said about it."""
    path = os.environ.get("GPUBOX_EXPECT")
    if not path:
        raise pytest.UsageError("set GPUBOX_EXPECT to a file such as tests/infra/expect/demo.yml")
    found: dict[str, Any] = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    unknown = set(found) - set(KINDS)
    if unknown:
        raise pytest.UsageError(f"{path} expects {sorted(unknown)}; known are {KINDS}")
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, before anything runs, the tests of what this box is not expected to have."""
    found = expectations()
    kept, left = [], []
    for item in items:
        kinds = {mark.name for mark in item.iter_markers()} & set(KINDS)
        (kept if kinds <= set(found) else left).append(item)
    items[:] = kept
    if left:
        config.hook.pytest_deselected(items=left)


@pytest.fixture(scope="session")
def model() -> dict[str, Any]:
    return dict(expectations()["model"])


@pytest.fixture(scope="session")
def serving() -> dict[str, Any]:
    return dict(expectations()["serving"])


@pytest.fixture(scope="session")
def bare() -> dict[str, Any]:
    return dict(expectations()["bare"])
