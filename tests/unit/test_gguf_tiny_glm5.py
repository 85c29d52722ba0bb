# SPDX-License-Identifier: Apache-2.0
"""The tiny GLM-5: its encoders, its truth to the architecture and its determinism."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from demo.tiny_glm5 import tokenizer
from demo.tiny_glm5.__main__ import main
from demo.tiny_glm5.kquants import quantize
from demo.tiny_glm5.model import Dimensions, tensors
from demo.tiny_glm5.weights import draw, standard
from demo.tiny_glm5.writer import write

ROOT = Path(__file__).resolve().parents[2]
Q4_K, Q5_K, Q6_K = (
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)
LEVELS = {Q4_K: 15, Q5_K: 31, Q6_K: 31}
SMALL = Dimensions(layers=2, heads=2, feed_forward=256, expert_feed_forward=256, experts=2)
TINY_HALF = 2.0**-24  # smallest float16 above 0


def error_bound(weights: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Largest error of each sub-block: half of its step.

    The step is the range over the levels, plus what rounding scales and minimums up can add: one
    unit of the super-block's scale each. A float16 unit is rounded up by at most 2**-10, and is at
    least 2**-24.
    """
    size = 16 if kind == Q6_K else 32
    sub_blocks = weights.astype(np.float64).reshape(-1, 256 // size, size)
    if kind == Q6_K:
        span, minimum_unit = np.abs(sub_blocks).max(-1), 0.0
    else:
        minimum = -np.minimum(sub_blocks.min(-1), 0)
        minimum_unit = minimum.max(-1, keepdims=True) / 63 * (1 + 2**-10) + TINY_HALF
        span = np.maximum(sub_blocks.max(-1) + minimum + minimum_unit, 0)
    scale = span / LEVELS[kind]
    unit = scale.max(-1, keepdims=True) / (127 if kind == Q6_K else 63)
    step = scale + unit * (1 + 2**-10) + TINY_HALF
    rounding = 1e-6 * (np.abs(sub_blocks).max(-1) + minimum_unit)  # float32 arithmetic
    return np.broadcast_to((step / 2 + rounding)[..., None], sub_blocks.shape).reshape(
        weights.shape
    )


@pytest.mark.parametrize("kind", [Q4_K, Q5_K, Q6_K])
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 300.0]),
    shift=st.sampled_from([0.0, -1.0, 1.0, 5.0]),
    sparse=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_encoders_keep_every_weight_within_half_a_step(
    kind: GGMLQuantizationType, seed: int, scale: float, shift: float, sparse: bool
) -> None:
    generator = np.random.default_rng(seed)
    weights = ((generator.standard_normal((3, 512)) + shift) * scale).astype(np.float32)
    if sparse:
        weights[generator.random(weights.shape) < 0.9] = 0
    decoded = gguf.quants.dequantize(quantize(weights, kind), kind)
    assert (np.abs(decoded - weights) <= error_bound(weights, kind)).all()


@pytest.mark.parametrize(("kind", "relative"), [(Q4_K, 0.085), (Q5_K, 0.042), (Q6_K, 0.021)])
def test_the_mean_error_of_normal_weights_is_that_of_the_bits(
    kind: GGMLQuantizationType, relative: float
) -> None:
    weights = standard(0, "probe", (64, 512))
    decoded = gguf.quants.dequantize(quantize(weights, kind), kind)
    assert np.sqrt(np.mean((decoded - weights) ** 2)) < relative


