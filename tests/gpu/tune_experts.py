# SPDX-License-Identifier: Apache-2.0
"""Time the expert kernels for few tokens on an NVIDIA GPU, and every tile that may be better.

    python tests/gpu/tune_experts.py [--types Q4_K Q5_K] [--rank-of 8] [--tokens 1 2 4 8 16 32 64]

Run it with the Python of a serving environment. One line for each number of tokens, matrix, way
(`pairs`: a program for a token and an expert; `expert`: for an expert with all its tokens) and tile
(warps/rows/tokens/stages/loops/registers, `*`: the chosen one): milliseconds, TB/s of the bytes of
the distinct experts, and the share of the copy bandwidth measured first. `stock` is the vector
kernel, `patched` what the series takes with VLLM_GGUF_EXPERT_DECODE=0, sorting not included. At
the end both matrices together, and the best tiles. Replays of CUDA graphs, median of five; the
calls of a graph take different experts, so that no weights are left in the cache from one to the
next. A tile whose result differs from that of the chosen one is WRONG, and the status is then 1; a
goal that is missed is told, and fails nothing.

All kernels are compiled first, side by side (`--jobs`), by children that run each one once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernels import BLOCK, TOP_K, TYPES, load_ops, plugin_folder, product, route, weights

HIDDEN, INNER, EXPERTS = 6144, 2048, 256
WAYS = {True: "pairs", False: "expert"}
FASTER, SHARE = 3.0, 0.5  # goals: of stock at one token; of the copy bandwidth at 64
PAIRS_UP_TO = 32  # tokens: from there on every pair would read its expert by itself
Tile = tuple[Any, ...]
Times = dict[str, tuple[float, float]]  # milliseconds and share of the copy bandwidth, by line


def tiles(decode: Any, matrix: str, pairwise: bool) -> list[Any]:
    """The tiles that are chosen for some number of tokens, then the candidates."""
    chosen, more = {
        "gate_up": (decode.GATE_UP, decode.GATE_UP_CANDIDATES),
        "down": (decode.DOWN, decode.DOWN_CANDIDATES),
    }[matrix]
    found = [*(chosen[:2] if pairwise else chosen[2:]), *more[not pairwise]]
    return list(dict.fromkeys(found))


def chosen_tile(decode: Any, matrix: str, pairwise: bool, tokens: int) -> Any:
    """The tile for a number of tokens; of the other way that with the most or fewest tokens."""
    chosen = {"gate_up": decode.GATE_UP, "down": decode.DOWN}[matrix]
    if pairwise != (tokens <= decode.PAIRWISE_TOKENS):
        return chosen[1 if pairwise else 2]
    return decode.tile_for(chosen, tokens)


def label(tile: Tile, chosen: Tile) -> str:
    """A tile in a few characters."""
    return "/".join(map(str, tile)) + ("*" if tile == chosen else "")


class Layer:
    """Random experts of one rank, and how to call each kernel with them."""

    def __init__(self, torch: Any, decode: Any, types: tuple[str, str], rank_of: int, experts: int):
        self.torch, self.decode, self.experts = torch, decode, experts
        self.types = {"gate_up": TYPES[types[0]], "down": TYPES[types[1]]}
        inner = INNER // rank_of
        self.shapes = {"gate_up": (2 * inner, HIDDEN), "down": (HIDDEN, inner)}
        self.weights = {
            matrix: weights(torch, self.types[matrix], experts, *shape)
            for matrix, shape in self.shapes.items()
        }

    def rows(self, matrix: str, tokens: int) -> Any:
        """Activations: of tokens, or of pairs of a token and an expert for down."""
        count = tokens * (TOP_K if matrix == "down" else 1)
        columns = self.shapes[matrix][1]
        return self.torch.randn(count, columns, device="cuda", dtype=self.torch.bfloat16)

    def call(self, matrix: str, ids: Any, pairwise: bool, tile: Tile) -> Callable[[], Any]:
        """Our kernel."""
        x, w, t = self.rows(matrix, ids.shape[0]), self.weights[matrix], self.types[matrix]
        if matrix == "gate_up":
            return lambda: self.decode._gate_up(x, w, ids, t, tile, pairwise)
        factors = self.torch.rand(ids.shape, device="cuda")
        return lambda: self.decode._down(x, w, factors, ids, t, tile, pairwise)

    def usual(self, ops: Any, matrix: str, ids: Any, kernel: str) -> Callable[[], Any]:
        """The vector or the tiled kernel."""
        x, top_k = self.rows(matrix, ids.shape[0]), 1 if matrix == "down" else TOP_K
        w, t = self.weights[matrix], self.types[matrix]
        return product(self.torch, ops, kernel, t, w, x, ids, top_k)  # type: ignore[no-any-return]

    def size(self, matrix: str, ids: Any) -> int:
        """Bytes of the experts that are chosen."""
        rows, columns = self.shapes[matrix]
        values, size = BLOCK[self.types[matrix]]
        return len(ids.unique()) * rows * columns // values * size


def routings(torch: Any, tokens: int) -> list[Any]:
    """Ways in which tokens choose: no expert twice as long as there are enough."""
    calls = max(4, min(16, EXPERTS // (TOP_K * tokens)))
    if calls * tokens * TOP_K > EXPERTS:
        return [route(torch, EXPERTS, tokens, "random") for _ in range(calls)]
    each = torch.randperm(EXPERTS, device="cuda").to(torch.int32)
    return list(each[: calls * tokens * TOP_K].view(calls, tokens, TOP_K))


def milliseconds(torch: Any, calls: list[Callable[[], Any]]) -> float:
    """Of one call: median of five replays of a graph with all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(6):  # the first one warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return float(sorted(times[1:])[2])


