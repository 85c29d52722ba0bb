# SPDX-License-Identifier: Apache-2.0
"""Check and time the GGUF kernels of vllm-gguf-plugin at GLM-5's real sizes on an NVIDIA GPU.

Run it with the Python of a serving environment: `python tests/gpu/kernels.py` prints one table and
ends with 1 when a case failed; without an NVIDIA GPU it says so and ends with 0. With `--time` it
times the kernels instead.

Every product is compared, expert by expert, with a float32 product over the dequantised weights.
The dequantisation itself is compared with gguf's. An illegal access ends a CUDA context, so the
parent never touches CUDA and forks one child a case. A case called `mapped` lays plausible weights
below the tensor: there an offset that wrapped below zero reads another expert's weights and does
not crash.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

TYPES = {"Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_XS": 23}
BLOCK = {
    8: (32, 34),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    23: (256, 136),
}  # values, bytes
SCALES = {
    8: (0,),
    12: (0, 2),
    13: (0, 2),
    14: (208,),
    23: (0,),
}  # where a block's float16 scales are
SHAPES = {  # experts, rows, columns of the stacks of one rank
    "tp1-w13": (256, 4096, 6144),
    "tp1-w2": (256, 6144, 2048),
    "tp2-w13": (256, 2048, 6144),
    "tp2-w2": (256, 6144, 1024),
    "tp4-w2": (256, 6144, 512),
    "tp8-w13": (256, 512, 6144),
    "tp8-w2": (256, 6144, 256),
    "many-w2": (384, 512, 256),  # more experts than the tiled CUDA kernel takes
}
TOP_K = 8
# The CUDA kernels round the activations to 8 bits: 0.5 % of the norm for Q6_K and Q8_0, 0.4 to
# 1.8 % for Q4_K and Q5_K, whose minimums make large terms cancel. The tensor cores round to bf16.
TOLERANCE = {"tiled": 0.025, "vec": 0.025, "graph": 0.025, "triton": 0.006, "large": 0.004}
TOLERANCE["packed"] = 0.006  # weights rounded to bf16 as well
TOLERANCE["decode"] = 0.006  # two products, and what is between them, rounded to bf16


def plugin_folder(given: str | None) -> str:
    """Folder of the plugin's package, found without importing it: that would import all of vLLM."""
    if given:
        return given
    spec = importlib.util.find_spec("vllm_gguf_plugin")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "vllm-gguf-plugin is not installed in this environment: nothing was checked; "
            "wanted: the Python of a release, /opt/gpubox/environments/DIGEST/venv/bin/python"
        )
    return str(Path(spec.origin).parent)


def load_ops(folder: str) -> Any:
    """The module `ops` of the plugin in `folder`, without the package's own __init__."""
    package = types.ModuleType("vllm_gguf_plugin")
    package.__path__ = [folder]
    sys.modules["vllm_gguf_plugin"] = package
    from vllm_gguf_plugin import ops

    return ops


