# SPDX-License-Identifier: Apache-2.0
"""Compute with the kernels of linear layers, and of experts and few tokens, without a GPU.

    python tests/gpu/interpret.py [FOLDER of vllm_gguf_plugin]

Run it with the Python of a release's environment (torch, Triton, gguf, the patched plugin). Small
layers in Triton's interpreter against gguf's dequantisation in float32, activations in float32 too
(the interpreter has no products of bfloat16), so that what remains is rounding. Weights end where a
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
import sys
import time
import types
from typing import Any

from kernels import BLOCK, SCALES, TYPES, plugin_folder

TOLERANCE = 2e-5  # relative to the norm
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
PROCESSORS = 8  # of the card that they think they have: so several programs share out columns


def load(folder: str) -> tuple[Any, Any]:
    """The modules with the kernels of experts and of linear layers, for the interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    package = types.ModuleType("vllm_gguf_plugin")
    package.__path__ = [folder]
    sys.modules["vllm_gguf_plugin"] = package
    from vllm_gguf_plugin.triton.fused_moe import expert_decode
    from vllm_gguf_plugin.triton.gemm import tensor_cores

    return expert_decode, tensor_cores


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
    decode, _ = load(folder)
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
    _, linear = load(folder)
    import torch

    begun = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # torch.empty gives NaN
    linear._multiprocessors = lambda _: PROCESSORS
    kind, tokens, rows, columns = case
    w, known = weights(torch, TYPES[kind], rows, columns, experts=1)
    x = torch.randn(tokens, columns)
    got, wanted = linear.ggml_mul_mat_tensor_cores(w[0], x, TYPES[kind], rows), x @ known[0].T
    return float((got - wanted).norm() / wanted.norm()), time.monotonic() - begun


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