def copy_bandwidth(torch: Any) -> float:
    """TB/s, reading and writing counted; not in a graph, where copies may take another way."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 2e-9 * source.numel() / float(sorted(times[1:])[2])


def compile_one(
    folder: str, types: tuple[str, str], rank_of: int, job: tuple[str, bool, int]
) -> str:
    """Run a kernel once with few experts, so that Triton's cache has it; what went wrong."""
    load_ops(folder)
    import torch
    from vllm_gguf_plugin.triton.fused_moe import expert_decode as decode

    matrix, pairwise, number = job
    tile = tiles(decode, matrix, pairwise)[number]
    try:
        layer = Layer(torch, decode, types, rank_of, 16)
        layer.call(matrix, route(torch, 16, 2, "random"), pairwise, tile)()
        torch.cuda.synchronize()
    except Exception as fault:
        return f"{matrix} {WAYS[pairwise]} {label(tile, ())}: {str(fault).splitlines()[0][:120]}"
    return ""


def compile_all(folder: str, decode: Any, arguments: argparse.Namespace) -> int:
    """Compile what will be timed, side by side; how many kernels could not run."""
    jobs = [
        (matrix, pairwise, number)
        for matrix in ("gate_up", "down")
        for pairwise in (True, False)
        for number in range(len(tiles(decode, matrix, pairwise)))
    ]
    begun = time.monotonic()
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=fresh) as pool:
        types = tuple(arguments.types)
        waiting = [pool.submit(compile_one, folder, types, arguments.rank_of, job) for job in jobs]
        faults = [fault for one in waiting if (fault := one.result())]
    for fault in faults:
        print(f"FAIL {fault}", flush=True)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)
    return len(faults)


def usual_kernel(tokens: int, columns: int) -> str:
    """What patch 0014 of the series takes for a product (_tiled_min_tokens)."""
    least = 2 if columns <= 512 else 4 if columns <= 1024 else 32
    return "tiled" if tokens >= least else "vec"


def measure(
    torch: Any, ops: Any, layer: Layer, tokens: int, copy: float
) -> tuple[dict[str, Times], int]:
    """Print the lines of a number of tokens; what was measured by matrix, how many wrong."""
    ways = routings(torch, tokens)
    found: dict[str, Times] = {"gate_up": {}, "down": {}}
    wrong = 0

    def line(matrix: str, name: str, calls: list[Callable[[], Any]]) -> None:
        try:
            ms = milliseconds(torch, calls)
        except Exception as fault:
            print(f"{tokens:>3} {matrix:<8}{name:<28} {str(fault).splitlines()[0][:80]}")
            return
        rate = sum(layer.size(matrix, ids) for ids in ways) / len(ways) / ms * 1e-9
        text = f"{ms:8.4f} ms {rate:6.2f} TB/s {100 * rate / copy:4.0f} %"
        print(f"{tokens:>3} {matrix:<8}{name:<28} {text}", flush=True)
        found[matrix][name] = ms, rate / copy

    for matrix, times in found.items():
        line(matrix, "stock", [layer.usual(ops, matrix, ids, "vec") for ids in ways])
        kernel = usual_kernel(tokens, layer.shapes[matrix][1])
        line(matrix, "patched", [layer.usual(ops, matrix, ids, kernel) for ids in ways])
        for pairwise, way in WAYS.items():
            if (pairwise and tokens > PAIRS_UP_TO) or (not pairwise and tokens == 1):
                continue
            chosen = chosen_tile(layer.decode, matrix, pairwise, tokens)
            more = [tile for tile in tiles(layer.decode, matrix, pairwise) if tile != chosen]
            torch.manual_seed(1)
            known = layer.call(matrix, ways[0], pairwise, chosen)().float()
            for tile in (chosen, *more):
                name = f"{way} {label(tile, chosen)}"
                line(matrix, name, [layer.call(matrix, ids, pairwise, tile) for ids in ways])
                if name not in times:
                    continue
                torch.manual_seed(1)  # the same activations as for `known`
                got = layer.call(matrix, ways[0], pairwise, tile)().float()
                if not float((got - known).norm() / known.norm()) < 0.005:
                    wrong += 1
                    print(f"WRONG {matrix} {name}: differs from the chosen tile", flush=True)
                    del times[name]
    return found, wrong


