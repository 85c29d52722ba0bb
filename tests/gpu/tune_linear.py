# SPDX-License-Identifier: Apache-2.0
"""Time the kernels of linear layers on an NVIDIA GPU, and every tile that may be better.

    python tests/gpu/tune_linear.py [--rank-of 8] [--tokens 1 2 4 8 16 32 64 512]

Run it with the Python of a serving environment. One line for each layer of GLM-5 and number of
tokens: microseconds of the vector and of the tiled CUDA kernel, of ours with each tile
(`*`: the chosen one; tokens/rows/warps/stages/programs, of the packed kernels
tokens/parts/rows/columns/stages/programs/registers), of one product of matrices after dequantising,
and the share that the bytes of the weights at the copy bandwidth measured first have of the fastest
`*`. Then the sums over a layer of the model, each matrix as often as a layer has it. Replays of
CUDA graphs, median of five; the calls of a graph take different weights, so that none are left in
the cache from one to the next.

A result that is not that of the dequantised weights is WRONG; then, and where a kernel does not
run, the status is 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kernels import BLOCK, TYPES, largest, load_ops, plugin_folder, weights
from tune_experts import copy_bandwidth, label, milliseconds

TOLERANCE = 0.006  # of the norm: bfloat16
DEQUANTISED_FROM = 32  # tokens
COLD = 160 << 20  # bytes of weights that no cache holds
# Of a layer with experts: type, rows and columns, and which of both the ranks divide.
LAYERS = {
    "q_a": ("Q5_K", 2048, 6144, ""),
    "kv_a": ("Q8_0", 576, 6144, ""),
    "q_b": ("Q5_K", 16384, 2048, "rows"),
    "indexer.wq_b": ("Q8_0", 4096, 2048, ""),
    "o_proj": ("Q5_K", 6144, 16384, "columns"),
    "shared gate/up": ("Q4_K", 4096, 6144, "rows"),
    "shared down": ("Q6_K", 6144, 2048, "columns"),
}


def shapes(rank_of: int) -> dict[str, tuple[int, int, int]]:
    """Quantization type, rows and columns of each layer for one rank of so many."""
    found = {}
    for name, (kind, rows, columns, divided) in LAYERS.items():
        part = (
            rows // rank_of if divided == "rows" else rows,
            columns // rank_of if divided == "columns" else columns,
        )
        found[name] = (TYPES[kind], *part)
    return found


class Way(NamedTuple):
    """A kernel with a tile, and how to call it with (weights, activations, type)."""

    name: str
    call: Callable[[Any, Any, int], Any]


def ways(kind: int, tokens: int) -> list[Way]:
    """Our kernels that take a number of tokens, each with its chosen tile first."""
    from vllm_gguf_plugin import ops
    from vllm_gguf_plugin.triton.gemm import packed, tensor_cores

    def tile_by_tile(name: str, module: Any, call: Callable[..., Any]) -> list[Way]:
        chosen = module.tile_for(tokens)
        tiles = [chosen, *(module.Tile(chosen.tokens, *rest) for rest in module.CANDIDATES)]
        return [
            Way(name + label(tile, chosen), functools.partial(call, tile=tile))
            for tile in dict.fromkeys(tiles)
        ]

    found = tile_by_tile(
        "",
        tensor_cores,
        lambda w, x, t, tile: tensor_cores.ggml_mul_mat_tensor_cores(w, x, t, w.shape[0], tile),
    )
    if kind in packed.PACKED_TYPES:
        found += tile_by_tile(
            "packed ",
            packed,
            lambda w, x, t, tile: packed.ggml_mul_mat_packed(w, x, t, tile=tile),
        )
    if tokens >= DEQUANTISED_FROM:
        found.append(
            Way(
                "dequantised*",
                lambda w, x, t: x @ ops.ggml_dequantize(w, t, w.shape[0], x.shape[1], x.dtype).T,
            )
        )
    return found


def matrices(torch: Any, kind: int, rows: int, columns: int) -> list[Any]:
    """Random weights, as many as no cache holds."""
    values, size = BLOCK[kind]
    count = max(2, -(-COLD // (rows * columns // values * size)))
    return list(weights(torch, kind, count, rows, columns))


def compile_some(folder: str, rank_of: int, jobs: list[tuple[str, int, int]]) -> list[str]:
    """Run kernels once, so that Triton's cache has them; what went wrong."""
    load_ops(folder)
    import torch

    faults = []
    for name, tokens, number in jobs:
        kind, rows, columns = shapes(rank_of)[name]
        w = weights(torch, kind, 1, rows, columns)[0]
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        way = ways(kind, tokens)[number]
        try:
            way.call(w, x, kind)
            torch.cuda.synchronize()
        except Exception as fault:
            reason = str(fault).splitlines()[0][:120]
            faults.append(f"{name}, {tokens} tokens, {way.name}: {reason}")
    return faults