def weights(torch: Any, t: int, experts: int, rows: int, cols: int, below: int = 0) -> Any:
    """Random blocks [experts, rows, bytes] with sane scales, `below` more experts before them."""
    values, size = BLOCK[t]
    shape = (below + experts, rows, cols // values, size)
    w = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    for at, value in zip(SCALES[t], (1e-3, 4e-3), strict=False):
        scale = torch.tensor([value], dtype=torch.float16).view(torch.uint8).cuda()
        w[..., at : at + 2] = scale
    return w.reshape(below + experts, rows, -1)[below:]


def route(torch: Any, experts: int, tokens: int, kind: str) -> Any:
    """[tokens, 8] expert ids: random and distinct, or every token to the same last eight."""
    if kind == "same":
        return torch.arange(experts - TOP_K, experts, device="cuda", dtype=torch.int32).repeat(
            tokens, 1
        )
    return torch.rand(tokens, experts, device="cuda").topk(TOP_K, dim=1).indices.to(torch.int32)


def align(torch: Any, ids: Any, block: int, experts: int) -> tuple[Any, Any, Any]:
    """vLLM's moe_align_block_size and buffer sizes; unused entries hold what would do harm."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vllm is not installed in this environment")
    torch.ops.load_library(str(Path(spec.origin).parent / "_moe_C_stable_libtorch.abi3.so"))
    size = ids.numel() + experts * (block - 1)
    if ids.numel() < experts:
        size = min(ids.numel() * block, size)
    sorted_ids = torch.full((size,), 2**30, dtype=torch.int32, device="cuda")
    expert_ids = torch.full((-(-size // block),), 255, dtype=torch.int32, device="cuda")
    padded = torch.empty(1, dtype=torch.int32, device="cuda")
    torch.ops._moe_C.moe_align_block_size(
        ids, experts, block, sorted_ids, expert_ids, padded, None, None
    )
    return sorted_ids, expert_ids, padded


def product(torch: Any, ops: Any, kernel: str, t: int, w: Any, x: Any, ids: Any, top_k: int) -> Any:
    """A call without arguments: the rows of x times their experts."""
    experts, rows, tokens = w.shape[0], w.shape[1], x.shape[0]
    if kernel == "vec":
        return lambda: ops.ggml_moe_a8_vec(x, w, ids, top_k, t, rows, tokens)
    if kernel == "large":
        from vllm_gguf_plugin.triton.fused_moe import large_batch

        block = large_batch.large_batch_block_m(ids.numel(), experts)
        aligned = align(torch, ids, block, experts)
        return lambda: large_batch.ggml_moe_large_batch(
            x, w, *aligned, t, rows, top_k, tokens, block_m=block
        )
    if kernel == "packed":
        from vllm_gguf_plugin.triton.gemm import packed

        tile = packed.experts_tile_for(ids.numel(), experts)
        aligned = align(torch, ids, tile.tokens, experts)
        return lambda: packed.ggml_moe_packed(x, w, *aligned, t, rows, top_k, tokens, tile=tile)
    aligned = align(torch, ids, 4, experts)
    f = ops.ggml_moe_a8_triton if kernel == "triton" else ops.ggml_moe_a8
    return lambda: f(x, w, *aligned, t, rows, top_k, tokens)


def inputs(torch: Any, shape: str, tokens: int, kind: str = "random") -> tuple[Any, Any, int]:
    experts, _, cols = SHAPES[shape]
    ids = route(torch, experts, tokens, kind)
    down = shape.endswith("w2")  # the second product takes one row for each routed pair
    rows = tokens * TOP_K if down else tokens
    return ids, torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16), 1 if down else TOP_K


def largest(errors: list[float]) -> float:
    """The largest of some errors, NaN if one is: ``max`` loses it."""
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def accepted(errors: list[float], tolerance: float) -> str:
    """The largest error in words.

    Raises:
        AssertionError: it is not below the tolerance.
    """
    if not (worst := largest(errors)) < tolerance:
        raise AssertionError(f"error {worst:.4f}")
    return f"error {worst:.4f}"


def moe(
    torch: Any, ops: Any, kernel: str, t: int, shape: str, tokens: int, kind: str = "random"
) -> str:
    experts, rows, cols = SHAPES[shape]
    stride = rows * cols // BLOCK[t][0] * BLOCK[t][1]
    w = weights(
        torch, t, experts, rows, cols, below=-(-(2**31) // stride) if kind == "mapped" else 0
    )
    ids, x, top_k = inputs(torch, shape, tokens, kind)
    call = product(torch, ops, "tiled" if kernel == "graph" else kernel, t, w, x, ids, top_k)
    out = call()
    torch.cuda.synchronize()
    if kernel == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        out.zero_()
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
    elif not torch.equal(out, call()):
        raise AssertionError("two calls with the same input differ")
    flat, bad, worst = ids.flatten(), [], 0.0
    for e in flat.unique().tolist():
        mine = (flat == e).nonzero().flatten()
        reference = (
            x[mine // top_k].float() @ ops.ggml_dequantize(w[e], t, rows, cols, torch.float32).T
        )
        error = float((out[mine].float() - reference).norm() / reference.norm())
        if error < TOLERANCE[kernel]:
            worst = max(worst, error)
        else:  # NaN as well
            bad.append(e)
    if bad:
        raise AssertionError(
            f"{len(bad)} of {len(flat.unique())} experts wrong ({min(bad)}..{max(bad)})"
        )
    return f"error {worst:.4f}"


def decode(
    torch: Any, ops: Any, types: tuple[int, int], rank: str, tokens: int, kind: str = "random"
) -> str:
    """The expert kernels for few tokens: gate/up and down, each against float32."""
    from vllm_gguf_plugin.triton.fused_moe import expert_decode as module

    (experts, rows, cols), (_, hidden, inner) = SHAPES[f"{rank}-w13"], SHAPES[f"{rank}-w2"]
    w1, w2 = (
        weights(torch, types[0], experts, rows, cols),
        weights(torch, types[1], experts, hidden, inner),
    )
    pairwise = tokens <= module.PAIRWISE_TOKENS
    ids = route(torch, experts, tokens, "same" if kind == "same" else "random")
    x = torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16)
    factors = torch.rand(tokens, TOP_K, device="cuda")

    def whole() -> Any:
        return module.expert_decode(x, w1, w2, factors, ids, *types)

    out = whole()
    torch.cuda.synchronize()
    if kind == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = whole()
        x.copy_(torch.randn_like(x))
        ids.copy_(route(torch, experts, tokens, "random"))
        factors.copy_(torch.rand_like(factors))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
    if kind == "absent":  # experts of other ranks, and none
        ids[0, 0], ids[-1, -1], ids[tokens // 2] = -1, experts, experts + 7
        out = whole()
    if not torch.equal(out, whole()):
        raise AssertionError("two calls with the same input differ")
    tile = module.tile_for(module.GATE_UP, tokens)
    act = module._gate_up(x, w1, ids, types[0], tile, pairwise)
    flat, errors = ids.flatten(), []
    sums = torch.zeros(tokens, hidden, device="cuda")
    for e in flat.unique().tolist():
        if not 0 <= e < experts:
            continue
        mine = (flat == e).nonzero().flatten()
        known = ops.ggml_dequantize(w1[e], types[0], rows, cols, torch.float32)
        gate, up = (x[mine // TOP_K].float() @ known.T).chunk(2, -1)
        known = torch.nn.functional.silu(gate) * up
        errors.append(float((act[mine].float() - known).norm() / known.norm()))
        known = ops.ggml_dequantize(w2[e], types[1], hidden, inner, torch.float32)
        sums[mine // TOP_K] += factors.flatten()[mine, None] * (act[mine].float() @ known.T)
    for token in range(tokens):
        known = sums[token]
        errors.append(float((out[token].float() - known).norm() / known.norm().clamp(1e-9)))
    return accepted(errors, TOLERANCE["decode"])


def linear(torch: Any, ops: Any, t: int, rows: int, cols: int, tokens: int, kernel: str) -> str:
    w = weights(torch, t, 1, rows, cols)[0]
    x = torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16)
    out, errors = linear_call(ops, kernel, w, x, t)(), []
    torch.cuda.synchronize()
    for a in range(0, rows, 16384):
        part = w[a : a + 16384].contiguous()
        reference = x.float() @ ops.ggml_dequantize(part, t, part.shape[0], cols, torch.float32).T
        errors.append(float((out[:, a : a + 16384].float() - reference).norm() / reference.norm()))
    return accepted(errors, TOLERANCE[kernel])


def linear_call(ops: Any, kernel: str, w: Any, x: Any, t: int) -> Any:
    if kernel == "large":
        from vllm_gguf_plugin.triton.gemm import tensor_cores

        return lambda: tensor_cores.ggml_mul_mat_tensor_cores(w, x, t, w.shape[0])
    if kernel == "packed":
        from vllm_gguf_plugin.triton.gemm import packed

        return lambda: packed.ggml_mul_mat_packed(w, x, t)
    f = ops.ggml_mul_mat_vec_a8 if kernel == "vec" else ops.ggml_mul_mat_a8
    return lambda: f(w, x, t, w.shape[0])


def dequantise(torch: Any, ops: Any, t: int, rows: int, cols: int, lookups: int) -> str:
    """A whole tensor, or the embedding of `lookups` tokens, against gguf on sampled rows."""
    import gguf

    w = weights(torch, t, 1, rows, cols)[0]
    if lookups:
        ids = torch.randint(0, rows, (lookups,), device="cuda")
        out = ops.ggml_dequantize(torch.index_select(w, 0, ids), t, cols, lookups, torch.float32)
        out, picks = (
            out.view(lookups, cols),
            [(i, int(ids[i])) for i in (0, lookups // 2, lookups - 1)],
        )
    else:
        out = ops.ggml_dequantize(w, t, rows, cols, torch.float32)
        picks = [(i, i) for i in (0, 1, rows // 3, rows - 1)]
    for at, row in picks:
        raw = w[row : row + 1].cpu().numpy()
        reference = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(t)))[0]
        error = float((out[at].cpu() - reference).norm() / reference.norm())
        if not error < 0.002:  # the kernels compute in float16
            raise AssertionError(f"row {row}: error {error:.4f}")
    return f"{len(picks)} rows as gguf"


def milliseconds(torch: Any, call: Any) -> float:
    """Median of five replays of a CUDA graph, so launches cost what they do in serving."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(5):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return float(sorted(times)[2])


def time_moe(torch: Any, ops: Any, t: int, shape: str, tokens: list[int]) -> str:
    experts, rows, cols = SHAPES[shape]
    w, lines = weights(torch, t, experts, rows, cols), []
    for n in tokens:
        ids, x, top_k = inputs(torch, shape, n)
        res = [f"align {milliseconds(torch, lambda i=ids: align(torch, i, 4, experts)):.3f}"]
        for kernel in ("vec", "tiled", "large"):
            if (kernel == "vec" and n > 128) or (kernel == "large" and n < 64):
                continue
            try:
                call = product(torch, ops, kernel, t, w, x, ids, top_k)
                res.append(f"{kernel} {milliseconds(torch, call):.3f}")
            except ImportError:
                continue
        lines.append(f"{n}: " + ", ".join(res))
    return "ms at tokens " + "; ".join(lines)


def time_linear(torch: Any, ops: Any, t: int, rows: int, cols: int, tokens: list[int]) -> str:
    w, lines = weights(torch, t, 1, rows, cols)[0], []
    for n in tokens:
        x, res = torch.randn(n, cols, device="cuda", dtype=torch.bfloat16), []
        for kernel in ("vec", "tiled", "large"):
            if kernel == "vec" and n > 8:
                continue
            try:
                res.append(f"{kernel} {milliseconds(torch, linear_call(ops, kernel, w, x, t)):.3f}")
            except ImportError:
                continue
        lines.append(f"{n}: " + ", ".join(res))
    return "ms at tokens " + "; ".join(lines)


def cases(timed: bool) -> dict[str, tuple[Any, ...]]:
    """Name of each case and what to call with which arguments."""
    c: dict[str, tuple[Any, ...]] = {}
    for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0"):
        for shape in ("tp1-w13", "tp1-w2", "tp2-w13", "tp2-w2", "tp8-w13", "tp8-w2"):
            for kernel in ("tiled", "large"):
                c[f"{kernel} {name} {shape} 512"] = (moe, kernel, TYPES[name], shape, 512)
            c[f"vec {name} {shape} 64"] = (moe, "vec", TYPES[name], shape, 64)
    for name, shape in (
        ("Q4_K", "tp1-w13"),
        ("Q5_K", "tp1-w2"),
        ("Q4_K", "tp8-w13"),
        ("Q5_K", "tp8-w2"),
    ):
        t = TYPES[name]
        c[f"vec {name} {shape} 1"] = (moe, "vec", t, shape, 1)
        c[f"tiled {name} {shape} 65"] = (moe, "tiled", t, shape, 65)
        for kernel in ("tiled", "large"):
            for tokens in (2048, 8192):
                c[f"{kernel} {name} {shape} {tokens}"] = (moe, kernel, t, shape, tokens)
            c[f"{kernel} {name} {shape} 8192 same"] = (moe, kernel, t, shape, 8192, "same")
            c[f"{kernel} {name} {shape} 512 mapped"] = (moe, kernel, t, shape, 512, "mapped")
        c[f"graph {name} {shape} 512"] = (moe, "graph", t, shape, 512)
        c[f"triton {name} {shape} 512 mapped"] = (moe, "triton", t, shape, 512, "mapped")
    for kernel in ("tiled", "large"):
        c[f"{kernel} Q8_0 many-w2 512"] = (moe, kernel, 8, "many-w2", 512)
    c["vec IQ4_XS tp8-w2 8192"] = (moe, "vec", 23, "tp8-w2", 8192)
    c["vec IQ4_XS tp8-w13 8192"] = (moe, "vec", 23, "tp8-w13", 8192)
    for first, second, rank, tokens, kind in (
        *(("Q4_K", "Q5_K", "tp8", tokens, "random") for tokens in (1, 3, 4, 5, 16, 17, 33, 64)),
        *(("Q4_K", "Q6_K", "tp8", tokens, "random") for tokens in (1, 64)),
        *(("Q5_K", "Q4_K", "tp8", tokens, "random") for tokens in (1, 64)),
        *(("Q6_K", "Q8_0", "tp8", tokens, "random") for tokens in (1, 64)),
        *(("Q8_0", "Q6_K", "tp8", tokens, "random") for tokens in (1, 64)),
        *(
            ("Q4_K", "Q5_K", rank, tokens, "random")
            for rank in ("tp1", "tp2")
            for tokens in (1, 64)
        ),
        ("Q8_0", "Q6_K", "tp1", 64, "random"),
        *(("Q4_K", "Q5_K", "tp8", 64, kind) for kind in ("same", "graph", "absent")),
        *(("Q4_K", "Q5_K", "tp8", 3, kind) for kind in ("same", "graph", "absent")),
    ):
        label = f"decode {first} {second} {rank} {tokens}" + f" {kind}" * (kind != "random")
        c[label] = (decode, (TYPES[first], TYPES[second]), rank, tokens, kind)
    for name, rows, cols, vec, many in (
        ("Q6_K", 154880, 6144, 2, (64, 8192)),
        ("Q5_K", 16384, 2048, 2, (512, 8192)),
        ("Q5_K", 6144, 16384, 2, (8192,)),
        ("Q4_K", 24576, 6144, 2, (512, 8192)),
        ("Q8_0", 576, 6144, 6, (7, 8192)),
        ("Q6_K", 6144, 12288, 2, (512, 8192)),
    ):
        c[f"linear vec {name} {rows}x{cols} {vec}"] = (linear, TYPES[name], rows, cols, vec, "vec")
        for tokens in many:
            c[f"linear tiled {name} {rows}x{cols} {tokens}"] = (
                linear,
                TYPES[name],
                rows,
                cols,
                tokens,
                "tiled",
            )
        for tokens in (4, 9, 17, 40, 64, 1000):  # a tile each
            c[f"linear large {name} {rows}x{cols} {tokens}"] = (
                linear,
                TYPES[name],
                rows,
                cols,
                tokens,
                "large",
            )
        for tokens in (1, 9, 17, 40, 1000) if name != "Q6_K" else ():  # a tile each
            case = f"linear packed {name} {rows}x{cols} {tokens}"
            c[case] = (linear, TYPES[name], rows, cols, tokens, "packed")
    for name, shape, tokens, kind in (
        ("Q4_K", "tp1-w13", 512, "mapped"),
        ("Q5_K", "tp1-w2", 512, "mapped"),
        ("Q8_0", "tp1-w2", 512, "random"),
        ("Q4_K", "tp8-w13", 8192, "same"),
        ("Q5_K", "tp8-w2", 8192, "random"),
        ("Q8_0", "tp8-w13", 65, "random"),
        ("Q8_0", "many-w2", 512, "random"),
    ):
        case = f"packed {name} {shape} {tokens}" + f" {kind}" * (kind != "random")
        c[case] = (moe, "packed", TYPES[name], shape, tokens, kind)
    c["dequantise Q6_K 154880x6144"] = (dequantise, 14, 154880, 6144, 0)
    c["embedding Q4_K 154880x6144 8192"] = (dequantise, 12, 154880, 6144, 8192)
    if timed:
        c = {}
        few, many = [1, 2, 3, 4, 8, 16, 32, 64, 128], [128, 256, 512, 2048, 8192]
        for name, shape in (
            ("Q4_K", "tp8-w13"),
            ("Q5_K", "tp8-w2"),
            ("Q4_K", "tp1-w13"),
            ("Q5_K", "tp1-w2"),
        ):
            c[f"time {name} {shape}"] = (time_moe, TYPES[name], shape, few + many[1:])
        for name, shape in (
            ("Q5_K", "tp4-w2"),
            ("Q5_K", "tp2-w2"),
            ("Q4_K", "tp2-w13"),
            ("Q6_K", "tp8-w2"),
        ):
            c[f"time {name} {shape}"] = (time_moe, TYPES[name], shape, few)
        for name, shape in (("Q6_K", "tp8-w13"), ("Q8_0", "tp8-w13"), ("Q8_0", "tp8-w2")):
            c[f"time {name} {shape}"] = (time_moe, TYPES[name], shape, [64, *many])
        for name, rows, cols in (
            ("Q5_K", 2048, 2048),
            ("Q5_K", 6144, 2048),
            ("Q4_K", 3072, 6144),
            ("Q8_0", 4096, 2048),
            ("Q6_K", 6144, 1536),
            ("Q5_K", 6144, 16384),
            ("Q6_K", 19360, 6144),
        ):
            c[f"time linear {name} {rows}x{cols}"] = (
                time_linear,
                TYPES[name],
                rows,
                cols,
                [8, 32, 64, *many],
            )
    return c


def child(name: str, folder: str, path: Path) -> None:
    """Run one case and write [passed, text, seconds]; never raises."""
    if name.startswith("time "):
        os.environ.pop("CUDA_LAUNCH_BLOCKING", None)
    start = time.monotonic()
    try:
        import torch

        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = False
        ops = load_ops(folder)
        if not ops._CUDA_ENABLED:
            raise RuntimeError("the plugin's CUDA kernels did not load")
        f, *rest = cases(name.startswith("time "))[name]
        passed, text = True, f(torch, ops, *rest)
    except BaseException as error:
        first = (str(error).strip().splitlines() or [""])[0]
        passed, text = False, f"{type(error).__name__}: {first[:110]}"
    path.write_text(json.dumps([passed, text, round(time.monotonic() - start, 1)]))


class Run:
    """A case that runs in a child."""

    def __init__(self, name: str, folder: str, scratch: str, limit: float) -> None:
        self.name, self.limit = name, limit
        self.path = Path(scratch) / (re.sub(r"\W+", "_", name) + ".json")
        self.end = time.monotonic() + limit
        self.pid = os.fork()
        if self.pid == 0:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            child(name, folder, self.path)
            os._exit(0)

    def result(self) -> list[Any] | None:
        """[name, passed, text, seconds], or None while it runs."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if done and self.path.exists():
            return [self.name, *json.loads(self.path.read_text())]
        if done:
            return [self.name, False, f"ended with status {status}", 0.0]
        if time.monotonic() < self.end:
            return None
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return [self.name, False, f"no answer in {self.limit:.0f} s", self.limit]


def run(names: list[str], folder: str, jobs: int, limit: float) -> list[list[Any]]:
    """Run the cases, `jobs` at a time, and print each when it has ended."""
    waiting, running, results = list(names), list[Run](), list[list[Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Run(waiting.pop(0), folder, scratch, limit))
            for one in list(running):
                r = one.result()
                if r is not None:
                    running.remove(one)
                    results.append(r)
                    verdict = "PASS" if r[1] else "FAIL"
                    print(f"{verdict} {r[0]:<38} {r[2]}  [{r[3]} s]", flush=True)
            time.sleep(0.02)
    return results


def main() -> int:
    """Run the chosen cases; see the module's docstring."""
    a = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    a.add_argument(
        "--plugin", help="folder of the package vllm_gguf_plugin (default: the installed one)"
    )
    a.add_argument("--only", default=".", help="regular expression over the names of the cases")
    a.add_argument("--time", action="store_true", help="time the kernels instead of checking them")
    a.add_argument("--jobs", type=int, default=4, help="cases at a time (1 with --time)")
    a.add_argument("--limit", type=float, default=120, help="seconds a case may take")
    a.add_argument("--one", help="run this case in this process, for compute-sanitizer")
    a.add_argument("--out", type=Path, help="write the results as JSON")
    args = a.parse_args()
    if not Path("/proc/driver/nvidia/version").exists():
        print("no NVIDIA GPU (no /proc/driver/nvidia/version): nothing was checked")
        return 0
    folder = plugin_folder(args.plugin)
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    if args.one:
        path = Path(tempfile.mkdtemp()) / "one.json"
        child(args.one, folder, path)
        print(args.one, path.read_text())
        return 0 if json.loads(path.read_text())[0] else 1
    load_ops(folder)  # imports torch, without touching CUDA
    names = [n for n in cases(args.time) if re.search(args.only, n)]
    if not names:
        a.error(f"--only {args.only!r} is in the name of none of {len(cases(args.time))} cases")
    results = run(names, folder, 1 if args.time else args.jobs, args.limit)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    failed = sum(not r[1] for r in results)
    print(f"{len(results)} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
