# SPDX-License-Identifier: Apache-2.0
"""Which attention backend vLLM's own selector takes for GLM-5 on an RTX PRO 6000, without a GPU.

    python tests/gpu/selector.py FOLDER DTYPE KV_CACHE_DTYPE

The two types are those that the production stack serves with; others follow from the cases here.
FOLDER holds the production stack's vLLM (``uv pip install --no-deps --target FOLDER vllm==…``). Run
it with the Python of any environment that has vLLM's dependencies and the patched plugin: vLLM's
sources are imported from FOLDER. The hardware boundary is stood in for: the card's compute
capability, vLLM's compiled libraries, and whether FlashInfer is there. One line a case, and exit
status 1 when one differs.
"""

from __future__ import annotations

import argparse
import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

RTX_PRO_6000 = (12, 0)  # compute capability


@dataclass(frozen=True)
class Case:
    """A configuration, and the name of the backend or what the refusal says."""

    about: str
    wanted: str
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    index_topk: int = 2048
    flashinfer: bool = True
    decode_context_parallel: bool = False
    backend: str | None = None  # --attention-backend
    capability: tuple[int, int] = RTX_PRO_6000


SM120 = "FLASHINFER_MLA_SPARSE_SM120"
TRITON = "TRITON_MLA_SPARSE"  # patch 0020
CASES = [
    Case("what the stack serves with", SM120),
    Case("KV cache by default", SM120, kv_cache_dtype="auto"),
    Case("KV cache packed", SM120, kv_cache_dtype="fp8_ds_mla"),
    Case("blocks of 64 tokens", SM120, block_size=64),
    Case("blocks of 32 tokens", "block_size not supported", block_size=32),
    Case("KV cache in bfloat16", "kv_cache_dtype not supported", kv_cache_dtype="bfloat16"),
    Case("float16", "dtype not supported", dtype="float16"),
    Case("another index_topk", "requires index_topk=2048; got 1024", index_topk=1024),
    Case("without FlashInfer", "requires FlashInfer's sparse MLA decode API", flashinfer=False),
    Case("decode context parallel", "No valid attention backend", decode_context_parallel=True),
    Case("fallback", TRITON, backend="CUSTOM", kv_cache_dtype="fp8_ds_mla"),
    Case("fallback, KV cache in bfloat16", TRITON, backend="CUSTOM", kv_cache_dtype="bfloat16"),
    Case("fallback, KV cache by default", TRITON, backend="CUSTOM", kv_cache_dtype="auto"),
    Case(
        "fallback without FlashInfer",
        TRITON,
        backend="CUSTOM",
        kv_cache_dtype="fp8_ds_mla",
        flashinfer=False,
    ),
    Case(
        "fallback, another index_topk",
        TRITON,
        backend="CUSTOM",
        kv_cache_dtype="fp8_ds_mla",
        index_topk=1024,
    ),
    Case(
        "fallback on an H200",
        TRITON,
        backend="CUSTOM",
        kv_cache_dtype="fp8_ds_mla",
        capability=(9, 0),
    ),
    Case("fallback, KV cache not packed", "fp8_ds_mla", backend="CUSTOM", kv_cache_dtype="fp8"),
    Case(
        "fallback, float16",
        "dtype not supported",
        backend="CUSTOM",
        kv_cache_dtype="fp8_ds_mla",
        dtype="float16",
    ),
    Case(
        "fallback, blocks of 32 tokens",
        "block_size not supported",
        backend="CUSTOM",
        kv_cache_dtype="fp8_ds_mla",
        block_size=32,
    ),
    Case(
        "fallback, decode context parallel",
        "DCP not supported",
        backend="CUSTOM",
        kv_cache_dtype="fp8_ds_mla",
        decode_context_parallel=True,
    ),
    Case(
        "fallback on an A100",
        "compute capability not supported",
        backend="CUSTOM",
        kv_cache_dtype="fp8_ds_mla",
        capability=(8, 0),
    ),
]


class _CompiledLibraryStandIns:
    """Import hook: empty modules in the place of vLLM's compiled ones, which need CUDA."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> object:
        """Spec of a compiled module of vLLM, None for all others."""
        parent, _, last = name.rpartition(".")
        if parent == "vllm" and last.startswith(("_C", "_moe_C")):
            return ModuleSpec(name, self)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """The empty module."""
        return types.ModuleType(spec.name)

    def exec_module(self, _module: types.ModuleType) -> None:
        """Nothing to run."""


def choose(case: Case, dtype: str, kv_cache_dtype: str) -> str:
    """Name of the backend that vLLM takes, or its refusal."""
    import torch
    from vllm.config import vllm as config
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils import flashinfer
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    class CardStandIn(CudaPlatformBase):  # type: ignore[misc]
        device_name = "stand-in for a card"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:  # noqa: ARG003 - its signature
            return DeviceCapability(*case.capability)

    flashinfer.has_flashinfer_sparse_mla_sm120 = lambda: case.flashinfer
    # what the backends ask of vLLM's configuration; a whole one wants a device
    config._current_vllm_config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            hf_text_config=types.SimpleNamespace(
                index_topk=case.index_topk,
                kv_lora_rank=512,
                qk_nope_head_dim=192,
                qk_rope_head_dim=64,
            )
        ),
        parallel_config=types.SimpleNamespace(
            prefill_context_parallel_size=1,
            decode_context_parallel_size=2 if case.decode_context_parallel else 1,
        ),
        cache_config=None,
    )
    try:
        path = CardStandIn.get_attn_backend_cls(
            AttentionBackendEnum[case.backend] if case.backend else None,
            AttentionSelectorConfig(
                head_size=576,  # kv_lora_rank + qk_rope_head_dim
                dtype=getattr(torch, case.dtype or dtype),
                kv_cache_dtype=case.kv_cache_dtype or kv_cache_dtype,
                block_size=case.block_size,
                use_mla=True,
                use_sparse=True,
                use_dcp=case.decode_context_parallel,
            ),
            num_heads=8,  # of one rank of eight
        )
    except ValueError as error:
        return str(error)
    module, _, name = path.rpartition(".")
    return str(getattr(sys.modules[module], name).get_name())


def main() -> int:
    """Choose for every case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", help="with the production stack's vLLM")
    parser.add_argument("dtype", help="that the stack serves with: bfloat16")
    parser.add_argument("kv_cache_dtype", help="that the stack serves with: fp8")
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.folder)
    sys.meta_path.insert(0, _CompiledLibraryStandIns())
    import vllm
    import vllm_gguf_plugin

    vllm_gguf_plugin.register()
    failed = 0
    print(f"vllm {vllm.__version__}")
    for case in CASES:
        chosen = choose(case, arguments.dtype, arguments.kv_cache_dtype)
        refused = " " in chosen
        passed = case.wanted in chosen if refused else case.wanted == chosen
        failed += not passed
        shown = f"refused: {case.wanted}" if refused and passed else chosen
        print(f"{'PASS' if passed else 'FAIL'} {case.about}: {shown}")
    print(f"{len(CASES) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
