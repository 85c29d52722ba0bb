# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels that the series adds for sm_90 and sm_120, without a GPU.

    python tests/gpu/compile.py [--sass] [--all] [FOLDER of vllm_gguf_plugin]

Run it with the Python of a release's environment (torch, Triton, the patched plugin). A block may
have 101,376 bytes of shared memory on an RTX PRO 6000 (compute capability 12.0), and this is held
for both targets. One line a kernel, and exit status 1 when one does not fit. With --sass also what
the assembler made of the expert kernels for few tokens: registers, bytes of the stack, and the
instructions of the loop over the weights, for each weight and by kind. With --all also of the tiles
that tests/gpu/tune_experts.py and tune_linear.py try.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kernels import TYPES, load_ops, plugin_folder

LIMIT = 101_376  # bytes
CAPABILITIES = (90, 120)
COLUMNS = {"gate_up": 6144, "down": 256}  # values of a row, one rank of eight
Program = tuple[Any, dict[str, str], dict[str, Any], list[str], dict[str, int]]


def program(
    kernel: Any,
    constants: dict[str, Any],
    types: dict[str, str],
    aligned: list[str],
    **options: int,
) -> Program:
    """What to compile: pointers are multiples of 16, `aligned` too; the rest is 32 bits."""
    signature = {**dict.fromkeys(kernel.arg_names, "i32"), **types}
    signature |= dict.fromkeys(constants, "constexpr")
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    return kernel, signature, constants, [*pointers, *aligned], options


def large_batch_programs() -> dict[str, Program]:
    """By type and block size."""
    from vllm_gguf_plugin.triton.fused_moe import large_batch

    types = {**dict.fromkeys(("x_ptr", "y_ptr"), "*bf16"), "w_ptr": "*u8"}
    types |= dict.fromkeys(("sorted_ids_ptr", "expert_ids_ptr", "num_padded_ptr"), "*i32")
    found = {}
    for name, quant_type in TYPES.items():
        if quant_type not in large_batch.LARGE_BATCH_TYPES:
            continue
        # what Triton itself finds to be multiples of 16 for GLM-5's shapes
        aligned = ["n", "stride_xm", "stride_we", "stride_ym"]
        aligned += ["stride_wn"] if name in ("Q4_K", "Q5_K") else []
        rows = range(0, 65537, 512)
        for size in sorted({large_batch.large_batch_block_m(row, 256) for row in rows}):
            constants = {
                "QTYPE": quant_type,
                "BLOCK_M": size,
                "BLOCK_N": large_batch.LARGE_BATCH_BLOCK_N,
            }
            found[f"{name} {size} rows"] = program(
                large_batch.large_batch_kernel,
                constants,
                types,
                aligned,
                num_warps=large_batch.LARGE_BATCH_NUM_WARPS,
                num_stages=large_batch.LARGE_BATCH_NUM_STAGES,
            )
    return found


