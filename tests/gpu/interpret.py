# SPDX-License-Identifier: Apache-2.0
"""Compute with the kernels of linear layers, and of experts and few tokens, without a GPU.

    python tests/gpu/interpret.py [FOLDER of vllm_gguf_plugin]

Run it with the Python of a release's environment (torch, Triton, gguf, the patched plugin). Small
layers in Triton's interpreter against gguf's dequantisation in float32, activations in float32 too
(the interpreter has no products of bfloat16), so that what remains is rounding. Instructions of a
GPU that the interpreter does not know are executed one by one. Weights end where a
page that must not be read begins; memory that nobody wrote is NaN. One line a case, and exit status
1 when one is wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import mmap
import multiprocessing
import os
import struct
import sys
import time
import types
from typing import Any

from kernels import BLOCK, SCALES, TYPES, plugin_folder

TOLERANCE = 2e-5  # relative to the norm
TOLERANCE_BF16 = 0.006  # of results in bfloat16, which the interpreter cuts off
EXPERTS = 6
# gate/up and down type, tokens, hidden and inner size, how tokens choose, tiles (None: the chosen)
CASES: list[tuple[str, str, int, int, int, str, str]] = [
    ("Q4_K", "Q5_K", 1, 768, 256, "random", ""),
    ("Q5_K", "Q4_K", 1, 768, 512, "random", ""),
    ("Q6_K", "Q8_0", 1, 512, 512, "random", ""),
    ("Q8_0", "Q6_K", 1, 1024, 256, "random", ""),
    ("Q4_K", "Q6_K", 3, 512, 256, "no expert", ""),
    ("Q4_K", "Q5_K", 9, 512, 256, "random", ""),
    ("Q5_K", "Q4_K", 33, 512, 256, "no expert", ""),
    ("Q6_K", "Q8_0", 18, 512, 256, "random", ""),
    ("Q8_0", "Q6_K", 18, 512, 512, "no expert", ""),
    ("Q4_K", "Q5_K", 64, 512, 256, "few experts", ""),
    ("Q4_K", "Q5_K", 17, 512, 256, "none", ""),
    ("Q4_K", "Q5_K", 3, 512, 256, "random", "wide"),
    ("Q5_K", "Q6_K", 33, 512, 256, "random", "wide"),
]
# type, tokens, rows, columns of linear layers
LINEAR: list[tuple[str, int, int, int]] = [
    ("Q4_K", 1, 100, 768),
    ("Q5_K", 9, 130, 512),
    ("Q6_K", 20, 64, 1024),
    ("Q8_0", 33, 96, 576),
    ("Q8_0", 70, 31, 64),
    ("Q5_K", 5, 65, 256),
]
# the same of the kernels that unpack in pairs, activations, and the tile (None: the chosen one)
PACKED: list[tuple[str, int, int, int, str, tuple[int, int, int, bool, int, int] | None]] = [
    ("Q4_K", 1, 40, 768, "float32", None),
    ("Q5_K", 7, 16, 2304, "float32", None),
    ("Q8_0", 1, 33, 256, "float32", None),
    ("Q8_0", 16, 24, 1280, "bfloat16", None),
    ("Q5_K", 20, 100, 512, "float32", None),
    ("Q8_0", 64, 130, 1024, "float32", None),
    ("Q4_K", 33, 129, 256, "bfloat16", None),
    ("Q5_K", 70, 40, 256, "float32", None),
    ("Q5_K", 3, 50, 1536, "bfloat16", (8, 2, 16, True, 2, 4)),
    ("Q8_0", 12, 70, 1536, "float32", (8, 2, 32, False, 2, 4)),
]
# type, tokens, rows, columns, how tokens choose, multiplied with the weights of the routing
PACKED_EXPERTS: list[tuple[str, int, int, int, str, bool]] = [
    ("Q4_K", 9, 100, 512, "no expert", False),
    ("Q5_K", 40, 72, 256, "few experts", True),
    ("Q8_0", 150, 40, 256, "random", True),
]
PROCESSORS = 8  # of the card that they think they have: so several programs share out columns


def load(folder: str) -> tuple[Any, Any, Any]:
    """The modules with the kernels of experts and of linear layers, for the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    package = types.ModuleType("vllm_gguf_plugin")
    package.__path__ = [folder]
    sys.modules["vllm_gguf_plugin"] = package
    from vllm_gguf_plugin.triton.fused_moe import expert_decode
    from vllm_gguf_plugin.triton.gemm import packed, tensor_cores

    return expert_decode, tensor_cores, packed


