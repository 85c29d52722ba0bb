# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from gpubox.errors import GpuboxError
from gpubox.gguf import read_header
from gpubox.model_facts import model_facts, read_config
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gguf_files import STRING, TYPE_F32, TYPE_Q4_K, TYPE_Q8_0, key_value, string

CONFIG = {
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "index_n_heads": 32,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 1,
    "hidden_size": 6144,
    "vocab_size": 154880,
}
# GLM-5's own sizes: dimensions as stored, the contiguous one first
EXPERTS = {
    "ffn_gate_exps": (6144, 2048, 256),
    "ffn_up_exps": (6144, 2048, 256),
    "ffn_down_exps": (2048, 6144, 256),
}
EXPERTS_BYTES = 3 * 6144 * 2048 * 256 * 144 // 256  # a layer, Q4_K


def sparse(path: Path, tensors: list[tuple[str, tuple[int, ...], tuple[int, int, int]]]) -> Path:
    """A file of the full size whose data was never written."""
    head = b"GGUF" + (3).to_bytes(4, "little") + len(tensors).to_bytes(8, "little")
    head += (1).to_bytes(8, "little") + key_value(("general.architecture", STRING, "glm-dsa"))
    offset = 0
    for name, dimensions, (number, block, size) in tensors:
        head += string(name) + len(dimensions).to_bytes(4, "little")
        head += b"".join(dimension.to_bytes(8, "little") for dimension in dimensions)
        head += number.to_bytes(4, "little") + offset.to_bytes(8, "little")
        elements = 1
        for dimension in dimensions:
            elements *= dimension
        offset += -(-elements // block * size // 32) * 32
    path.write_bytes(head + bytes(-len(head) % 32))
    os.truncate(path, path.stat().st_size + offset)
    return path


def test_sums_of_a_file_of_the_real_size(tmp_path: Path) -> None:
    tensors = [
        (f"blk.{layer}.{name}.weight", dimensions, TYPE_Q4_K)
        for layer in range(3, 79)
        for name, dimensions in EXPERTS.items()
    ]
    tensors += [
        ("blk.0.attn_k_b.weight", (192, 512, 64), TYPE_Q8_0),
        ("blk.0.indexer.attn_q_b.weight", (2048, 4096), TYPE_Q8_0),
        ("blk.0.attn_norm.weight", (6144,), TYPE_F32),
        ("token_embd.weight", (6144, 64), TYPE_Q8_0),
        ("output.weight", (6144, 32), TYPE_Q8_0),
        ("blk.78.nextn.embed_tokens.weight", (6144, 96), TYPE_Q8_0),
        ("blk.78.nextn.eh_proj.weight", (12288, 6144), TYPE_Q8_0),
    ]
    header = read_header(sparse(tmp_path / "m.gguf", tensors))
    facts = model_facts(CONFIG, [header])
    row = 6144 // 32 * 34
    small = (192 * 512 * 64 + 2048 * 4096 + 12288 * 6144) // 32 * 34 + (64 + 32 + 96) * row
    assert facts["architecture"] == "glm-dsa"
    assert facts["tensor_bytes"] == 76 * EXPERTS_BYTES + small + 6144 * 4
    assert facts["quantization_types"] == {
        "F32": 6144 * 4,
        "Q4_K": 76 * EXPERTS_BYTES,
        "Q8_0": small,
    }
    assert facts["weights"] == {
        # attn_k_b takes two bytes an element once it is loaded
        "divided": 75 * EXPERTS_BYTES + 192 * 512 * 64 * 2 + (64 + 32) * row,
        "replicated": 2048 * 4096 // 32 * 34 + 6144 * 4,
        "mtp_divided": EXPERTS_BYTES + 96 * row,
        "mtp_replicated": 12288 * 6144 * 2,
        "routed": 75 * EXPERTS_BYTES,
        "mtp_routed": EXPERTS_BYTES,
        "embedding": 64 * row,
        "mtp_embedding": 96 * row,
        "head": 32 * row,
    }
    assert facts["expert_layers"] == 75  # without that of MTP
    assert facts["row_parallel"] == [[2048, 256]]


def test_sizes_come_from_the_configuration() -> None:
    facts = model_facts(CONFIG | {"n_routed_experts": "256"}, [])
    assert (facts["layers"], facts["heads"], facts["index_heads"]) == (78, 64, 32)
    assert facts["mtp_layers"] == 1
    assert facts["experts"] is None  # text is no number
    assert facts["hidden_size"] == 6144
    assert "vocab_size" not in facts["config"]


def test_nothing_known_is_none_and_not_zero() -> None:
    facts = model_facts(None, [])
    assert facts["tensor_bytes"] is None
    assert facts["weights"] is None
    assert facts["mtp_layers"] is None
    assert facts["layers"] is None


def read(folder: Path, content: bytes) -> tuple[dict[str, Any] | None, GpuboxError | None]:
    (folder / "config.json").write_bytes(content)
    return read_config(folder / "none", folder)


def test_the_first_config_json_counts(tmp_path: Path) -> None:
    assert read_config(tmp_path) == (None, None)
    assert read(tmp_path, b'{"num_hidden_layers": 3}') == ({"num_hidden_layers": 3}, None)
    later = tmp_path / "later"
    later.mkdir()
    (later / "config.json").write_text("{}")
    (tmp_path / "config.json").write_text("[")
    assert read_config(tmp_path, later)[0] is None
    assert read_config(later, tmp_path) == ({}, None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no JSON"),
        (b'{"num_hidden_layers": 78', "no JSON"),
        (b"\xef\xbb\xbf{}", "no JSON"),
        (b"\xff\xfe{\x00}\x00", "no JSON in UTF-8"),
        (b"[]", "a JSON list"),
        (b"null", "a JSON NoneType"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"9" * 10_000, "no JSON"),
    ],
)
def test_a_config_json_that_is_there_and_unusable_is_a_fault(
    tmp_path: Path, content: bytes, said: str
) -> None:
    config, fault = read(tmp_path, content)
    assert config is None
    assert fault is not None
    assert said in fault.measured
    assert str(tmp_path / "config.json") in fault.measured


def test_a_folder_of_that_name_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert "directory" in str(read_config(tmp_path)[1])


@given(st.binary(max_size=200))
def test_no_content_breaks_it(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config, fault = read(Path(folder), content)
    assert (config is None) != (fault is None)