def measure(
    torch: Any, ops: Any, shape: tuple[int, int, int], tokens: int
) -> tuple[dict[str, float], float]:
    """Microseconds by kernel, and the largest error of ours."""
    kind, rows, columns = shape
    some = matrices(torch, kind, rows, columns)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    known = ops.ggml_dequantize(some[0], kind, rows, columns, torch.float32)
    known = x.float() @ known.T
    found, errors = {}, []
    usual = {"vec": ops.ggml_mul_mat_vec_a8, "tiled": ops.ggml_mul_mat_a8}
    for name, call in usual.items():
        if name != "vec" or tokens <= 8:
            calls = [lambda w=w, f=call: f(w, x, kind, rows) for w in some]
            found[name] = milliseconds(torch, calls) * 1e3
    for way in ways(kind, tokens):
        calls = [lambda w=w, f=way.call: f(w, x, kind) for w in some]
        try:
            error = float((calls[0]().float() - known).norm() / known.norm())
            found[way.name] = milliseconds(torch, calls) * 1e3
        except Exception as fault:
            print(f"{way.name}: {str(fault).splitlines()[0][:100]}")
            error = math.nan if way.name.endswith("*") else 0.0
        errors.append(error)
    return found, largest(errors)


def main() -> int:
    """Compile, time, and compare; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--plugin", help="folder of vllm_gguf_plugin (default: the installed one)")
    parser.add_argument("--rank-of", type=int, default=8, choices=(1, 2, 4, 8))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 512])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="write the times as JSON")
    arguments = parser.parse_args()
    if not Path("/proc/driver/nvidia/version").exists():
        print("no NVIDIA GPU (no /proc/driver/nvidia/version): nothing was checked or timed")
        return 0
    folder = plugin_folder(arguments.plugin)
    ops = load_ops(folder)
    begun = time.monotonic()
    jobs = {}  # layers of one type, and numbers of tokens with one tile, have the same kernels
    for name, (kind, *_) in shapes(arguments.rank_of).items():
        for tokens in arguments.tokens:
            for number, way in enumerate(ways(kind, tokens)):
                jobs.setdefault((kind, way.name), (name, tokens, number))
    work = list(jobs.values())
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=fresh) as pool:
        some = [work[first :: arguments.jobs] for first in range(arguments.jobs)]
        waiting = [pool.submit(compile_some, folder, arguments.rank_of, part) for part in some]
        faults = [line for one in waiting for line in one.result()]
    for fault in faults:
        print(f"FAIL {fault}", flush=True)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)
    import torch

    copy = copy_bandwidth(torch)
    print(f"copy bandwidth {copy:.2f} TB/s; one rank of {arguments.rank_of}", end="; ")
    print(torch.cuda.get_device_name())
    wrong, everything = 0, {}
    for tokens in arguments.tokens:
        sums: dict[str, list[float]] = {}
        for name, shape in shapes(arguments.rank_of).items():
            found, error = measure(torch, ops, shape, tokens)
            everything[f"{name} {tokens}"] = found
            wrong += not error < TOLERANCE
            values, size = BLOCK[shape[0]]
            least = shape[1] * shape[2] // values * size / copy / 1e6
            ours = min((us for key, us in found.items() if key.endswith("*")), default=math.inf)
            times = ", ".join(f"{key} {us:.1f}" for key, us in found.items())
            verdict = f"error {error:.4f}" if error < TOLERANCE else f"WRONG {error:.4f}"
            print(f"{tokens:>4} {name:<15} {times}; {least / ours:.0%}; {verdict}", flush=True)
            for key, us in found.items():
                sums.setdefault(key, []).append(us)
        line = []
        for key, some in sums.items():
            part = f" ({len(some)} of {len(LAYERS)})" if len(some) < len(LAYERS) else ""
            line.append(f"{key} {sum(some):.1f}{part}")
        print(f"{tokens:>4} {'all of a layer':<15} {', '.join(line)}", flush=True)
        everything[f"sum {tokens}"] = sums
    if arguments.out:
        arguments.out.write_text(json.dumps(everything, indent=1))
    verdict = f"{wrong} results are not those of the dequantised weights"
    print(f"{'FAIL' if wrong or faults else 'PASS'} {verdict}, {len(faults)} kernels did not run")
    return 1 if wrong or faults else 0


if __name__ == "__main__":
    sys.exit(main())
