# SPDX-License-Identifier: Apache-2.0
"""Check and time the sparse attention that patch 0020 adds, against float32.

    python tests/gpu/attention.py               on an NVIDIA GPU
    python tests/gpu/attention.py --time        times it there instead, beside FLASHMLA_SPARSE
    python tests/gpu/attention.py --interpret   on any machine, small cases in Triton's interpreter

Without an NVIDIA GPU the first two say that nothing was checked and end with 0. Run it with the
Python of a release's environment (torch, Triton, the patched plugin; vLLM for the comparison). One
line a case, and exit status 1 when one failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import load_ops, milliseconds, plugin_folder

# The kernel's inputs are bfloat16 and so are its weights in the second product: 0.3 % of the norm.
# Triton's interpreter cuts where a GPU rounds, so there it is up to 0.6 %.
TOLERANCE = {"cuda": 0.006, "cpu": 0.01}
SCALE = 256**-0.5  # of GLM-5's query heads, 192 + 64 values
TOPK = 2048


@dataclass(frozen=True)
class Case:
    """A call: tokens, heads of a rank, chosen rows, and what of them is there.

    ``valid``: share of the chosen rows that are none of -1; ``parts``: None as the plugin divides.
    """

    tokens: int
    heads: int
    topk: int = TOPK
    valid: float = 1.0
    rows: int = 65536
    parts: int | None = None

    def __str__(self) -> str:
        parts = "" if self.parts is None else f", {self.parts} parts"
        return f"{self.tokens} x {self.heads} heads, {self.valid:.0%} of {self.topk}{parts}"


SMALL = [
    Case(1, 8, 256, rows=300),
    Case(1, 8, 256, rows=300, parts=8),
    Case(2, 8, 100, valid=0.3, rows=300, parts=4),  # a part without a row, topk that ends in one
    Case(3, 16, 96, valid=0.7, rows=300),
    Case(1, 8, 64, valid=0.0, rows=300, parts=2),
    Case(2, 64, 64, valid=0.9, rows=300, parts=2),
    Case(1, 8, 128, rows=300, parts=8),  # 16 rows a part
    Case(5, 24, 40, rows=300),  # heads that fill no group
]
LARGE = [
    *(Case(tokens, heads) for heads in (8, 16, 64) for tokens in (1, 2, 4, 64, 512)),
    *(Case(tokens, 8, valid=valid) for tokens in (1, 64) for valid in (0.5, 0.01, 0.0)),
    *(Case(4, 8, parts=parts) for parts in (1, 2, 16, 64, 128)),
    Case(8192, 8),
    # the rows lie beyond 2**31 bytes
    Case(4, 8, rows=4_000_000),
]
TIMED = [
    *(Case(tokens, heads) for heads in (8, 64) for tokens in (1, 4, 16, 64, 512, 8192)),
    *(Case(tokens, 8, parts=parts) for tokens in (1, 4) for parts in (8, 16, 32, 64, 128)),
]


def products_of_bfloat16() -> None:
    """Let Triton's interpreter multiply bfloat16, which it holds as whole numbers (3.8)."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16 or handle.data.dtype != np.uint16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    builder.create_dot = lambda self, a, b, *rest: multiply(self, wide(a), wide(b), *rest)


def pack(torch: Any, rows: Any) -> tuple[Any, Any]:
    """576 bfloat16 values a row as 656 bytes, and as what these mean in float32."""
    count = rows.shape[0]
    latent = rows[:, :512].float().view(count, 4, 128)
    scale = latent.abs().amax(-1) / 448
    eighth = (latent / scale[..., None]).to(torch.float8_e4m3fn)
    packed = torch.empty(count, 656, dtype=torch.uint8, device=rows.device)
    packed[:, :512] = eighth.view(count, 512).view(torch.uint8)
    packed[:, 512:528] = scale.view(torch.uint8)
    packed[:, 528:] = rows[:, 512:].contiguous().view(torch.uint8)
    back = (eighth.float() * scale[..., None]).view(count, 512)
    return packed, torch.cat([back, rows[:, 512:].float()], 1)


def reference(torch: Any, query: Any, meant: Any, chosen: Any) -> Any:
    """Token by token, in float32, over the rows that are there."""
    out = torch.zeros(*query.shape[:2], 512, device=query.device)
    for token, numbers in enumerate(chosen):
        rows = meant[numbers[numbers >= 0].long()]
        if len(rows):
            weight = torch.softmax(query[token].float() @ rows.T * SCALE, -1)
            out[token] = weight @ rows[:, :512]
    return out


def inputs(torch: Any, case: Case, device: str) -> tuple[Any, Any, Any]:
    """Query, rows and the numbers of the chosen ones; the -1 lie among them."""
    query = torch.randn(case.tokens, case.heads, 576, device=device).bfloat16()
    rows = torch.randn(case.rows, 576, device=device, dtype=torch.bfloat16)
    shape = (case.tokens, case.topk)
    chosen = torch.randint(0, case.rows, shape, device=device, dtype=torch.int32)
    chosen[torch.rand(shape, device=device) >= case.valid] = -1
    chosen[:, -1] = -1 if case.valid < 1 else case.rows - 1
    return query, rows, chosen


