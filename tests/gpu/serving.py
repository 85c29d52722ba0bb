# SPDX-License-Identifier: Apache-2.0
"""Is what vLLM serves from a GGUF on a GPU right? Compared with transformers, and MTP with greedy.

    python tests/gpu/serving.py --model tiny-GLM-5-UD-Q4_K_XL.gguf

Run it with the Python of a release's environment, config.json and the tokenizer beside the model.
One line a check: PASS or FAIL and what was measured; exit status 1 when one fails. Without an
NVIDIA GPU it says so and ends with 0.

- golden: log probabilities that the server gives the tokens of two texts of 512, against float32 on
  the dequantised weights. A random model has near-ties in its routers, where the smallest rounding
  picks another expert, so the largest difference says little. How much rounding costs is measured
  beside it: transformers in bfloat16 against float32, on the same tokens. Mean and median of what
  is served may be at most twice as far off. (Of 1,024 tokens: noise 0.025 and 0.010; a model with
  one of the eight heads of one layer zeroed 0.060 and 0.032.)
- sparse: a text of 4,000 tokens, so that the indexer chooses 2,048 of them. Same bound, and beyond
  token 2,048 less than half as far off as transformers is when it attends to all tokens.
- drafts: a copy of the model in which every next token follows from the last one and the MTP layer
  foresees it, by construction. Then nearly every draft is accepted and the text is the one without
  speculation; with names or halves mixed up nearly none is.
- mtp: the model itself with and without speculation; a text may part at a near-tie only.
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
from pathlib import Path
from statistics import fmean, median
from typing import Any

TEXTS = {"golden": (512, 512), "sparse": (4000,)}  # tokens of each text
SPECULATION = {"method": "mtp", "num_speculative_tokens": 2}
TOPK = 2048  # index_topk of the model
FACTOR = 2.0  # times the noise of bfloat16
ACCEPTED = 0.9  # of the drafts that are right by construction
# A near-tie: the chosen token leads by less than bfloat16 moves a log probability (mtp: 99 of 100).
# In the model of `drafts` no router and no attention amplifies the rounding.
NEAR_TIE = {"drafts": 0.05, "mtp": 0.5}
STARTS, LENGTH = 16, 24  # texts that are continued, tokens of each continuation


def texts(name: str) -> list[list[int]]:
    """Random token ids of the tiny model, always the same."""
    generator = random.Random(name)  # noqa: S311 - no secret
    return [[generator.randrange(8, 512) for _ in range(n)] for n in TEXTS[name]]


def starts() -> list[list[int]]:
    """Short beginnings to be continued greedily."""
    generator = random.Random(1)  # noqa: S311 - no secret
    return [[generator.randrange(8, 500) for _ in range(5)] for _ in range(STARTS)]


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


def reference(model: Path) -> dict[str, Any]:
    """Log probabilities in float32, and in bfloat16 for the noise, by transformers."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
    import reference as golden

    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        loaded, _ = golden.load(model)
        loaded = loaded.to(device, dtype)
        for name in TEXTS:
            for text in texts(name):
                chosen = logprobs(loaded, torch.tensor([text], device=device))
                result.setdefault(f"{name} {dtype}", []).append(chosen)
    result["sparse all tokens"] = [dense(golden.load(model)[0].to(device), texts("sparse")[0])]
    return result


def dense(loaded: Any, text: list[int]) -> list[float]:
    """Log probabilities of a model whose indexer chooses every token."""
    import torch

    indexers = [module for module in loaded.modules() if hasattr(module, "index_topk")]
    if not indexers:
        raise RuntimeError("transformers keeps index_topk elsewhere now")
    for module in indexers:
        module.index_topk = len(text)
    return logprobs(loaded, torch.tensor([text], device=loaded.device))


