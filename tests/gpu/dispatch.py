# SPDX-License-Identifier: Apache-2.0
"""Which kernel the patched plugin calls, and whether the results fit together, without a GPU.

    python tests/gpu/dispatch.py [--patches files/patches]

Run it with the Python of a release's environment. No kernel runs: each is replaced by a product in
float32 that enforces the limits of the real one. With --patches every patch that is tested here is
also taken away, with those that follow it, and its checks must then fail; needed where the series
for a CPU is applied, which goes around the kernels and is taken away first. One line a check, and
exit status 1 when one did not end as it must.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

try:
    import gguf
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"{missing.name} is not installed in this environment: nothing was checked; "
        "wanted: the Python of a release, /opt/gpubox/environments/DIGEST/venv/bin/python"
    ) from missing

PLUGIN, PLUGIN_CPU = "vllm-gguf-plugin-0.0.5", "vllm-gguf-plugin-0.0.5-cpu"
Q8_0, Q4_K, Q5_K, Q6_K, IQ4_XS = 8, 12, 13, 14, 23
CALLS: list[str] = []
VECTOR_ROWS = {"limit": 65535}  # what the grid of the vector kernel holds
MODULES: dict[str, Any] = {}  # of the plugin, imported by use() after the fork


class Gpu(torch.Tensor):
    """A tensor in main memory that says it is on a GPU."""

    is_cuda = True


def gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a Gpu one."""
    return tensor.as_subclass(Gpu)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as an ordinary one."""
    return tensor.as_subclass(torch.Tensor)


# --- stand-ins for the kernels --------------------------------------------------------------------


def align(ids: torch.Tensor, block: int, experts: int) -> tuple[torch.Tensor, ...]:
    """moe_align_block_size: padded row numbers by expert, the expert of each block, their count."""
    flat, rows, of_block = ids.flatten().tolist(), [], []
    for expert in range(experts):
        mine = [i for i, chosen in enumerate(flat) if chosen == expert]
        mine += [len(flat)] * (-len(mine) % block)
        rows += mine
        of_block += [expert] * (len(mine) // block)
    parts = rows + [len(flat)] * block, [*of_block, 0], [len(rows)]
    return tuple(torch.tensor(part, dtype=torch.int32) for part in parts)


def multiply(x: torch.Tensor, w: torch.Tensor, quant_type: int) -> torch.Tensor:
    """``x @ w.T`` over the dequantised weights in float32."""
    raw = plain(w).contiguous().numpy()
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(quant_type))
    return plain(x).float() @ torch.from_numpy(values).T


def in_blocks(name: str, block: int, limit: int | None = None) -> Callable[..., torch.Tensor]:
    """A kernel over aligned blocks; ``limit``: the largest byte offset that its integers hold."""

    def kernel(  # the arguments of ggml_moe_a8
        x: torch.Tensor,
        w: torch.Tensor,
        rows: torch.Tensor,
        of_block: torch.Tensor,
        padded: torch.Tensor,
        quant_type: int,
        row: int,
        top_k: int,
        tokens: int,
    ) -> torch.Tensor:
        CALLS.append(name)
        out = torch.zeros(tokens * top_k, row)
        for number, expert in enumerate(of_block.tolist()):
            if expert < 0 or number * block >= int(padded):
                continue
            if limit is not None:
                assert expert * w.stride(0) <= limit, f"expert {expert} beyond the integers"
            mine = rows[number * block : (number + 1) * block]
            mine = mine[mine < tokens * top_k].long()
            out[mine] = multiply(plain(x)[mine // top_k], w[expert], quant_type)
        return gpu(out)

    return kernel


def each_row(
    x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, top_k: int, quant_type: int
) -> torch.Tensor:
    """Every routed row times its expert."""
    flat = ids.flatten()
    out = torch.zeros(flat.numel(), w.shape[1])
    for expert in flat.unique().tolist():
        mine = (flat == expert).nonzero().flatten()
        out[mine] = multiply(plain(x)[mine // top_k], w[expert], quant_type)
    return out


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to the norm of what is wanted."""
    return float((plain(got) - wanted).norm() / wanted.norm())


def vector(
    x: torch.Tensor,
    w: torch.Tensor,
    ids: torch.Tensor,
    top_k: int,
    quant_type: int,
    _row: int,
    tokens: int,
) -> torch.Tensor:
    """ggml_moe_a8_vec, whose grid has an end."""
    CALLS.append("vec")
    assert tokens * top_k <= VECTOR_ROWS["limit"], "more rows than a grid has"
    assert x.shape[0] == tokens
    assert ids.numel() == tokens * top_k
    return gpu(each_row(x, w, ids, top_k, quant_type))


def in_two_launches(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *types: int,
) -> torch.Tensor:
    """expert_decode: the whole layer."""
    CALLS.append("decode")
    tokens, top_k = ids.shape
    gate, up = each_row(x.float(), w1, ids, top_k, types[0]).chunk(2, -1)
    rows = each_row(torch.nn.functional.silu(gate) * up, w2, ids, 1, types[1])
    return gpu((rows.view(tokens, top_k, -1) * weights[..., None]).sum(1))