def guarded(torch: Any, tensor: Any) -> Any:
    """A copy whose last byte is followed by a page that nobody may read."""
    size = tensor.numel()
    end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, end + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + end), mmap.PAGESIZE, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=end - size)
    return copy.view(tensor.shape).copy_(tensor)


def weights(torch: Any, t: int, rows: int, columns: int, experts: int = EXPERTS) -> tuple[Any, Any]:
    """Random blocks [experts, rows, bytes], each with scales of its own, and their values."""
    import gguf

    values, size = BLOCK[t]
    w = torch.randint(0, 256, (experts, rows, columns // values, size), dtype=torch.uint8)
    for at in SCALES[t]:
        scale = torch.rand(w.shape[:-1]) * 2e-4 + 1e-4
        w[..., at : at + 2] = scale.half()[..., None].view(torch.uint8)
    w = w.reshape(experts, rows, -1)
    known = gguf.quants.dequantize(w.numpy(), gguf.GGMLQuantizationType(t))
    return guarded(torch, w), torch.from_numpy(known)


def route(torch: Any, tokens: int, kind: str) -> Any:
    """[tokens, 2] expert ids; of `no expert` some are none of this rank's."""
    if kind == "none":
        return torch.full((tokens, 2), -1, dtype=torch.int32)
    ids = torch.rand(tokens, 2 if kind == "few experts" else EXPERTS).topk(2, 1).indices
    if kind == "no expert":
        ids[0, 0], ids[-1, 1], ids[tokens // 2] = -1, EXPERTS, EXPERTS + 5
    return ids.to(torch.int32)


def run(folder: str, case: tuple[str, str, int, int, int, str, str]) -> tuple[float, float]:
    """(difference from the reference, seconds)."""
    decode, _, _ = load(folder)
    import torch

    begun = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    first, second, tokens, hidden, inner, kind, tiles = case
    w1, gate_up = weights(torch, TYPES[first], 2 * inner, hidden)
    w2, down = weights(torch, TYPES[second], hidden, inner)
    x, factors = torch.randn(tokens, hidden), torch.rand(tokens, 2)
    ids = route(torch, tokens, kind)
    wide = {}
    if tiles == "wide":
        wide = {"gate_up": decode.Tile(8, 16, 16, 2), "down": decode.Tile(4, 32, 16, 2, 3)}
    got = decode.expert_decode(x, w1, w2, factors, ids, TYPES[first], TYPES[second], **wide)
    wanted = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for k, expert in enumerate(ids[token].tolist()):
            if 0 <= expert < EXPERTS:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                act = torch.nn.functional.silu(gate) * up
                wanted[token] += factors[token, k] * (down[expert] @ act)
    error = float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return error, time.monotonic() - begun


def run_linear(folder: str, case: tuple[str, int, int, int]) -> tuple[float, float]:
    """(difference from the reference, seconds)."""
    _, linear, _ = load(folder)
    import torch

    begun = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    linear.multiprocessors = lambda _: PROCESSORS
    kind, tokens, rows, columns = case
    w, known = weights(torch, TYPES[kind], rows, columns, experts=1)
    x = torch.randn(tokens, columns)
    got, wanted = linear.ggml_mul_mat_tensor_cores(w[0], x, TYPES[kind], rows), x @ known[0].T
    return float((got - wanted).norm() / wanted.norm()), time.monotonic() - begun


def run_packed(
    folder: str,
    case: tuple[str, int, int, int, str, tuple[int, int, int, bool, int, int] | None],
) -> tuple[float, float]:
    """(difference from the reference, seconds)."""
    _, _, packed = load(folder)
    import torch

    begun = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    packed.multiprocessors = lambda _: PROCESSORS
    kind, tokens, rows, columns, dtype, tile = case
    w, known = weights(torch, TYPES[kind], rows, columns, experts=1)
    x = torch.randn(tokens, columns).to(getattr(torch, dtype))
    wanted = x.float() @ known[0].T
    some = packed.Tile(*tile) if tile else None
    got = packed.ggml_mul_mat_packed(w[0], x, TYPES[kind], tile=some).float()
    error = float((got - wanted).norm() / wanted.norm())
    if dtype == "bfloat16" and error < TOLERANCE_BF16:
        error *= TOLERANCE / TOLERANCE_BF16
    return error, time.monotonic() - begun


def bfloat16(bits: int) -> float:
    """The value of 16 bits."""
    return float(struct.unpack("f", struct.pack("I", bits << 16))[0])


def rounded(value: float) -> int:
    """The 16 bits nearest to a value, of two the even ones."""
    bits = int(struct.unpack("I", struct.pack("f", value))[0])
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def execute(program: str, inputs: dict[str, int]) -> dict[str, int]:
    """The registers after instructions of PTX for words of 32 bits."""
    values = dict(inputs)

    def read(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else values[name]

    def halves(name: str) -> list[float]:
        return [bfloat16(read(name) >> shift & 0xFFFF) for shift in (0, 16)]

    for line in program.strip().strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        out, *names = rest.replace(",", " ").split()
        if name == "mov.b32":
            values[out] = read(names[0])
        elif name == "and.b32":
            values[out] = read(names[0]) & read(names[1])
        elif name == "shr.u32":
            values[out] = read(names[0]) >> read(names[1])
        elif name == "lop3.b32":
            a, b, c = (read(one) for one in names[:3])
            table = read(names[3])
            bits = [(a >> at & 1) << 2 | (b >> at & 1) << 1 | c >> at & 1 for at in range(32)]
            values[out] = sum((table >> bit & 1) << at for at, bit in enumerate(bits))
        elif name == "prmt.b32":
            eight = read(names[0]) | read(names[1]) << 32
            taken = [read(names[2]) >> 4 * at & 0xF for at in range(4)]
            values[out] = sum((eight >> 8 * one & 0xFF) << 8 * at for at, one in enumerate(taken))
        elif name in ("fma.rn.bf16x2", "mul.rn.bf16x2"):
            factors = [halves(one) for one in names]
            added = factors[2] if name.startswith("fma") else [0.0, 0.0]
            low, high = (rounded(factors[0][i] * factors[1][i] + added[i]) for i in (0, 1))
            values[out] = low | high << 16
        else:
            raise ValueError(f"{name}: wanted an instruction that is known here")
    return values


def run_instructions(folder: str) -> tuple[float, float]:
    """(largest error of what the instructions make of every byte, seconds)."""
    _, _, packed = load(folder)
    begun, worst = time.monotonic(), 0.0
    scale, offset = rounded(0.0123), rounded(-0.456)
    for signed in (False, True):
        program = (packed.SIGNED_BYTES if signed else packed.BYTES).value
        largest = 256 if signed else 128
        for first in range(largest):
            q = [(first + 37 * at) % largest for at in range(4)]
            inputs = {"$2": sum(byte << 8 * at for at, byte in enumerate(q))}
            inputs |= {"$3": scale * 0x10001, "$4": offset * 0x10001}
            made = execute(program, inputs)
            pairs = made["$0"] | made["$1"] << 32
            for at, byte in enumerate(q):
                number = byte - 256 if signed and byte > 127 else byte
                wanted = number * bfloat16(scale) + (0.0 if signed else bfloat16(offset))
                got = bfloat16(pairs >> 16 * at & 0xFFFF)
                if not (error := abs(got - bfloat16(rounded(wanted)))) <= worst:
                    return error, time.monotonic() - begun
    return worst, time.monotonic() - begun


def sorted_by_expert(torch: Any, ids: Any, block: int) -> tuple[Any, Any, Any]:
    """What vLLM's moe_align_block_size returns, the rows of no expert left out."""
    flat, rows, experts = ids.flatten(), [], []
    for expert in range(EXPERTS):
        mine = (flat == expert).nonzero().flatten().tolist()
        mine += [flat.numel()] * (-len(mine) % block)
        rows += mine
        experts += [expert] * (len(mine) // block)
    unused = [-1] * 2  # blocks that are there, and not used
    padded = torch.tensor([len(rows)], dtype=torch.int32)
    rows += [flat.numel()] * block * len(unused)
    ints = [torch.tensor(values, dtype=torch.int32) for values in (rows, experts + unused)]
    return ints[0], ints[1], padded


def run_packed_experts(
    folder: str, case: tuple[str, int, int, int, str, bool]
) -> tuple[float, float]:
    """(difference from the reference, seconds)."""
    _, _, packed = load(folder)
    import torch

    begun = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    kind, tokens, rows, columns, choice, weighted = case
    w, known = weights(torch, TYPES[kind], rows, columns)
    x, factors = torch.randn(tokens, columns), torch.rand(tokens * 2)
    ids = route(torch, tokens, choice)
    tile = packed.experts_tile_for(ids.numel(), EXPERTS)
    arrays = sorted_by_expert(torch, ids, tile.tokens)
    got = packed.ggml_moe_packed(
        *(x, w, *arrays, TYPES[kind], rows, 2, tokens),
        tile=tile,
        weights=factors if weighted else None,
    )
    wanted = torch.full((tokens * 2, rows), torch.nan)
    for row, expert in enumerate(ids.flatten().tolist()):
        if 0 <= expert < EXPERTS:
            wanted[row] = (known[expert] @ x[row // 2]) * (factors[row] if weighted else 1)
    if not torch.equal(got.isnan(), wanted.isnan()):
        raise AssertionError("rows of no expert are written, or others are not")
    error = float((got - wanted).nan_to_num().norm() / wanted.nan_to_num().norm())
    return error, time.monotonic() - begun


def main() -> int:
    """Run the cases side by side; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", nargs="?", help="of vllm_gguf_plugin (default: the installed)")
    folder = plugin_folder(parser.parse_args().folder)
    failed = 0
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=fresh) as pool:
        results = [
            (
                "{} {}, {} tokens, {} x {}, {} {}".format(*case).strip(),
                pool.submit(run, folder, case),
            )
            for case in CASES
        ]
        results += [
            ("linear {}, {} tokens, {} x {}".format(*one), pool.submit(run_linear, folder, one))
            for one in LINEAR
        ]
        results += [
            (
                "packed {}, {} tokens, {} x {}, {} {}".format(*one[:-1], one[-1] or "").strip(),
                pool.submit(run_packed, folder, one),
            )
            for one in PACKED
        ]
        results.append(("packed instructions, every byte", pool.submit(run_instructions, folder)))
        results += [
            (
                "packed experts {}, {} tokens, {} x {}, {} {}".format(*one),
                pool.submit(run_packed_experts, folder, one),
            )
            for one in PACKED_EXPERTS
        ]
        for name, result in results:
            try:
                error, seconds = result.result()
                right = error < TOLERANCE  # not so of NaN
                text = f"error {error:.1e} [{seconds:.0f} s]"
            except Exception as fault:
                right, text = False, repr(fault)[:200]
            failed += not right
            print(f"{'PASS' if right else 'FAIL'} {name:<52} {text}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