@pytest.mark.parametrize("kind", [Q4_K, Q5_K, Q6_K])
def test_exact_values_come_back_exactly(kind: GGMLQuantizationType) -> None:
    zeros = np.zeros((2, 256), dtype=np.float32)
    assert not gguf.quants.dequantize(quantize(zeros, kind), kind).any()
    ramp = np.tile(np.arange(16, dtype=np.float32), (1, 16)) * (63 if kind != Q6_K else 1)
    if kind == Q6_K:
        ramp = np.tile(np.arange(-31, 32, 62 // 15, dtype=np.float32)[:16], (1, 16)) * 127
    decoded = gguf.quants.dequantize(quantize(ramp, kind), kind)
    np.testing.assert_allclose(decoded, ramp, atol=error_bound(ramp, kind).max())


@pytest.mark.parametrize(
    "weights",
    [
        np.zeros((2, 255), dtype=np.float32),
        np.full((1, 256), np.nan, dtype=np.float32),
        np.full((1, 256), 1e30, dtype=np.float32),
    ],
)
def test_what_cannot_be_encoded_is_refused(weights: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"multiple|finite|large"):
        quantize(weights, Q4_K)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder)
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.gguf"))


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_names_and_types_are_those_of_the_architecture(model: Path) -> None:
    patterns = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GLM_DSA]}
    seen = {}
    for path in shards(model):
        for tensor in gguf.GGUFReader(path).tensors:
            layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else ""
            stem = tensor.name.rsplit(".", 1)[0].replace(f"blk.{layer}.", "blk.{bid}.")
            assert stem in patterns, tensor.name
            seen[tensor.name] = tensor
    dim = Dimensions()
    assert {tensor.tensor_type.name for tensor in seen.values()} == {
        "F32", "Q4_K", "Q5_K", "Q6_K", "Q8_0",
    }  # fmt: skip
    assert [int(n) for n in seen["blk.1.indexer.attn_q_b.weight"].shape] == [256, 32 * 128]
    assert [int(n) for n in seen["blk.0.attn_k_b.weight"].shape] == [192, 512, 8]
    assert [int(n) for n in seen["blk.2.ffn_down_exps.weight"].shape] == [512, 256, 8]
    assert "blk.0.ffn_up.weight" in seen
    assert "blk.1.ffn_up.weight" not in seen
    assert f"blk.{dim.layers}.nextn.eh_proj.weight" in seen
    assert f"blk.{dim.layers - 1}.nextn.eh_proj.weight" not in seen