def check(torch: Any, attention: Any, case: Case, fp8: bool, device: str) -> str:
    """What is said of a case that is right; an AssertionError of one that is not."""
    query, rows, chosen = inputs(torch, case, device)
    meant = rows.float() if not fp8 else None
    if fp8:
        rows, meant = pack(torch, rows)
    # the layout that the engine gives: heads before tokens, as a product of batches leaves them
    latent = query[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    arguments = (latent, query[..., 512:], rows, chosen, SCALE, case.parts)
    got = attention.sparse_mla(*arguments)
    assert torch.equal(got, attention.sparse_mla(*arguments)), "two calls differ"
    wanted = reference(torch, query, meant, chosen)
    empty = ~(chosen >= 0).any(1)
    assert not got[empty].any(), "a token without rows is not zero"
    if bool(empty.all()):
        return "zeros"
    error = float((got.float() - wanted).norm() / wanted.norm())
    assert error < TOLERANCE[device], f"error {error:.4f}"
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention.sparse_mla(*arguments)
        out.zero_()
        graph.replay()
        assert torch.equal(out, got), "another result in a CUDA graph"
    return f"error {error:.4f}"


def flashmla(query: Any, rows: Any, chosen: Any, fp8: bool) -> Callable[[], Any] | None:
    """The same by FLASHMLA_SPARSE's kernels, None where they do not run."""
    try:
        from vllm.v1.attention.ops import flashmla as ops

        if not fp8:
            return lambda: ops.flash_mla_sparse_fwd(query, rows[:, None], chosen[:, None], SCALE)
        heads = query.shape[1]
        padded = query.new_zeros(query.shape[0], -(-heads // 64) * 64, 576)
        padded[:, :heads] = query
        metadata, _ = ops.get_mla_metadata()
        pages = rows.view(-1, 64, 1, rows.shape[1])
        return lambda: ops.flash_mla_with_kvcache(
            q=padded[None],
            k_cache=pages,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            tile_scheduler_metadata=metadata,
            is_fp8_kvcache=True,
            indices=chosen[None],
            softmax_scale=SCALE,
        )
    except Exception as error:
        print(f"FLASHMLA_SPARSE is not there: {type(error).__name__}: {error}")
        return None


def time_case(torch: Any, attention: Any, case: Case, fp8: bool) -> str:
    """Milliseconds, and GB/s of the rows that the tokens chose, each counted once a token."""
    query, rows, chosen = inputs(torch, case, "cuda")
    if fp8:
        rows, _ = pack(torch, rows)
    size = case.tokens * case.topk * rows.shape[1] * rows.element_size()
    latent, rotated = query[..., :512].contiguous(), query[..., 512:].contiguous()
    ours = milliseconds(
        torch, lambda: attention.sparse_mla(latent, rotated, rows, chosen, SCALE, case.parts)
    )
    said = f"{ours:.4f} ms, {size / ours / 1e6:.0f} GB/s"
    other = None if case.parts else flashmla(query, rows, chosen, fp8)
    if other is not None:
        try:
            theirs = milliseconds(torch, other)
            said += f"; FLASHMLA_SPARSE {theirs:.4f} ms, {size / theirs / 1e6:.0f} GB/s"
        except Exception as error:
            said += f"; FLASHMLA_SPARSE: {type(error).__name__}: {str(error)[:80]}"
    return said


def main() -> int:
    """Run the cases; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plugin", help="folder of the package vllm_gguf_plugin")
    parser.add_argument("--interpret", action="store_true", help="without a GPU")
    parser.add_argument("--time", action="store_true", help="time it instead of checking it")
    arguments = parser.parse_args()
    device = "cpu" if arguments.interpret else "cuda"
    if device == "cuda" and not Path("/proc/driver/nvidia/version").exists():
        print("no NVIDIA GPU (no /proc/driver/nvidia/version): nothing was checked")
        return 0
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are read
        products_of_bfloat16()
    import torch

    load_ops(plugin_folder(arguments.plugin))
    from vllm_gguf_plugin.triton.attention import sparse_mla as attention

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    failed = 0
    for case in TIMED if arguments.time else SMALL if arguments.interpret else LARGE:
        for fp8 in (False, True):
            try:
                if arguments.time:
                    said = time_case(torch, attention, case, fp8)
                else:
                    said = check(torch, attention, case, fp8, device)
                verdict = "PASS"
            except Exception as error:
                verdict, said = "FAIL", f"{type(error).__name__}: {str(error)[:150]}"
                failed += 1
            print(f"{verdict} {'fp8' if fp8 else 'bf16':<4} {case}: {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