def linear_programs(every: bool) -> dict[str, Program]:
    """Linear layers, by type, tile and whether several programs share out the columns."""
    from vllm_gguf_plugin.triton.gemm import tensor_cores as linear

    chosen = [tile for _, tile in linear.TILES]
    if every:
        chosen += [linear.Tile(t.tokens, *rest) for t in chosen for rest in linear.CANDIDATES]
    found = {
        "linear sum": program(
            linear.sum_kernel,
            {"BLOCK": linear.SUM_BLOCK},
            {"y_ptr": "*fp32", "out_ptr": "*bf16"},
            [],
            num_warps=4,
        )
    }
    for name, quant_type in TYPES.items():
        if quant_type not in linear.LARGE_BATCH_TYPES:
            continue
        aligned = ["n", "stride_xm", *(["stride_wn"] if name in ("Q4_K", "Q5_K") else [])]
        for tile, shared in ((t, s) for t in dict.fromkeys(chosen) for s in (False, True)):
            types = {"x_ptr": "*bf16", "w_ptr": "*u8", "y_ptr": "*fp32" if shared else "*bf16"}
            label = f"linear {name} {'/'.join(map(str, tile))}{' shared' if shared else ''}"
            found[label] = program(
                linear.linear_kernel,
                {"QTYPE": quant_type, "BLOCK_M": tile.tokens, "BLOCK_N": tile.rows},
                types,
                aligned,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
    return found


def packed_programs() -> dict[str, Program]:
    """Linear layers and experts unpacked in pairs, by type and tile."""
    from vllm_gguf_plugin.triton.gemm import packed

    found = {}
    for name in TYPES:
        if TYPES[name] not in packed.PACKED_TYPES:
            continue
        for routed, tiles in ((False, packed.TILES), (True, packed.EXPERTS_TILES)):
            for tile in dict.fromkeys(tile for _, tile in tiles):
                constants = {
                    **{"QTYPE": TYPES[name], "N": tile.tokens, "P": tile.parts, "M": tile.rows},
                    "STAGES": tile.stages,
                }
                types = {"x_ptr": "*bf16", "w_ptr": "*i32", "y_ptr": "*bf16"}
                aligned = ["n", "stride_xm", "stride_wn"]
                if routed:
                    constants["WEIGHTED"] = True
                    types |= dict.fromkeys(
                        ("sorted_ids_ptr", "expert_ids_ptr", "num_padded_ptr"), "*i32"
                    )
                    types["weights_ptr"] = "*fp32"
                    aligned.append("stride_we")
                else:
                    constants["COLUMNS"] = tile.columns
                found[f"packed{' experts' * routed} {name} {'/'.join(map(str, tile))}"] = program(
                    packed.packed_experts_kernel if routed else packed.packed_kernel,
                    constants,
                    types,
                    aligned,
                    num_warps=tile.parts,
                    num_stages=3,
                    maxnreg=tile.registers,
                )
    return found


def decode_programs(every: bool) -> dict[str, Program]:
    """Experts of few tokens, by matrix, type, way and tile."""
    from vllm_gguf_plugin.triton.fused_moe import expert_decode as decode

    tiles = {"gate_up": decode.GATE_UP, "down": decode.DOWN}
    more = {"gate_up": decode.GATE_UP_CANDIDATES, "down": decode.DOWN_CANDIDATES}
    found = {
        "sum": program(
            decode.sum_kernel,
            {"BLOCK": 512},
            {"rows_ptr": "*fp32", "out_ptr": "*bf16", "ids_ptr": "*i32"},
            ["num_experts", "hidden"],
            num_warps=4,
        )
    }
    for matrix, columns in COLUMNS.items():
        for pairwise in (True, False):
            chosen = list(dict.fromkeys(tiles[matrix][:2] if pairwise else tiles[matrix][2:]))
            wanted = [*chosen, *(more[matrix][not pairwise] if every else ())]
            for name, one in ((n, t) for n in TYPES for t in wanted):
                if TYPES[name] not in decode.EXPERT_DECODE_TYPES:
                    continue
                options = one.of(TYPES[name]).options()
                compiler = {"num_warps": options.pop("num_warps"), "num_stages": 3}
                if registers := options.pop("maxnreg"):
                    compiler["maxnreg"] = registers
                constants = {"QTYPE": TYPES[name], "STEPS": columns // 256, "TOP_K": 8}
                constants |= {"PAIRWISE": pairwise, **options}
                types = {"w_ptr": "*i32", "ids_ptr": "*i32", "act_ptr": "*bf16"}
                if matrix == "gate_up":
                    kernel, aligned = decode.gate_up_kernel, ["num_experts", "inner"]
                    types["x_ptr"] = "*bf16"
                else:
                    kernel, aligned = decode.down_kernel, ["num_experts", "hidden"]
                    types |= {"weights_ptr": "*fp32", "out_ptr": "*bf16" if pairwise else "*fp32"}
                    constants["LOOPS"] = one.loops
                way = "pairs" if pairwise else "expert"
                label = f"{matrix} {name} {way} {'/'.join(map(str, one))}"
                found[label] = program(kernel, constants, types, aligned, **compiler)
    return found


def attention_programs() -> dict[str, Program]:
    """Sparse attention, by KV cache, heads and parts."""
    from vllm_gguf_plugin.triton.attention import sparse_mla as attention

    kernel = attention.sparse_mla_kernel
    # GLM-5's strides and 2,048 chosen rows
    aligned = [name for name in kernel.arg_names if name.startswith("stride_")]
    aligned += ["topk", "rows_a_part"]
    found = {}
    for fp8 in (False, True):
        for heads, parts in ((8, 1), (8, 64), (8, 128), (64, 1), (64, 16)):
            types = {
                **dict.fromkeys(("q_latent_ptr", "q_rotated_ptr"), "*bf16"),
                "cache_ptr": "*u8" if fp8 else "*bf16",
                "chosen_ptr": "*i32",
                **dict.fromkeys(("out_ptr", "log_ptr"), "*fp32" if parts > 1 else "*bf16"),
                "scale": "fp32",
            }
            size = attention.block_h(heads)
            constants = {"FP8": fp8, "PARTS": parts, "BLOCK_H": size}
            constants["BLOCK_N"] = attention.block_n(2048, parts)
            found[f"attention {'fp8' if fp8 else 'bf16'} {heads} x {parts}"] = program(
                kernel,
                constants,
                types,
                aligned,
                num_warps=attention.num_warps(size),
                num_stages=attention.NUM_STAGES,
            )
    found["attention join"] = program(
        attention.join_parts_kernel,
        {"PARTS": 128, "D": attention.SCALED},
        {"parts_ptr": "*fp32", "log_ptr": "*fp32", "out_ptr": "*bf16"},
        [],
        num_warps=4,
        num_stages=attention.NUM_STAGES,
    )
    return found


def programs(every: bool) -> dict[str, Program]:
    """All of them by name."""
    return {
        **large_batch_programs(),
        **linear_programs(every),
        **packed_programs(),
        **decode_programs(every),
        **attention_programs(),
    }


def tool(name: str, *arguments: str) -> str:
    """What a tool prints that lies in Triton's package."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def loop(text: str) -> list[str]:
    """Instructions of the shortest loop with tensor core products, from nvdisasm's text."""
    labels: dict[str, int] = {}
    found: list[str] = []
    best: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"\s*(\.L_x_\d+):", line):
            labels[match[1]] = len(found)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            found.append(match[1])
            target = re.search(r"BRA.*(\.L_x_\d+)", match[1])
            if target and target[1] in labels:
                body = found[labels[target[1]] :]
                if any("HMMA" in one for one in body) and not 0 < len(best) < len(body):
                    best = body
    return best


def assembly(cubin: bytes, weights: int) -> str:
    """Registers, stack and instructions for each of the weights that a thread unpacks in a loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
        body = loop(tool("nvdisasm", "-c", file.name))
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    registers, stack = match.groups() if match else ("?", "?")
    kinds = collections.Counter(one.split()[0].split(".")[0] for one in body)
    wide = sum(one.startswith(("LDG", "LDGSTS")) and ".128" in one.split()[0] for one in body)
    loads = sum(kinds[kind] for kind in ("LDG", "LDGSTS"))
    return (
        f"{registers} registers, {stack} bytes of stack, {len(body) / weights:.2f} instructions a "
        f"weight, {wide} of {loads} global loads of 16 bytes, {kinds['LDL'] + kinds['STL']} spills "
        "in the loop; " + ", ".join(f"{kind} {n}" for kind, n in kinds.most_common(8))
    )


def compiled(folder: str, capability: int, name: str, every: bool, sass: bool) -> tuple[int, str]:
    """Bytes of shared memory a block, and what --sass adds."""
    load_ops(folder)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, signature, constants, aligned, options = programs(every)[name]
    places = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    with tempfile.TemporaryDirectory(prefix="triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # so that it is compiled each time
        source = ASTSource(kernel, signature, constants, places)
        made = triton.compile(source, GPUTarget("cuda", capability, 32), options)
        # a warp unpacks M rows of 256 values with its 32 threads
        text = assembly(made.asm["cubin"], constants["M"] * 8) if sass and "M" in constants else ""
    return int(made.metadata.shared), text


def main() -> int:
    """Compile all and compare; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", nargs="?", help="of vllm_gguf_plugin (default: the installed)")
    parser.add_argument("--sass", action="store_true", help="what the assembler made of it")
    parser.add_argument("--all", action="store_true", help="the tiles to be tried, too")
    parser.add_argument("--only", default=".", help="regular expression over the lines' names")
    arguments = parser.parse_args()
    folder = plugin_folder(arguments.folder)
    load_ops(folder)
    wrong = done = 0
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), mp_context=fresh) as pool:
        waiting = {
            f"sm_{capability} {name}": pool.submit(
                compiled, folder, capability, name, arguments.all, arguments.sass
            )
            for capability in CAPABILITIES
            for name in programs(arguments.all)
            if re.search(arguments.only, f"sm_{capability} {name}")
        }
        for name, one in waiting.items():
            size, text = one.result()
            done += 1
            wrong += size > LIMIT
            verdict = "PASS" if size <= LIMIT else "FAIL"
            print(f"{verdict} {name:<28} {size} of {LIMIT} bytes of shared memory", flush=True)
            if text:
                print(f"     {text}", flush=True)
    return 0 if done and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