def test_tensors_hold_the_drawn_weights(model: Path) -> None:
    """Also a guard of gguf-py's shapes: what is read back is the drawn array, dequantised."""
    read = {t.name: t for path in shards(model) for t in gguf.GGUFReader(path).tensors}
    for spec in tensors(Dimensions()):
        tensor = read[spec.name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(spec.shape)
        drawn = draw(0, spec)
        kind = spec.quantization_type
        limit = error_bound(drawn, kind) if kind in LEVELS else np.abs(drawn).max() / 200
        assert (np.abs(values - drawn) <= limit).all(), spec.name


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        write(tmp_path / name, seed=seed, dim=SMALL)
    first = contents(tmp_path / "first")
    assert contents(tmp_path / "again") == first
    other = contents(tmp_path / "other")
    assert {name for name in first if other[name] != first[name]} == {
        path.name for path in shards(tmp_path / "first")
    }


def test_a_second_run_touches_nothing_and_repairs_what_was_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    command = [sys.executable, "-m", "demo.tiny_glm5", str(folder)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(first.stdout.splitlines()) == 7
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == "unchanged\n"
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before

    damaged = shards(folder)[1]
    good = damaged.read_bytes()
    damaged.write_bytes(good[:1000])
    (folder / ".tiny-glm5.killed").mkdir()
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"written {damaged}\n"
    assert damaged.read_bytes() == good
    assert set(folder.iterdir()) == set(before)


def test_another_division_leaves_one_set(tmp_path: Path) -> None:
    write(tmp_path, shards=3, dim=SMALL)
    (tmp_path / "notes.gguf").write_bytes(b"mine")
    write(tmp_path, shards=2, dim=SMALL)
    names = [path.name for path in shards(tmp_path)]
    assert names == [
        "notes.gguf",
        "tiny-GLM-5-UD-Q4_K_XL-00001-of-00002.gguf",
        "tiny-GLM-5-UD-Q4_K_XL-00002-of-00002.gguf",
    ]


def test_impossible_divisions_are_refused(tmp_path: Path) -> None:
    for count, metadata_shard in ((60, False), (0, False), (1, True)):
        with pytest.raises(ValueError, match="shards"):
            write(tmp_path, shards=count, metadata_shard=metadata_shard)
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_is_one_and_agrees_with_the_gguf(model: Path) -> None:
    ours = Tokenizer.from_file(str(model / "tokenizer.json"))
    vocabulary = tokenizer.train(512)
    assert ours.get_vocab_size() == 512 == len(set(vocabulary.tokens))
    assert ours.get_vocab() == {token: index for index, token in enumerate(vocabulary.tokens)}
    text = "[gMASK]<sop><|user|>\nHello world, how är you?\t\0€\n<|assistant|>\n"
    encoded = ours.encode(text)
    assert ours.decode(encoded.ids, skip_special_tokens=False) == text
    assert len(encoded.ids) < len(text.encode()) - 35  # special tokens and merges are used
    fields = gguf.GGUFReader(shards(model)[0]).fields
    assert tuple(fields["tokenizer.ggml.tokens"].contents()) == vocabulary.tokens
    assert fields["tokenizer.ggml.eos_token_id"].contents() == vocabulary.id_of("<|endoftext|>")


def test_the_configuration_agrees_with_the_gguf(model: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    fields = gguf.GGUFReader(shards(model)[0]).fields

    def told(key: str) -> object:
        return fields[f"glm-dsa.{key}"].contents()

    assert config["hidden_size"] == told("embedding_length")
    assert config["num_hidden_layers"] + config["num_nextn_predict_layers"] == told("block_count")
    assert config["num_attention_heads"] == told("attention.head_count")
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == told("attention.key_length")
    assert config["qk_head_dim"] == told("attention.key_length_mla")
    assert config["v_head_dim"] == told("attention.value_length_mla")
    assert config["n_routed_experts"] == told("expert_count")
    assert config["num_experts_per_tok"] == told("expert_used_count")
    assert config["first_k_dense_replace"] == told("leading_dense_block_count")
    assert config["index_n_heads"] == told("attention.indexer.head_count")
    assert config["index_topk"] == told("attention.indexer.top_k")
    assert config["max_position_embeddings"] == told("context_length")
    assert config["vocab_size"] == told("vocab_size")
    assert config["eos_token_id"][0] == fields["tokenizer.ggml.eos_token_id"].contents()


def test_only_the_first_shard_holds_metadata(model: Path) -> None:
    first, *rest = (gguf.GGUFReader(path) for path in shards(model))
    split = ["split.no", "split.tensors.count", "split.count"]
    assert [key for key in first.fields if not key.startswith("GGUF.")][-3:] == split
    for index, reader in enumerate(rest, start=1):
        assert [key for key in reader.fields if not key.startswith("GGUF.")] == split
        assert reader.fields["split.no"].contents() == index
        assert reader.fields["split.count"].contents() == 3
        assert reader.fields["split.tensors.count"].contents() == len(tensors(Dimensions()))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0"])
def test_one_quantization_type_for_all_that_its_blocks_divide(name: str) -> None:
    wanted = GGMLQuantizationType[name]
    for mixed, spec in zip(tensors(SMALL), tensors(SMALL, wanted), strict=True):
        assert (mixed.name, mixed.shape, mixed.kind) == (spec.name, spec.shape, spec.kind)
        plain = mixed.quantization_type == GGMLQuantizationType.F32
        whole = spec.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
        assert spec.quantization_type == (
            wanted if whole and not plain else mixed.quantization_type
        )


def test_a_large_tensor_repeats_the_rows_that_were_drawn(tmp_path: Path) -> None:
    distinct = 64 * 256
    write(tmp_path / "whole", 1, dim=SMALL)
    write(tmp_path / "repeated", 1, dim=SMALL, distinct=distinct)
    models = [
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        for path in sorted(tmp_path.glob("*/*.gguf"))
    ]
    repeated, whole = models
    assert {name: tensor.data.shape for name, tensor in whole.items()} == {
        name: tensor.data.shape for name, tensor in repeated.items()
    }
    rows = repeated["output.weight"].data
    assert len(rows) == 512
    assert (rows[64:128] == rows[:64]).all()
    assert not (rows[1:64] == rows[:63]).all(axis=1).any()
    assert (rows[:64] == whole["output.weight"].data[:64]).all()
    assert (repeated["output_norm.weight"].data == whole["output_norm.weight"].data).all()
