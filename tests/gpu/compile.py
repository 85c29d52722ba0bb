# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels that the series adds for sm_90 and sm_120, without a GPU.

    python tests/gpu/compile.py [FOLDER of vllm_gguf_plugin]

Run it with the Python of a release's environment (torch, Triton, the patched plugin). A block may
have 101,376 bytes of shared memory on an RTX PRO 6000 (compute capability 12.0), and this is held
for both targets. One line a kernel, and exit status 1 when one does not fit.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from kernels import TYPES, load_ops, plugin_folder

LIMIT = 101_376  # bytes


def shared_memory() -> dict[str, int]:
    """Bytes of shared memory a block, by capability, type and block size."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from vllm_gguf_plugin.triton.fused_moe import large_batch

    kernel = large_batch.large_batch_kernel
    constants = ("QTYPE", "BLOCK_M", "BLOCK_N")
    signature = {
        **dict.fromkeys(kernel.arg_names, "i32"),
        **dict.fromkeys(constants, "constexpr"),
        **dict.fromkeys(("x_ptr", "y_ptr"), "*bf16"),
        **dict.fromkeys(("sorted_ids_ptr", "expert_ids_ptr", "num_padded_ptr"), "*i32"),
        "w_ptr": "*u8",
    }
    # what Triton itself finds to be multiples of 16 for GLM-5's shapes
    aligned = [name for name, kind in signature.items() if kind.startswith("*")]
    aligned += ["n", "stride_xm", "stride_we", "stride_ym"]
    options = {
        "num_warps": large_batch.LARGE_BATCH_NUM_WARPS,
        "num_stages": large_batch.LARGE_BATCH_NUM_STAGES,
    }
    sizes = {large_batch.large_batch_block_m(rows, 256) for rows in range(0, 65537, 512)}
    result = {}
    for capability in (90, 120):
        for name, quant_type in TYPES.items():
            if quant_type not in large_batch.LARGE_BATCH_TYPES:
                continue
            names = aligned + (["stride_wn"] if name in ("Q4_K", "Q5_K") else [])
            attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in names}
            for size in sorted(sizes):
                values = (quant_type, size, large_batch.LARGE_BATCH_BLOCK_N)
                source = ASTSource(
                    kernel, signature, dict(zip(constants, values, strict=True)), attributes
                )
                compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
                result[f"sm_{capability} {name} {size} rows"] = compiled.metadata.shared
    return result


def attention_shared_memory() -> dict[str, int]:
    """Bytes of shared memory a block of the sparse attention, by capability, KV cache and heads."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from vllm_gguf_plugin.triton.attention import sparse_mla as attention

    def compiled(kernel: Any, types: dict[str, str], values: dict[str, Any], warps: int) -> int:
        signature = {
            **dict.fromkeys(kernel.arg_names, "i32"),
            **dict.fromkeys(values, "constexpr"),
            **types,
        }
        aligned = [name for name in types if name.endswith("_ptr")]
        # GLM-5's strides and 2,048 chosen rows
        aligned += [name for name in kernel.arg_names if name.startswith("stride_")]
        aligned += [name for name in ("topk", "rows_a_part") if name in kernel.arg_names]
        attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        options = {"num_warps": warps, "num_stages": attention.NUM_STAGES}
        source = ASTSource(kernel, signature, values, attributes)
        target = GPUTarget("cuda", capability, 32)
        return int(triton.compile(source, target, options).metadata.shared)

    result = {}
    for capability in (90, 120):
        for fp8 in (False, True):
            for heads, parts in ((8, 1), (8, 64), (8, 128), (64, 1), (64, 16)):
                size = attention.block_h(heads)
                out = "*fp32" if parts > 1 else "*bf16"
                types = {
                    **dict.fromkeys(("q_latent_ptr", "q_rotated_ptr"), "*bf16"),
                    "cache_ptr": "*u8" if fp8 else "*bf16",
                    "chosen_ptr": "*i32",
                    **dict.fromkeys(("out_ptr", "log_ptr"), out),
                    "scale": "fp32",
                }
                step = attention.block_n(2048, parts)
                values = {"FP8": fp8, "PARTS": parts, "BLOCK_H": size, "BLOCK_N": step}
                name = f"sm_{capability} attention {'fp8' if fp8 else 'bf16'} {heads} x {parts}"
                result[name] = compiled(
                    attention.sparse_mla_kernel, types, values, attention.num_warps(size)
                )
        types = {"parts_ptr": "*fp32", "log_ptr": "*fp32", "out_ptr": "*bf16"}
        values = {"PARTS": 128, "D": attention.SCALED}
        result[f"sm_{capability} attention join"] = compiled(
            attention.join_parts_kernel, types, values, 4
        )
    return result


def main() -> int:
    """Compile all and compare; see the module's docstring."""
    load_ops(plugin_folder(sys.argv[1] if len(sys.argv) > 1 else None))
    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # so that it is compiled each time
        used = {**shared_memory(), **attention_shared_memory()}
    for name, size in used.items():
        verdict = "PASS" if size <= LIMIT else "FAIL"
        print(f"{verdict} {name:<32} {size} of {LIMIT} bytes of shared memory")
    return 0 if used and max(used.values()) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
