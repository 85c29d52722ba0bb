# SPDX-License-Identifier: Apache-2.0
"""The stacks of the repository, read as the plan reads them."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from gpubox.errors import GpuboxError
from gpubox.stack import known_stacks, load_stack

ROOT = Path(__file__).resolve().parents[2]
PLAIN = {"F32", "F16"}  # gguf-py reads these as they are


@pytest.mark.parametrize("name", known_stacks(ROOT))
def test_every_stack_loads_and_reads_what_glm5_files_are_made_of(name: str) -> None:
    types = load_stack(name, ROOT)["quantization_types"]
    assert len(types) == len(set(types))
    assert {"F32", "Q4_K", "Q5_K", "Q6_K", "Q8_0"} <= set(types)
    assert not {"MXFP4", "NVFP4", "TQ1_0", "Q8_K"} & set(types)


def test_the_cpu_stack_names_what_its_dequantizer_has() -> None:
    for name in set(load_stack("glm5-cpu", ROOT)["quantization_types"]) - PLAIN:
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        assert gguf.dequantize(np.zeros((1, size), dtype=np.uint8), kind).shape == (1, block)


@pytest.mark.parametrize("types", ["[Q4_K, Q4_KM]", "[]"])
def test_types_that_ggml_has_not_are_refused(tmp_path: Path, types: str) -> None:
    shutil.copytree(ROOT / "stacks", tmp_path / "stacks")
    path = tmp_path / "stacks" / "glm5-cpu.yml"
    text = path.read_text()
    start = text.index("quantization_types:")
    path.write_text(f"{text[:start]}quantization_types: {types}\n{text[text.index('driver:') :]}")
    with pytest.raises(GpuboxError, match="quantization_types"):
        load_stack("glm5-cpu", tmp_path)
