# SPDX-License-Identifier: Apache-2.0
"""Is what vLLM serves from a GGUF on a GPU right? Compared with transformers, and MTP with greedy.

    python tests/gpu/serving.py

Run it with the Python of a release's environment; it writes tiny GLM-5 models of its own. One line
a check: PASS or FAIL and what was measured; exit status 1 when one fails or an engine does not
answer. With --engines only the checks whose engines are all among them. Without an NVIDIA GPU it
says so and ends with 0.

- golden: log probabilities that the server gives the tokens of two texts of 512, against float32 on
  the dequantised weights. A random model has near-ties in its routers, where the smallest rounding
  picks another expert, so the largest difference says little. How much rounding costs is measured
  beside it: transformers in bfloat16 against float32, on the same tokens. Mean and median of what
  is served may be at most twice as far off. (Of 1,024 tokens: noise 0.025 and 0.010; a model with
  one of the eight heads of one layer zeroed 0.060 and 0.032.)
- Q4_K, Q5_K, Q6_K, Q8_0: the same for a model whose matrices are all of that type.
- sparse, long: texts of 4,000 and 16,384 tokens, so that the indexer chooses 2,048 of them. Same
  bound as golden, and beyond token 2,048 less than half as far off as transformers is when it
  attends to all tokens.
- fp8: sparse with the KV cache that the stack serves with. Its rounding is not in the noise of
  bfloat16, so four times that is allowed. (Short texts are attended to before they are rounded.)
- triton, triton fp8, triton mtp graphs: sparse, fp8, mtp graphs with the attention of patch 0020.
- drafts: a copy of the model in which every next token follows from the last one and the MTP layer
  foresees it, by construction. Then nearly every draft is accepted and the text is the one without
  speculation; with names or halves mixed up nearly none is.
- mtp: the model itself with and without speculation; a text may part at a near-tie only.
- experts: what is decoded with the expert kernels for few tokens is what is decoded without; a text
  may part at a near-tie only.
- packed forced: golden with the kernels of patch 0023.
- packed: what is decoded with them is what is decoded without; a text may part at a near-tie only.
- graphs, mtp graphs, drafts graphs: what is decoded in CUDA graphs, 16 texts at once and fewer
  toward their ends, is what is decoded without; graphs were captured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {"golden": (512, 512), "sparse": (4000,), "long": (16384,)}  # tokens of each text
CONTEXT = 16640  # tokens
TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")  # those of a Q4_K_XL file of GLM-5
CHUNK = 1024  # tokens that transformers computes at once
SPECULATION = {"method": "mtp", "num_speculative_tokens": 2}
TOPK = 2048  # index_topk of the model
FACTOR = 2.0  # times the noise of bfloat16
FACTORS = {"fp8": 4.0, "triton fp8": 4.0}  # where it is another
ACCEPTED = 0.9  # of the drafts that are right by construction
# A near-tie: the chosen token leads by less than bfloat16 moves a log probability (mtp: 99 of 100).
# In the model of `drafts` no router and no attention amplifies the rounding.
NEAR_TIE = {"drafts": 0.05, "mtp": 0.5}
STARTS, LENGTH = 16, 24  # texts that are continued, tokens of each continuation
MTP = {"speculative_config": SPECULATION}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 48]},
}
TRITON = {"attention_backend": "CUSTOM"}
CACHE = {"kv_cache_dtype": "fp8_ds_mla"}  # what the plan gives patch 0020 for fp8
# engine: model, texts whose tokens it judges, options
ENGINES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "model": ("model", ("golden", "sparse", "long"), {}),
    "model+mtp": ("model", (), MTP),
    "model+graphs": ("model", (), GRAPHS),
    "model+mtp+graphs": ("model", (), {**MTP, **GRAPHS}),
    "model+usual experts": ("model", (), {}),
    # steps of fewer tokens than from which patch 0024 dequantises instead
    "model+packed": ("model", ("golden",), {"max_num_batched_tokens": 512}),
    "model+fp8": ("model", ("sparse",), {"kv_cache_dtype": "fp8"}),
    "model+triton": ("model", ("sparse",), TRITON),
    "model+triton+fp8": ("model", ("sparse",), {**TRITON, **CACHE}),
    "model+triton+mtp+graphs": ("model", (), {**TRITON, **MTP, **GRAPHS}),
    "foreseeing": ("foreseeing", (), {}),
    "foreseeing+mtp": ("foreseeing", (), MTP),
    "foreseeing+mtp+graphs": ("foreseeing", (), {**MTP, **GRAPHS}),
    **{kind: (kind, ("golden",), {}) for kind in TYPES},
}

# check: engine, whose text is compared with transformers (model, text)
FORCED: dict[str, tuple[str, str]] = {
    **{name: ("model", f"model {name}") for name in TEXTS},
    **{kind: (kind, f"{kind} golden") for kind in TYPES},
    "packed forced": ("model+packed", "model golden"),
    "fp8": ("model+fp8", "model sparse"),
    "triton": ("model+triton", "model sparse"),
    "triton fp8": ("model+triton+fp8", "model sparse"),
}
# check: engine whose continuations are wanted, engine that is compared with it
SAME: dict[str, tuple[str, str]] = {
    "experts": ("model+usual experts", "model"),
    "packed": ("model", "model+packed"),
    "mtp": ("model", "model+mtp"),
    "drafts": ("foreseeing", "foreseeing+mtp"),
    "graphs": ("model", "model+graphs"),
    "mtp graphs": ("model", "model+mtp+graphs"),
    "drafts graphs": ("foreseeing", "foreseeing+mtp+graphs"),
    "triton mtp graphs": ("model", "model+triton+mtp+graphs"),
}

VARIABLES = {  # of an engine
    "model+usual experts": {"VLLM_GGUF_EXPERT_DECODE": "0"},
    "model+packed": {"VLLM_GGUF_PACKED": "2"},
}


def texts(name: str) -> list[list[int]]:
    """Random token ids of the tiny model, always the same."""
    generator = random.Random(name)  # noqa: S311 - no secret
    return [[generator.randrange(8, 512) for _ in range(n)] for n in TEXTS[name]]


def starts() -> list[list[int]]:
    """Short beginnings to be continued greedily."""
    generator = random.Random(1)  # noqa: S311 - no secret
    return [[generator.randrange(8, 500) for _ in range(5)] for _ in range(STARTS)]


def write_models(folder: Path) -> dict[str, Path]:
    """Tiny GLM-5 models, one file each, by name."""
    import gguf

    sys.path.insert(0, str(ROOT))
    from demo.tiny_glm5.model import FILE_STEM, Dimensions
    from demo.tiny_glm5.writer import write

    models = {}
    for name in ("model", *TYPES):
        kind = gguf.GGMLQuantizationType[name] if name in TYPES else None
        write(folder / name, 1, dim=Dimensions(context=CONTEXT), quantization_type=kind)
        models[name] = folder / name / f"{FILE_STEM}.gguf"
    models["foreseeing"] = foreseeing(models["model"], folder / "foreseeing")
    return models


def foreseeing(model: Path, target: Path) -> Path:
    """Copy of ``model``: the next token depends on the last one only, and the MTP layer knows it.

    Attention and feed-forward add nothing, so the last hidden state is the token's embedding. The
    MTP layer gets the embedding of the token after it, passes it on (eh_proj takes the first half)
    and ends in the same norm and head: it computes what the model computes one token later.
    """
    import gguf
    import numpy as np

    target.mkdir(parents=True, exist_ok=True)
    for path in model.parent.iterdir():
        if path.is_file() and path.suffix != ".gguf":
            shutil.copy(path, target)
    copy = target / model.name
    shutil.copyfile(model, copy)
    reader = gguf.GGUFReader(copy, "r+")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, tensor in tensors.items():
        if ".ffn_down" in name or name.endswith("attn_output.weight"):
            tensor.data[...] = 0
        elif name.endswith("nextn.enorm.weight"):
            tensor.data[...] = 1
        elif name.endswith("nextn.shared_head_norm.weight"):
            tensor.data[...] = tensors["output_norm.weight"].data
        elif name.endswith("nextn.eh_proj.weight"):
            width = tensor.data.shape[0]
            half = np.concatenate([np.eye(width), np.zeros((width, width))], axis=1)
            tensor.data[...] = gguf.quantize(half.astype(np.float32), tensor.tensor_type)
    return copy


def compared(engines: Collection[str]) -> dict[str, tuple[str, ...]]:
    """By model, the texts in which these engines are compared with transformers."""
    keys = dict.fromkeys(key for part, key in FORCED.values() if part in engines)
    found: dict[str, tuple[str, ...]] = {}
    for model, text in (key.split() for key in keys):
        found[model] = (*found.get(model, ()), text)
    return found


def reference(models: dict[str, Path], engines: Collection[str]) -> dict[str, Any]:
    """Log probabilities in float32, and in bfloat16 for the noise, by transformers.

    Those that these engines are compared with. Keys: model, text, dtype.
    """
    import torch

    sys.path.insert(0, str(ROOT / "tests/golden"))
    import reference as golden

    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {}

    def compute(loaded: Any, key: str, text: str) -> None:
        result[key] = [logprobs(loaded, torch.tensor([ids], device=device)) for ids in texts(text)]

    for model, names in compared(engines).items():
        loaded = golden.load(models[model])[0].to(device)
        for name in names:
            compute(loaded, f"{model} {name} float32", name)
        rounded = golden.load(models[model])[0].to(device, torch.bfloat16)
        for name in names:
            compute(rounded, f"{model} {name} bfloat16", name)
        attend_to_all(loaded)
        for name in names:
            if max(TEXTS[name]) > TOPK:
                compute(loaded, f"{model} {name} all tokens", name)
    return result


def attend_to_all(loaded: Any) -> None:
    """Let the indexers of a model choose every token."""
    indexers = [module for module in loaded.modules() if hasattr(module, "index_topk")]
    if not indexers:
        raise RuntimeError("transformers keeps index_topk elsewhere now")
    for module in indexers:
        module.index_topk = CONTEXT


def logprobs(loaded: Any, ids: Any) -> list[float]:
    """What the model gives each token of [1, tokens] after the first."""
    import torch
    from transformers import DynamicCache

    rows, cache = [], DynamicCache(config=loaded.config)
    with torch.no_grad():
        for chunk in ids.split(CHUNK, dim=1):
            logits = loaded(chunk, past_key_values=cache, use_cache=True).logits[0]
            rows.append(logits.float().log_softmax(-1))
    return [float(v) for v in torch.cat(rows)[:-1].gather(-1, ids[0, 1:, None])[:, 0]]


def engine(
    model: Path, forced: dict[str, list[list[int]]], options: dict[str, Any]
) -> dict[str, Any]:
    """What vLLM answers: log probabilities of texts, and greedy continuations with their leads."""
    from vllm import LLM, SamplingParams
    from vllm.compilation.counter import compilation_counter

    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": STARTS,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 28,
        "gpu_memory_utilization": 0.05,
        "enforce_eager": True,
        "disable_log_stats": False,
        **options,
    }
    begun = time.monotonic()
    llm = LLM(**arguments)
    result: dict[str, Any] = {
        "start seconds": round(time.monotonic() - begun, 1),
        "graphs": compilation_counter.num_cudagraph_captured,
    }
    parameters = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True, detokenize=False
    )
    for name, given in forced.items():
        prompts = [{"prompt_token_ids": text} for text in given]
        result[name] = [
            [
                entry[token].logprob
                for token, entry in zip(
                    output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
                )
            ]
            for output in llm.generate(prompts, parameters, use_tqdm=False)
        ]
    parameters = SamplingParams(
        max_tokens=LENGTH, temperature=0, logprobs=2, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": start} for start in starts()]
    outputs = [output.outputs[0] for output in llm.generate(prompts, parameters, use_tqdm=False)]
    result["tokens"] = [list(output.token_ids) for output in outputs]
    # how far each chosen token is ahead of the best other one
    result["leads"] = [
        [
            entry[token].logprob - max(e.logprob for other, e in entry.items() if other != token)
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
        for output in outputs
    ]
    result["metrics"] = {
        metric.name.removeprefix("vllm:spec_decode_num_"): getattr(
            metric, "value", getattr(metric, "values", None)
        )
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_")
    }
    return result


def apart(one: list[list[float]], other: list[list[float]]) -> list[float]:
    """Absolute differences over all texts."""
    return [
        abs(a - b)
        for left, right in zip(one, other, strict=True)
        for a, b in zip(left, right, strict=True)
    ]


def judge_forced(
    check: str, key: str, served: dict[str, Any], wanted: dict[str, Any]
) -> tuple[bool, str]:
    """Whether what is served is as near to float32 as bfloat16 allows; ``key``: model, text."""
    text, factor = key.split()[1], FACTORS.get(check, FACTOR)
    exact = wanted[f"{key} float32"]
    got, noise = apart(served[text], exact), apart(wanted[f"{key} bfloat16"], exact)
    passed = fmean(got) <= factor * fmean(noise) and median(got) <= factor * median(noise)
    line = f"{len(got)} tokens: mean {fmean(got):.4f}, median {median(got):.4f}, max {max(got):.2f}"
    line += f"; bfloat16 itself {fmean(noise):.4f}, {median(noise):.4f}, {max(noise):.2f}"
    if f"{key} all tokens" in wanted:
        beyond = fmean(got[TOPK:])
        everything = fmean(apart(wanted[f"{key} all tokens"], exact)[TOPK:])
        passed = passed and beyond < everything / 2
        line += f"; beyond token 2,048 mean {beyond:.4f}, bfloat16 {fmean(noise[TOPK:]):.4f}"
        line += f", attending to all tokens {everything:.4f}"
    return passed, line


def judge_same(
    check: str, tie: float, plain: dict[str, Any], other: dict[str, Any]
) -> tuple[bool, str]:
    """Whether speculation or graphs leave the text as it is and drafts are accepted if they can."""
    equal, parted = 0, []
    for wanted, leads, got in zip(plain["tokens"], plain["leads"], other["tokens"], strict=True):
        at = next((i for i, token in enumerate(wanted) if token != got[i]), None)
        if at is None:
            equal += 1
        else:
            parted.append(leads[at])
    line = f"{equal} of {len(plain['tokens'])} texts equal"
    if parted:
        line += f", the others part at leads up to {max(parted):.3f}"
    passed = all(lead <= tie for lead in parted)
    if "graphs" in check:
        line += f"; {other['graphs']} graphs captured"
        passed = passed and other["graphs"] > 0
    if "mtp" in check or "drafts" in check:
        numbers = other["metrics"]
        drafted = numbers.get("draft_tokens", 0)
        share = numbers.get("accepted_tokens", 0) / drafted if drafted else 0.0
        line += f"; {numbers.get('accepted_tokens', 0)} of {drafted} drafts accepted ({share:.0%})"
        line += f", by position {numbers.get('accepted_tokens_per_pos')}"
        passed = passed and bool(drafted) and ("drafts" not in check or share >= ACCEPTED)
    return passed, line


def parts(engines: Collection[str]) -> list[str]:
    """What is started: the reference only if one of the engines is compared with it."""
    return [*(["reference"] if compared(engines) else []), *engines]


def judged(
    results: dict[str, Any], engines: Collection[str] = tuple(ENGINES)
) -> list[tuple[str, bool, str]]:
    """(check, passed, what was measured) of every check that needs none but these engines."""
    lines = []
    wanted = results.get("reference")
    for check, (part, key) in FORCED.items():
        if part not in engines:
            continue
        passed, line = False, "an engine did not answer"
        if wanted and part in results:
            passed, line = judge_forced(check, key, results[part], wanted)
        lines.append((check, passed, line))
    for check, (plain, other) in SAME.items():
        if plain not in engines or other not in engines:
            continue
        passed, line = False, "an engine did not answer"
        if plain in results and other in results:
            tie = NEAR_TIE["drafts" if plain == "foreseeing" else "mtp"]
            passed, line = judge_same(check, tie, results[plain], results[other])
        lines.append((check, passed, line))
    return lines


def run(
    command: list[str], log: Path, variables: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start one part with more environment variables; what it prints goes to ``log``."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first
        **(variables or {}),
    }
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def last_error(log: Path) -> str:
    """The last line of a log that speaks of an error, else its last."""
    lines = log.read_text(errors="replace").splitlines()
    told = [line for line in lines if "Error" in line] or lines or ["no output"]
    return told[-1][-300:]


def main() -> int:
    """Run every engine side by side and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--limit", type=float, default=500, help="seconds for all of it")
    parser.add_argument("--options", default="{}", help="more arguments of vLLM's LLM, as JSON")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="only these")
    parser.add_argument("--out", type=Path, help="folder for models, logs and results, kept")
    parser.add_argument("--cpu", action="store_true", help="go on without an NVIDIA GPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        models = json.loads((arguments.out / "models.json").read_text())
        models = {name: Path(path) for name, path in models.items()}
        if arguments.part == "reference":
            answer = reference(models, arguments.engines)
        else:
            model, forced, options = ENGINES[arguments.part]
            options = options | json.loads(arguments.options)
            answer = engine(models[model], {name: texts(name) for name in forced}, options)
        (arguments.out / f"{arguments.part}.json").write_text(json.dumps(answer))
        return 0
    if not Path("/proc/driver/nvidia/version").exists() and not arguments.cpu:
        print("no NVIDIA GPU (no /proc/driver/nvidia/version): nothing was checked")
        return 0
    with tempfile.TemporaryDirectory(prefix="serving-") as temporary:
        work = arguments.out or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        models = write_models(work)
        (work / "models.json").write_text(json.dumps({k: str(v) for k, v in models.items()}))
        running, results, deadline = {}, {}, time.monotonic() + arguments.limit
        engines = tuple(dict.fromkeys(arguments.engines or ENGINES))
        for part in parts(engines):
            command = [sys.executable, __file__, "--part", part, "--out", str(work)]
            command += ["--options", arguments.options, "--engines", *engines]
            running[part] = run(command, work / f"{part}.log", VARIABLES.get(part))
            if arguments.cpu:
                running[part].wait()
        for part, process in running.items():
            try:
                process.wait(timeout=max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            path = work / f"{part}.json"
            if process.returncode == 0 and path.exists():
                results[part] = json.loads(path.read_text())
            else:
                error = last_error(work / f"{part}.log")
                print(f"{part}: ended with {process.returncode}: {error}")
        failed = len(running) - len(results)
        lines = judged(results, engines)
        for check, passed, line in lines:
            failed += not passed
            print(f"{'PASS' if passed else 'FAIL'} {check:<17} {line}", flush=True)
        if not lines:
            print(f"no check compares only {', '.join(engines)}: nothing was checked")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