def of_chosen(times: Times, way: str) -> tuple[float, float] | None:
    """What the chosen tile needed, None where it was not timed."""
    return next((t for n, t in times.items() if n.startswith(way) and n.endswith("*")), None)


def summary(found: dict[str, Times], way: str) -> str:
    """Milliseconds of both matrices, - where one was not timed, and the best tiles."""
    total: dict[str, list[float]] = {key: [] for key in ("stock", "patched", "chosen", "best")}
    names = []
    for times in found.values():
        ours = {name: t for name, t in times.items() if name not in ("stock", "patched")}
        names.append(min(ours.items(), key=lambda item: item[1], default=("",))[0])
        for key, one in (
            ("stock", times.get("stock")),
            ("patched", times.get("patched")),
            ("chosen", of_chosen(times, way)),
            ("best", ours.get(names[-1])),
        ):
            total[key] += [one[0]] if one else []
    numbers = " ".join(
        f"{sum(ms):8.4f}" if len(ms) == len(found) else f"{'-':>8}" for ms in total.values()
    )
    return f"{numbers}  gate/up {names[0]}, down {names[1]}"


def goals(results: dict[int, dict[str, Times]], pairwise_tokens: int) -> list[str]:
    """Whether the chosen tiles are as fast as wanted, where that was timed."""
    lines = []

    def judge(what: str, measured: float, wanted: float) -> None:
        verdict = "met" if measured >= wanted else "missed"
        lines.append(f"GOAL {verdict}: {what}: {measured:.2f}, wanted {wanted}")

    for tokens, found in results.items():
        ours = {m: of_chosen(times, WAYS[tokens <= pairwise_tokens]) for m, times in found.items()}
        stock = [times["stock"][0] for times in found.values() if "stock" in times]
        times = [one[0] for one in ours.values() if one]
        if tokens == 1 and len(times) == len(stock) == len(found):
            judge("times as fast as stock, 1 token", sum(stock) / sum(times), FASTER)
        for matrix, one in ours.items():
            if tokens == 64 and one:
                judge(f"share of the copy bandwidth, {matrix}, 64 tokens", one[1], SHARE)
    return lines


def main() -> int:
    """Compile, time, and compare; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--plugin", help="folder of vllm_gguf_plugin (default: the installed one)")
    parser.add_argument("--types", nargs=2, default=["Q4_K", "Q5_K"], choices=sorted(TYPES))
    parser.add_argument("--rank-of", type=int, default=8, choices=(1, 2, 4, 8))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if not Path("/proc/driver/nvidia/version").exists():
        print("no NVIDIA GPU (no /proc/driver/nvidia/version): nothing was checked or timed")
        return 0
    folder = plugin_folder(arguments.plugin)
    ops = load_ops(folder)
    from vllm_gguf_plugin.triton.fused_moe import expert_decode as decode

    faults = compile_all(folder, decode, arguments)  # before this process has a CUDA context
    import torch

    copy = copy_bandwidth(torch)
    print(
        f"copy bandwidth {copy:.2f} TB/s; {' '.join(arguments.types)}, one rank of "
        f"{arguments.rank_of}; {torch.cuda.get_device_name()}"
    )
    layer = Layer(torch, decode, tuple(arguments.types), arguments.rank_of, EXPERTS)
    results, wrong = {}, 0
    for tokens in arguments.tokens:
        results[tokens], failed = measure(torch, ops, layer, tokens, copy)
        wrong += failed
    print(f"\n{'tokens':>6} {'stock':>8} {'patched':>8} {'chosen':>8} {'best':>8}  best tiles")
    for tokens, found in results.items():
        print(f"{tokens:>6} {summary(found, WAYS[tokens <= decode.PAIRWISE_TOKENS])}")
    for line in goals(results, decode.PAIRWISE_TOKENS):
        print(line)
    verdict = f"{wrong} results differ from those of the chosen tiles, {faults} kernels did not run"
    print(f"{'FAIL' if wrong or faults else 'PASS'} {verdict}")
    return 1 if wrong or faults else 0


if __name__ == "__main__":
    sys.exit(main())