def linear_kernel(name: str) -> Callable[..., torch.Tensor]:
    """A kernel of a linear layer."""

    def kernel(w: torch.Tensor, x: torch.Tensor, quant_type: int, _row: int) -> torch.Tensor:
        CALLS.append(name)
        return multiply(x, w, quant_type)

    return kernel


def dequantise(
    w: torch.Tensor, quant_type: int, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """ggml_dequantize."""
    CALLS.append("dequantised")
    values = gguf.quants.dequantize(plain(w).numpy(), gguf.GGMLQuantizationType(quant_type))
    return gpu(torch.from_numpy(values).view(rows, columns).to(dtype))


def packed_experts(*arguments: Any, tile: Any, weights: torch.Tensor | None = None) -> torch.Tensor:
    """ggml_moe_packed, which multiplies with the weights of the routing, too."""
    rows = in_blocks("packed", tile.tokens)(*arguments)
    return rows if weights is None else gpu(plain(rows) * weights[:, None])


def use() -> None:
    """Import the plugin and put the stand-ins in the place of its kernels."""
    from vllm.model_executor.layers.fused_moe import fused_moe as vllm_fused_moe
    from vllm_gguf_plugin import ops
    from vllm_gguf_plugin.quantization import fused_moe, linear
    from vllm_gguf_plugin.triton.fused_moe import utils

    MODULES.update(ops=ops, moe=fused_moe, linear=linear, utils=utils)
    if importlib.util.find_spec("vllm_gguf_plugin.triton.fused_moe.expert_decode"):
        from vllm_gguf_plugin.triton.fused_moe import expert_decode

        MODULES["decode"] = expert_decode
        fused_moe.expert_decode = in_two_launches
    vllm_fused_moe.moe_align_block_size = align
    ops._cuda_kernel_available = ops._cuda_gemm_kernel_available = lambda *_: True
    ops.ggml_moe_get_block_size = lambda _: 4
    ops.ggml_dequantize = dequantise
    ops.moe_sum = lambda values, out: out.copy_(values.sum(dim=1))
    ops.ggml_mul_mat_vec_a8, ops.ggml_mul_mat_a8 = linear_kernel("vec"), linear_kernel("tiled")
    linear.ggml_mul_mat_tensor_cores = linear_kernel("tensor cores")
    if importlib.util.find_spec("vllm_gguf_plugin.triton.gemm.packed"):
        from vllm_gguf_plugin.triton.gemm import packed

        MODULES["packed"] = packed
        linear.ggml_mul_mat_packed = lambda w, x, kind: linear_kernel("packed")(w, x, kind, 0)
        fused_moe.ggml_moe_packed = packed_experts
    torch.ops._C_gguf.ggml_moe_a8 = in_blocks("tiled", 4)
    torch.ops._C_gguf.ggml_moe_a8_vec = vector

    def silu(_kind: object, out: torch.Tensor, values: torch.Tensor) -> None:
        gate, up = values.chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    fused_moe.apply_moe_activation = silu
    fused_moe.ggml_moe_large_batch = lambda *a, block_m: in_blocks("large", block_m)(*a)


# --- what goes in and must come out ---------------------------------------------------------------


def blocks(quant_type: int, *shape: int) -> torch.Tensor:
    """Random quantized blocks with scales of 2**-6."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(quant_type)]
    w = torch.randint(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=torch.uint8)
    for at in {Q4_K: (0, 2), Q5_K: (0, 2), Q6_K: (208,)}.get(quant_type, (0,)):
        w[..., at : at + 2] = torch.tensor([2**-6], dtype=torch.float16).view(torch.uint8)
    return w.reshape(*shape[:-1], -1)


def routing(tokens: int, experts: int, top_k: int = 2) -> torch.Tensor:
    """Distinct random experts for each token."""
    return torch.rand(tokens, experts).topk(top_k, 1).indices.to(torch.int32)


def layer(
    tokens: int,
    types: tuple[int, int] = (Q4_K, Q5_K),
    experts: int = 6,
    hidden: int = 256,
    inner: int = 256,
    dtype: torch.dtype = torch.float32,
    top_k: int = 2,
) -> list[str]:
    """Run the plugin's expert layer, compare its result, and return the kernels that it called."""
    x, ids, weights = (
        (torch.randn(tokens, hidden) / 16).to(dtype),
        routing(tokens, experts, top_k),
        torch.rand(tokens, top_k),
    )
    w1 = blocks(types[0], experts, 2 * inner, hidden)
    w2 = blocks(types[1], experts, hidden, inner)
    CALLS.clear()
    got = MODULES["moe"]._fused_moe_gguf(gpu(x), w1, w2, weights, ids, *types, "silu")
    gate, up = each_row(x, w1, ids, top_k, types[0]).chunk(2, -1)
    rows = each_row(torch.nn.functional.silu(gate) * up, w2, ids, 1, types[1])
    error = difference(got, (rows.view(tokens, top_k, hidden) * weights[..., None]).sum(1))
    assert error < (1e-5 if dtype == torch.float32 else 0.01), f"error {error}"
    return list(CALLS)


# --- the checks -----------------------------------------------------------------------------------


def experts_beyond_2_31_bytes_are_split() -> None:
    """The tiled kernel gets experts that its 32-bit offsets reach, and ids that it takes."""
    ops = MODULES["ops"]
    w, ids, x = blocks(Q4_K, 6, 32, 256), routing(40, 6), gpu(torch.randn(40, 256))
    arguments = (x, w, *align(ids, 4, 6), Q4_K, 32, 2, 40)
    whole = ops.ggml_moe_a8(*arguments)
    limit = 3 * w.stride(0) - 1  # offsets up to that of expert 2
    for name, value, reached in (
        ("_MOE_MAX_EXPERT_OFFSET", limit, limit),
        ("_MOE_MAX_EXPERTS", 4, 3 * w.stride(0)),  # the kernel skips ids above
    ):
        before = getattr(ops, name, None)
        setattr(ops, name, value)
        torch.ops._C_gguf.ggml_moe_a8 = in_blocks("tiled", 4, reached)
        CALLS.clear()
        assert torch.equal(ops.ggml_moe_a8(*arguments), whole)
        assert CALLS == ["tiled", "tiled"], CALLS
        setattr(ops, name, before)
    torch.ops._C_gguf.ggml_moe_a8 = in_blocks("tiled", 4)
    for rows, size, calls in ((4096, 3456, 2), (6144, 1408, 2), (512, 3456, 1), (6144, 176, 1)):
        stack = torch.empty_strided(
            (256, rows, size), (rows * size, size, 1), dtype=torch.uint8, device="meta"
        )
        limit = ops._moe_experts_per_call(stack)
        assert (limit - 1) * rows * size < 2**31, (rows, size, limit)
        assert -(-256 // limit) == calls, (rows, size, limit)


def triton_kernels_get_64_bit_expert_ids() -> None:
    """They multiply the id by the byte stride of an expert."""
    aligned = [gpu(part) for part in align(routing(40, 6), 4, 6)]
    prepared = MODULES["utils"]._validate_args(
        W=gpu(blocks(Q4_K, 6, 32, 256)),
        X=gpu(torch.randn(40, 256)),
        sorted_token_ids=aligned[0],
        expert_ids=aligned[1],
        num_tokens_post_padded=aligned[2],
        row=32,
        top_k=2,
        tokens=40,
        quant_type=Q4_K,
    )
    assert prepared[3].dtype == torch.int64, prepared[3].dtype
    assert torch.equal(plain(prepared[3]).int(), plain(aligned[1]))


def vector_grid_is_not_exceeded() -> None:
    """The vector kernel gets no more rows than its grid has."""
    ops = MODULES["ops"]
    w, ids = blocks(IQ4_XS, 6, 8, 256), routing(40, 6)
    usual = getattr(ops, "_MOE_VEC_MAX_ROWS", None)
    VECTOR_ROWS["limit"] = ops._MOE_VEC_MAX_ROWS = 25
    for x, top_k in ((torch.randn(40, 256), 2), (torch.randn(80, 256), 1)):
        got = ops.ggml_moe_a8_vec(gpu(x), w, ids, top_k, IQ4_XS, 8, x.shape[0])
        assert difference(got, each_row(x, w, ids, top_k, IQ4_XS)) < 1e-5
    VECTOR_ROWS["limit"] = ops._MOE_VEC_MAX_ROWS = 65535
    assert usual == 65535, usual
    CALLS.clear()
    ops.ggml_moe_a8_vec(gpu(torch.randn(40, 256)), w, ids, 2, IQ4_XS, 8, 40)
    assert CALLS == ["vec"], CALLS


def long_batches_go_to_the_tensor_cores() -> None:
    """Experts: from 256 tokens on, for the types that the kernel unpacks."""
    assert layer(256) == ["large", "large"], CALLS
    assert layer(255) == ["tiled", "tiled"], CALLS
    assert layer(256, types=(Q4_K, IQ4_XS))[-1] == "vec", CALLS
    block_m = MODULES["moe"].large_batch_block_m
    assert [block_m(tokens * 8, 256) for tokens in (256, 8192)] == [32, 128]


def goes_to(*cases: tuple[int, int, str]) -> None:
    """A linear layer of a type and so many tokens goes to a kernel, and its result comes back."""
    for quant_type, tokens, kernel in cases:
        w, x = blocks(quant_type, 8, 256), torch.randn(tokens, 256)
        CALLS.clear()
        got = MODULES["linear"]._fused_mul_mat_gguf(gpu(x), w, quant_type)
        assert torch.equal(got, multiply(x, w, quant_type))
        assert [kernel] == CALLS, (quant_type, tokens, CALLS)


def linear_layers_go_to_the_tensor_cores() -> None:
    """Linear layers: from 4 tokens on, for the types that are unpacked there."""
    goes_to(
        (Q4_K, 1, "vec"),
        (Q4_K, 3, "vec"),
        (Q4_K, 4, "tensor cores"),
        (Q6_K, 64, "tensor cores"),
        (Q8_0, 100, "tensor cores"),
        (IQ4_XS, 16, "vec"),
    )


def prompts_are_multiplied_with_dequantised_weights() -> None:
    """Linear layers: from a number of tokens on, whatever the type."""
    least = getattr(MODULES["linear"], "DEQUANTISE_MIN_TOKENS", 1024)
    goes_to(
        (Q4_K, least - 1, "tensor cores"),
        *((quant_type, least, "dequantised") for quant_type in (Q4_K, Q5_K, Q6_K, Q8_0, IQ4_XS)),
        (IQ4_XS, 17, "dequantised"),
    )
    module = MODULES["linear"]
    before, module.DEQUANTISE_MAX_VALUES = module.DEQUANTISE_MAX_VALUES, 8 * 256 - 1
    goes_to((Q4_K, least, "tensor cores"))
    module.DEQUANTISE_MAX_VALUES = before
    assert before < 1 << 31, "what kernels that dequantise count to"


def columns_are_shared_out_to_fill_the_card() -> None:
    """No column is left out or taken twice, and few programs go through long rows alone."""
    assert importlib.util.find_spec("vllm_gguf_plugin.triton.gemm.tensor_cores"), "no kernels"
    from vllm_gguf_plugin.triton.gemm import tensor_cores as kernels

    for tokens in (1, 4, 8, 9, 16, 17, 33, 64, 65, 512, 8192):
        tile = kernels.tile_for(tokens)
        for rows in (1, 64, 512, 576, 6144, 19360):
            for steps in (1, 2, 3, 4, 32, 96, 256):
                shares = kernels.shares_of(tile, tokens, rows, steps, 132)
                each = -(-steps // shares)
                assert (shares - 1) * each < steps <= shares * each, (tokens, rows, steps, shares)
                programs = -(-rows // tile.rows) * -(-tokens // tile.tokens)
                if each > kernels.MIN_STEPS:
                    assert 2 * shares * programs >= tile.programs * 132, (tokens, rows, steps)


def packed_kernels_are_taken_where_they_are_asked_for() -> None:
    """Types, sizes, tokens, and what VLLM_GGUF_PACKED says; columns are shared out once each."""
    assert "packed" in MODULES, "there are no such kernels"
    packed = MODULES["packed"]
    assert [packed.packed_setting(value) for value in (None, "", "0", "1", "2")] == [0, 0, 0, 1, 2]
    refused = ""
    try:
        packed.packed_setting("yes")
    except ValueError as error:
        refused = str(error)
    assert "wanted 0, 1 or 2" in refused, refused
    before = packed.SETTING
    for setting, quant_type, tokens, columns, kernel in (
        (0, Q4_K, 1, 256, "vec"),
        (1, Q4_K, 1, 256, "packed"),
        (1, Q5_K, 64, 512, "packed"),
        (1, Q8_0, 65, 256, "tensor cores"),
        (2, Q8_0, 65, 256, "packed"),
        (2, Q6_K, 4, 256, "tensor cores"),
        (2, Q8_0, 4, 320, "tensor cores"),  # not whole steps
    ):
        packed.SETTING = setting
        w, x = blocks(quant_type, 8, columns), torch.randn(tokens, columns).bfloat16()
        CALLS.clear()
        MODULES["linear"]._fused_mul_mat_gguf(gpu(x), w, quant_type)
        assert [kernel] == CALLS, (setting, quant_type, tokens, columns, CALLS)
    bf16 = {"dtype": torch.bfloat16}
    for setting, tokens, how, kernel in (
        (0, 300, bf16, "large"),
        (1, 300, bf16, "large"),
        (2, 300, bf16, "packed"),
        (2, 65, bf16, "packed"),
        (2, 300, {}, "large"),  # float32
        (2, 300, {**bf16, "types": (Q4_K, Q6_K)}, "large"),
    ):
        packed.SETTING = setting
        assert layer(tokens, **how) == [kernel, kernel], (setting, tokens, how, CALLS)
    # rows of activations that 32 bits do not count, and some that do not begin at a word
    many = torch.empty(1 << 17, 6144, device="meta", **bf16).as_subclass(Gpu)
    up, down = (blocks(Q4_K, 2, n, columns) for n, columns in ((4096, 256), (2, 2048)))
    for top_k, taken in ((7, True), (8, False)):
        assert packed.takes_packed_experts(many, up, down, Q4_K, Q4_K, top_k) == taken, top_k
    w, x = blocks(Q8_0, 8, 256), torch.randn(1 + 256).bfloat16()
    assert packed.takes_packed(gpu(x[:256].view(1, 256)), w, Q8_0)
    assert not packed.takes_packed(gpu(x[1:].view(1, 256)), w, Q8_0)
    packed.SETTING = before
    for tokens in (1, 8, 9, 17, 33, 64, 65, 8192):
        for steps in (1, 2, 3, 8, 24, 64):
            tile = packed.tile_for(tokens).of(steps)
            for rows in (1, 512, 6144, 154880):
                shares = packed.shares_of(tile, tokens, rows, steps, 132)
                turns = -(-steps // (tile.parts if tile.columns else 1))
                each = -(-turns // shares)
                assert (shares - 1) * each < turns <= shares * each, (tokens, rows, steps, shares)


def shards_are_multiplied_where_they_lie() -> None:
    """Those of a merged layer, of one type and of several; none is copied, whatever its size."""
    from vllm.model_executor import parameter
    from vllm_gguf_plugin import quantization
    from vllm_gguf_plugin.quantization import fused_mul_mat_gguf, params
    from vllm_gguf_plugin.quantization import linear as module

    parameter.get_tensor_model_parallel_rank = lambda: 0
    parameter.get_tensor_model_parallel_world_size = lambda: 1
    method = module.GGUFLinearMethod(None)
    for types_of in ((Q5_K, Q8_0), (Q6_K, Q4_K, Q8_0), (Q4_K, Q4_K), (Q8_0, Q8_0, Q8_0)):
        names: list[Any] = ["q", "k", "v"][: len(types_of)] if len(types_of) == 3 else [0, 1]
        shards = [blocks(kind, 3 + 2 * at, 256) for at, kind in enumerate(types_of)]
        qweight = params.GGUFWeightParameter(
            data=torch.empty(0, dtype=torch.uint8),
            weight_loader=lambda *_: None,
            input_dim=1,
            output_dim=0,
            tensor_shape=(sum(len(shard) for shard in shards), 256),
        )
        # loaded in another order than they are multiplied in
        order = list(reversed(range(len(shards))))
        qweight.data_container = [shards[at] for at in order]
        qweight.shard_id = [names[at] for at in order]
        qweight.shard_id_map = {names[at]: place for place, at in enumerate(order)}
        layer = torch.nn.Module()
        layer.register_parameter("qweight", qweight)
        kinds = dict(zip(names, types_of, strict=True))
        layer.qweight_type = types.SimpleNamespace(
            weight_type=types_of[0], shard_weight_type=kinds, num_elements=len(kinds)
        )
        method._create_padded_weight_param(layer)
        storage, taken = layer.qweight.untyped_storage().data_ptr(), []

        def product(
            x: torch.Tensor,
            w: torch.Tensor,
            kind: int,
            taken: list[int] = taken,
            begin: int = layer.qweight.data_ptr(),
            several: bool = len(set(types_of)) > 1,
        ) -> torch.Tensor:
            assert w.is_contiguous()
            assert not several or (w.data_ptr() - begin) % 256 == 0
            taken.append(w.untyped_storage().data_ptr())
            return multiply(x, w, kind)

        quantization.fused_mul_mat_gguf = product
        x = torch.randn(5, 256)
        got = method.apply(layer, x)
        quantization.fused_mul_mat_gguf = fused_mul_mat_gguf
        known = [multiply(x, w, kind) for w, kind in zip(shards, types_of, strict=True)]
        assert difference(got, torch.cat(known, 1)) < 1e-5, types_of
        assert set(taken) == {storage}, f"{types_of}: a shard was copied"
    layer = torch.nn.Module()
    layer.qweight = types.SimpleNamespace(shard_id=[0], data_container=[blocks(Q4_K, 4, 256)])
    layer.qweight_type = types.SimpleNamespace(num_elements=2)
    refused = ""
    try:
        method._create_padded_weight_param(layer)
    except ValueError as error:
        refused = str(error)
    assert "1 of 2 tensors were loaded" in refused, refused


def the_file_is_read_ahead() -> None:
    """What is in use and no more than allowed after it, of several ranks by each a share."""
    assert importlib.util.find_spec("vllm_gguf_plugin.read_ahead"), "nothing reads ahead"
    from vllm_gguf_plugin import read_ahead, weight_utils

    read_ahead._PIECE, read_ahead._AHEAD = 1000, 4000
    read_ahead.ReadAhead._cached = lambda *_: False
    usual, rank_of, threads = os.preadv, read_ahead._rank_of_ranks, threading.active_count()
    sizes = (300, 40_000, 8, 2_500)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for number, size in enumerate(sizes):
            writer.add_tensor(f"tensor.{number}", torch.zeros(size // 4).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        begins = [int(tensor.data_offset) for tensor in gguf.GGUFReader(path).tensors]
        whole = [  # bytes before it, where it begins, its size
            (sum(sizes[:number]) + start, begins[number] + start, min(1000, size - start))
            for number, size in enumerate(sizes)
            for start in range(0, size, 1000)
        ]
        for rank, ranks in ((0, 1), (0, 3), (1, 3), (2, 3)):
            reads: list[tuple[int, int]] = []

            def read(
                file: int,
                buffers: list[Any],
                at: int,
                *flags: int,
                reads: list[tuple[int, int]] = reads,
            ) -> int:
                reads.append((at, len(buffers[0])))
                return usual(file, buffers, at, *flags)

            read_ahead.os = types.SimpleNamespace(**{**vars(os), "preadv": read})
            read_ahead._rank_of_ranks = lambda rank=rank, ranks=ranks: (rank, ranks)
            used = 0
            weights = weight_utils.gguf_quant_weights_iterator_multi([path])
            for size, _ in zip(sizes, weights, strict=False):
                used += size
                wanted = [one[1:] for one in whole[rank::ranks] if one[0] < used + 4000]
                until = time.monotonic() + 10
                while len(reads) < len(wanted) and time.monotonic() < until:
                    time.sleep(0.002)
                time.sleep(0.01)
                assert sorted(reads) == wanted, (rank, ranks, used, len(reads), len(wanted))
            next(weights, None)
            assert threading.active_count() == threads, "a thread is left"
        read_ahead.os, read_ahead._rank_of_ranks = os, rank_of

        read_ahead._READERS = 0
        parts = list(zip(begins, sizes, strict=True))
        with read_ahead.ReadAhead(path, parts) as ahead:
            for size in sizes[:3]:  # as a rank that has none of these layers goes over them
                ahead.begin(size)
            assert ahead._take() == (begins[2], 8), "what the loader is done with is read"

        class Scarce(threading.Thread):
            """Of three threads the system gives two."""

            def start(self) -> None:
                """Fail as Python does."""
                if threading.active_count() == threads + 2:
                    raise RuntimeError("can't start new thread")
                super().start()

        read_ahead._READERS, read_ahead.threading.Thread = 3, Scarce
        with read_ahead.ReadAhead(path, parts) as ahead:
            assert len(ahead._threads) == 2
        read_ahead.threading.Thread = Scarce.__base__
        assert threading.active_count() == threads


def reading_ahead_ends_whatever_happens() -> None:
    """Nothing waits for ever and no thread dies, whoever ends it and whatever this Python lacks."""
    assert importlib.util.find_spec("vllm_gguf_plugin.read_ahead"), "nothing reads ahead"
    from vllm_gguf_plugin import read_ahead

    failed: list[Any] = []
    threading.excepthook = failed.append
    threads = threading.active_count()
    parts = [(0, 1 << 20)] * 4
    read_ahead._PIECE, read_ahead._AHEAD = 1 << 18, 1 << 20

    def ends(finish: Callable[[], Any], what: str, left: int = 0) -> None:
        """Let a thread finish, and wait for no more than `left` of its own."""
        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(10)
        until = time.monotonic() + 10
        while threading.active_count() > threads + left and time.monotonic() < until:
            time.sleep(0.002)
        assert not thread.is_alive(), f"{what}: waits for ever"
        assert threading.active_count() == threads + left, f"{what}: a thread is left"
        assert not failed, f"{what}: {failed[0].exc_value!r}"

    def without_flags(file: int, buffers: list[Any], at: int, *flags: int) -> int:
        if flags:
            raise NotImplementedError("preadv2")
        reads.append(at)
        return os.preadv(file, buffers, at)

    with tempfile.NamedTemporaryFile() as file:
        file.truncate(4 << 20)
        portable = {name: value for name, value in vars(os).items() if name != "RWF_NOWAIT"}
        for what, known in (
            ("preadv takes no flags", {**vars(os), "preadv": without_flags}),
            ("os has no RWF_NOWAIT", {**portable, "preadv": without_flags}),
        ):
            reads: list[int] = []
            read_ahead.os = types.SimpleNamespace(**known)
            ahead = read_ahead.ReadAhead(file.name, parts)
            until = time.monotonic() + 10
            while len(reads) < 4 and time.monotonic() < until:
                time.sleep(0.002)
            ends(ahead.__exit__, what)
            assert len(reads) >= 4, f"{what}: nothing is read ahead"
        read_ahead.os = os

        # The garbage collector ends the loader's generator in a thread that holds the lock.
        ahead = read_ahead.ReadAhead(file.name, parts)
        usual = ahead._pieces

        def collected() -> Any:
            for number, piece in enumerate(usual):
                if number == 2:
                    ahead.__exit__()
                yield piece

        with ahead._changed:
            ahead._pieces = collected()
        ends(lambda: ahead.begin(4 << 20), "ended by its own thread")

        # While Python shuts down a stopped thread may hold the lock.
        ahead = read_ahead.ReadAhead(file.name, [])
        while threading.active_count() > threads:
            time.sleep(0.002)
        held = threading.Event()
        holder = threading.Thread(
            target=lambda: (ahead._changed.acquire(), held.set(), time.sleep(3600)), daemon=True
        )
        holder.start()
        held.wait()
        read_ahead.sys = types.SimpleNamespace(is_finalizing=lambda: True)
        ends(ahead.__exit__, "ended while Python ends", left=1)


def short_batches_go_to_the_faster_kernel() -> None:
    """From how many tokens the tiled kernel is taken depends on the length of the rows."""
    for wanted, tokens, sizes in (
        (["vec", "vec"], 1, {}),
        (["tiled", "tiled"], 2, {}),
        (["vec", "tiled"], 2, {"hidden": 1024}),
        (["tiled", "tiled"], 4, {"hidden": 1024, "inner": 1024}),
        (["vec", "tiled"], 31, {"hidden": 2048, "experts": 3}),
        (["vec", "tiled"], 2, {"types": (IQ4_XS, Q5_K)}),
    ):
        assert layer(tokens, **sizes) == wanted, (tokens, sizes, CALLS)


def few_tokens_go_to_the_decode_kernels() -> None:
    """Types, sizes and activations that they take, and what VLLM_GGUF_EXPERT_DECODE says."""
    assert "decode" in MODULES, "there are no such kernels"
    decode = MODULES["decode"]
    faster = {Q4_K, Q5_K}
    for setting, wanted in (
        (None, faster),
        ("", faster),
        ("0", set()),
        ("1", faster),
        ("2", {Q4_K, Q5_K, Q6_K, Q8_0}),
    ):
        assert decode.taken_types(setting) == wanted, setting
    refused = ""
    try:
        decode.taken_types("yes")
    except ValueError as error:
        refused = str(error)
    assert "wanted 0, 1 or 2" in refused
    bf16 = {"dtype": torch.bfloat16}
    others = {**bf16, "types": (Q4_K, Q6_K)}
    before = decode.TAKEN_TYPES
    for setting, tokens, how, wanted in (
        ("0", 1, bf16, ["vec", "vec"]),
        ("0", 64, bf16, ["tiled", "tiled"]),
        ("1", 1, bf16, ["decode"]),
        ("1", 64, bf16, ["decode"]),
        ("1", 1, others, ["vec", "vec"]),
        ("2", 1, others, ["decode"]),
        ("2", 64, {**bf16, "types": (Q8_0, Q5_K)}, ["decode"]),
    ):
        decode.TAKEN_TYPES = decode.taken_types(setting)
        assert layer(tokens, **how) == wanted, (setting, tokens, how, CALLS)
    for tokens, how in (
        (65, bf16),  # too many tokens
        (4, {}),  # float32
        (4, {**bf16, "types": (Q4_K, IQ4_XS)}),
        (64, {**bf16, "experts": 16, "top_k": 9}),  # too many pairs of a token and an expert
    ):
        assert "decode" not in layer(tokens, **how), (tokens, how)
    decode.TAKEN_TYPES = before


class Late(TorchDispatchMode):
    """Makes asynchronous copies when an event is waited for, as late as a GPU may."""

    waiting: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Put off what is asynchronous."""
        if func is torch.ops.aten.copy_.default and args[2:] == (True,):
            self.waiting.append((args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


class LateEvent:
    """An event that makes the copies which were queued before it."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self) -> None:
        """What is queued now is what it stands for."""
        self.recorded = len(Late.waiting)

    def synchronize(self) -> None:
        """Make these copies; a place in the queue stays, and is empty."""
        for place, (target, source) in enumerate(Late.waiting[: self.recorded]):
            target.copy_(source)
            Late.waiting[place] = (target[:0], source[:0])


def main_memory(size: int) -> torch.Tensor:
    """Memory that is not pinned, in the place of that which is."""
    CALLS.append("pinned")
    return torch.empty(size, dtype=torch.uint8)


def large_copies_go_through_pinned_memory() -> None:
    """While a model is loaded; buffers are used again once they are free, not before."""
    from vllm_gguf_plugin import loader

    staging = sys.modules.get("vllm_gguf_plugin.staging")
    if staging is not None:
        vars(staging).update(_pinned=main_memory, _event=LateEvent)
    rows = torch.randint(0, 256, (3000, 40_000), dtype=torch.uint8)  # 120 MB, 7.5 buffers
    half = torch.randn(3000, 1000).bfloat16()
    sources = {
        "whole": rows,
        "slice of columns": rows[:, 8000:18_000],
        "slice of rows": rows[100:900],
        "experts": rows.view(6, 500, 40_000)[1:5],
        "rows longer than a buffer": rows.view(2, 60_000_000),
        "bfloat16": half,
        "small": rows[:2, :100],
        "another dtype": half,
    }
    for name, source in sources.items():
        dtype = torch.float32 if name == "another dtype" else source.dtype
        target = gpu(torch.zeros(source.shape, dtype=dtype))
        model = types.SimpleNamespace(load_weights=target.copy_)
        adapter = types.SimpleNamespace(prepare_weights=lambda weights: weights)
        loading = loader.GGUFModelLoader.__new__(loader.GGUFModelLoader)
        loading._prepare_adapter = lambda _config, adapter=adapter: adapter
        CALLS.clear()
        with Late():
            loading.load_weights(model, source)
        assert torch.equal(plain(target), source.to(dtype)), name
        staged = name not in ("small", "another dtype")
        assert bool(CALLS) == staged, (name, CALLS)
        assert len(CALLS) <= 4, (name, CALLS)


def the_attention_backend_is_there_to_be_chosen() -> None:
    """CUSTOM is this plugin's, unless it is another one's already; nothing takes it unasked."""
    import vllm_gguf_plugin
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    custom.clear_override()
    vllm_gguf_plugin.register()
    assert custom.is_overridden(), "CUSTOM is not registered"
    assert custom.get_path() == "vllm_gguf_plugin.attention.TritonSparseMLABackend"
    register_backend(custom, "another.Backend")
    vllm_gguf_plugin.register()
    assert custom.get_path() == "another.Backend"


CHECKS = {  # by the patch that fails without
    "0010": [experts_beyond_2_31_bytes_are_split, triton_kernels_get_64_bit_expert_ids],
    "0011": [vector_grid_is_not_exceeded],
    "0012": [long_batches_go_to_the_tensor_cores],
    "0013": [linear_layers_go_to_the_tensor_cores, columns_are_shared_out_to_fill_the_card],
    "0014": [short_batches_go_to_the_faster_kernel],
    "0018": [large_copies_go_through_pinned_memory],
    "0019": [few_tokens_go_to_the_decode_kernels],
    "0020": [the_attention_backend_is_there_to_be_chosen],
    "0021": [the_file_is_read_ahead, reading_ahead_ends_whatever_happens],
    "0022": [shards_are_multiplied_where_they_lie],
    "0023": [packed_kernels_are_taken_where_they_are_asked_for],
    "0024": [prompts_are_multiplied_with_dequantised_weights],
}


def run(checks: list[Callable[[], None]], must_fail: bool, label: str, folder: Path | None) -> int:
    """Run checks in a child with the plugin in ``folder`` (None: the installed one).

    Returns how many did not end as they must. A check that must fail fails by an assertion about
    what the plugin did, not in any other way.
    """
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        wrong = len(checks)
        try:
            if folder is not None:
                sys.path.insert(0, str(folder))
            use()
            torch.manual_seed(0)
            for check in checks:
                error = "passed"
                passed = False
                try:
                    check()
                    passed = True
                except AssertionError as fault:
                    error = f"AssertionError: {str(fault)[:100]}"
                    as_wanted = must_fail
                except Exception:
                    error = traceback.format_exc().strip().splitlines()[-1][:150]
                    as_wanted = False
                if passed:
                    as_wanted = not must_fail
                wrong -= as_wanted
                verdict = "PASS" if as_wanted else "FAIL"
                print(f"{verdict} {check.__name__:<40} {label}: {error}", flush=True)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(wrong)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return code if code >= 0 else len(checks)  # ended by a signal


def before(patches: Path, series: str, number: str, target: Path) -> Path:
    """A copy of the installed plugin without a patch and those that were applied after it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
    import overlay

    site = Path(sysconfig.get_path("purelib"))
    stack = overlay.series(patches / PLUGIN)
    if (site / "vllm_gguf_plugin/cpu.py").exists():
        stack += overlay.series(patches / PLUGIN_CPU)
    name = f"{series}/{number}"
    first = [f"{patch.parent.name}/{patch.name[:4]}" for patch in stack].index(name)
    return Path(overlay.package_before(site, "vllm_gguf_plugin", stack[first:], target))


def main() -> int:
    """Run the checks; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--patches", type=Path, help="files/patches: also without each patch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    import vllm.model_executor.layers.fused_moe.fused_moe  # noqa: F401 - once for all children

    on_cpu = (Path(sysconfig.get_path("purelib")) / "vllm_gguf_plugin/cpu.py").exists()
    if on_cpu and not arguments.patches:
        parser.error("the plugin has the series for a CPU: give --patches")
    with tempfile.TemporaryDirectory(prefix="dispatch-") as scratch:
        folder = None
        if on_cpu:
            folder = before(arguments.patches, PLUGIN_CPU, "0001", Path(scratch) / "cpu")
        every = [check for checks in CHECKS.values() for check in checks]
        wrong = run(every, False, "patched", folder)
        if arguments.patches:
            for number, checks in CHECKS.items():
                folder = before(arguments.patches, PLUGIN, number, Path(scratch) / number)
                wrong += run(checks, True, f"without {number}", folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