def logprobs(loaded: Any, ids: Any) -> list[float]:
    """What the model gives each token of [1, tokens] after the first."""
    import torch

    with torch.no_grad():
        rows = loaded(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return [float(value) for value in rows.gather(-1, ids[0, 1:, None])[:, 0]]


def engine(model: Path, speculate: bool, forced: bool, options: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answers: forced texts if wanted, and greedy continuations with their leads."""
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": STARTS,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 28,
        "gpu_memory_utilization": 0.05,
        "enforce_eager": True,
        "disable_log_stats": False,
        **({"speculative_config": SPECULATION} if speculate else {}),
        **options,
    }
    begun = time.monotonic()
    llm = LLM(**arguments)
    result: dict[str, Any] = {"start seconds": round(time.monotonic() - begun, 1)}
    if forced:
        parameters = SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=0, ignore_eos=True, detokenize=False
        )
        for name in TEXTS:
            prompts = [{"prompt_token_ids": text} for text in texts(name)]
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


def judge_forced(name: str, served: dict[str, Any], wanted: dict[str, Any]) -> tuple[bool, str]:
    """Whether what is served is as near to float32 as bfloat16 allows."""
    exact = wanted[f"{name} torch.float32"]
    got, noise = apart(served[name], exact), apart(wanted[f"{name} torch.bfloat16"], exact)
    passed = fmean(got) <= FACTOR * fmean(noise) and median(got) <= FACTOR * median(noise)
    line = f"{len(got)} tokens: mean {fmean(got):.4f}, median {median(got):.4f}, max {max(got):.2f}"
    line += f"; bfloat16 itself {fmean(noise):.4f}, {median(noise):.4f}, {max(noise):.2f}"
    if name == "sparse":
        beyond, everything = fmean(got[TOPK:]), apart(wanted["sparse all tokens"], exact)
        passed = passed and beyond < fmean(everything[TOPK:]) / 2
        line += f"; beyond token 2,048 mean {beyond:.4f}, bfloat16 {fmean(noise[TOPK:]):.4f}"
        line += f", attending to all tokens {fmean(everything[TOPK:]):.4f}"
    return passed, line


def judge_drafts(name: str, plain: dict[str, Any], mtp: dict[str, Any]) -> tuple[bool, str]:
    """Whether speculation leaves the text as it is and, where it can know, is accepted."""
    equal, parted = 0, []
    for wanted, leads, got in zip(plain["tokens"], plain["leads"], mtp["tokens"], strict=True):
        at = next((i for i, token in enumerate(wanted) if token != got[i]), None)
        if at is None:
            equal += 1
        else:
            parted.append(leads[at])
    numbers = mtp["metrics"]
    drafted = numbers.get("draft_tokens", 0)
    share = numbers.get("accepted_tokens", 0) / drafted if drafted else 0.0
    line = f"{equal} of {len(plain['tokens'])} texts equal"
    if parted:
        line += f", the others part at leads up to {max(parted):.3f}"
    line += f"; {numbers.get('accepted_tokens', 0)} of {drafted} drafts accepted ({share:.0%})"
    line += f", by position {numbers.get('accepted_tokens_per_pos')}"
    passed = bool(drafted) and all(lead <= NEAR_TIE[name] for lead in parted)
    return passed and (name != "drafts" or share >= ACCEPTED), line


def main() -> int:
    """Run every engine side by side and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="the tiny GGUF in one file")
    parser.add_argument("--limit", type=float, default=400, help="seconds for all of it")
    parser.add_argument("--options", default="{}", help="more arguments of vLLM's LLM, as JSON")
    parser.add_argument("--out", type=Path, help="folder for logs and results, kept")
    parser.add_argument("--cpu", action="store_true", help="go on without an NVIDIA GPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    options = json.loads(arguments.options)
    if arguments.part:
        model, result = arguments.model, arguments.out
        if arguments.part == "reference":
            answer = reference(model)
        else:
            speculate = arguments.part.endswith("+mtp")
            answer = engine(model, speculate, arguments.part == "model", options)
        result.write_text(json.dumps(answer))
        return 0
    if not Path("/proc/driver/nvidia/version").exists() and not arguments.cpu:
        print("no NVIDIA GPU (no /proc/driver/nvidia/version): nothing was checked")
        return 0
    with tempfile.TemporaryDirectory(prefix="serving-") as temporary:
        work = arguments.out or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        models = {"model": arguments.model, "foreseeing": foreseeing(arguments.model, work / "f")}
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first
        }
        running, results, deadline = {}, {}, time.monotonic() + arguments.limit
        for part in ("reference", "model", "model+mtp", "foreseeing", "foreseeing+mtp"):
            model = models.get(part.partition("+")[0], arguments.model)
            command = [sys.executable, __file__, "--part", part, "--model", str(model)]
            command += ["--out", str(work / f"{part}.json"), "--options", arguments.options]
            with (work / f"{part}.log").open("w") as log:
                running[part] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=environment
                )
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
                lines = (work / f"{part}.log").read_text(errors="replace").splitlines()
                told = [line for line in lines if "Error" in line] or lines or ["no output"]
                print(f"{part}: ended with {process.returncode}: {told[-1][-300:]}")
        failed = 0
        for name, judge, needs in (
            ("golden", judge_forced, ("model", "reference")),
            ("sparse", judge_forced, ("model", "reference")),
            ("mtp", judge_drafts, ("model", "model+mtp")),
            ("drafts", judge_drafts, ("foreseeing", "foreseeing+mtp")),
        ):
            passed, line = False, "an engine did not answer"
            if all(part in results for part in needs):
                passed, line = judge(name, *(results[part] for part in needs))
            failed += not passed
            print(f"{'PASS' if passed else 'FAIL'} {name:<8} {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
