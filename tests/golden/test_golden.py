# SPDX-License-Identifier: Apache-2.0
"""The cases of run.py, one pytest test each.

Runs where the provisioned environment is, with any pytest; not part of `pytest tests/unit`:

    GOLDEN_PYTHON=/opt/gpubox/current/venv/bin/python \
    GOLDEN_MODEL=/srv/models/glm5/merged.gguf \
    GOLDEN_SHARDS=/srv/models/glm5/model-00001-of-00003.gguf pytest tests/golden

Optional: GOLDEN_PATCHES (folder of the series, by default this repository's), GOLDEN_TOLERANCE, and
for a running server GOLDEN_SERVER (base URL) and GOLDEN_NAME (model name, by default glm-5).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, TOLERANCE, Case
from run import Golden, Settings

pytestmark = pytest.mark.skipif(
    "GOLDEN_PYTHON" not in os.environ or "GOLDEN_MODEL" not in os.environ,
    reason="needs a provisioned environment and a model: set GOLDEN_PYTHON and GOLDEN_MODEL",
)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """One import of vLLM for all cases."""
    shards = os.environ.get("GOLDEN_SHARDS")
    settings = Settings(
        python=Path(os.environ["GOLDEN_PYTHON"]),
        model=Path(os.environ["GOLDEN_MODEL"]),
        shards=Path(shards) if shards else None,
        patches=Path(os.environ.get("GOLDEN_PATCHES", Path(__file__).parents[2] / "files/patches")),
        tolerance=float(os.environ.get("GOLDEN_TOLERANCE", TOLERANCE)),
    )
    with Golden(settings, tmp_path_factory.mktemp("golden")) as running:
        yield running


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(golden: Golden, case: Case) -> None:
    outcome = golden.run(case)
    assert outcome.passed, f"{case.about}: {outcome.measured} (logs in {golden.work})"


@pytest.mark.skipif("GOLDEN_SERVER" not in os.environ, reason="set GOLDEN_SERVER to a base URL")
def test_server(golden: Golden) -> None:
    outcome = golden.server(os.environ["GOLDEN_SERVER"], os.environ.get("GOLDEN_NAME", "glm-5"))
    assert outcome.passed, outcome.measured
