# SPDX-License-Identifier: Apache-2.0
"""Runs jobs in the environment of a box: one import of vLLM, one fork a job.

Reads jobs as JSON lines from stdin and answers each with a JSON line when it is done. Importing
vLLM takes longer than most jobs, so this process imports it once and forks. A job may put a
directory in front of sys.path (another copy of the GGUF plugin, which is imported after the fork
only) and may replace the source of a vLLM module that is not imported yet.

Job: id, kind (engine, reference or cli), log (path: stdout and stderr of the job), result (path:
JSON), timeout (s), overlay (path or null), override ({module: source file}), and what the kind
needs. Threads do not survive a fork, so nothing here computes before it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# an engine in the process of the job, its tensor parallel workers as forks of it
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


class _Override:
    """Import hook: the source of some modules comes from other files."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = sources

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> object:
        """Spec of a module to replace, None for all others."""
        if name not in self.sources:
            return None
        return importlib.util.spec_from_file_location(name, self.sources[name])


def _faults(llm: Any, path: Path) -> list[str]:
    """What the loaded model holds that is not in the file, for what no answer depends on.

    The CPU serves sparse attention densely and never runs the indexer, and this model has an output
    head of its own whatever its config says.
    """
    import gguf
    import torch
    from reference import shards

    files = {t.name: t for shard in shards(path) for t in gguf.GGUFReader(shard).tensors}
    worker = llm.llm_engine.model_executor.driver_worker.worker
    faults = []
    config = worker.model_config.hf_config
    if any("MTP" in name for name in config.architectures):
        faults.append(f"the target's configuration is a draft's: {config.architectures}")
    tied = config.tie_word_embeddings
    if tied != ("output.weight" not in files):
        faults.append(f"tie_word_embeddings is {tied}")

    def plain(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(files[name].data, files[name].tensor_type))

    model = worker.model_runner.model
    for number in range(model.config.num_hidden_layers):
        indexer = model.model.layers[number].self_attn.indexer
        name = f"blk.{number}.indexer."
        parts = ("attn_q_b.weight", "attn_k.weight", "proj.weight", "k_norm.weight", "k_norm.bias")
        missing = [name + part for part in parts if name + part not in files]
        if missing:
            faults.append(f"the engine serves without {', '.join(missing)}")
            continue
        # on the CPU the weight itself is packed after loading; what it does is not
        projection = indexer.wk_weights_proj(torch.eye(model.config.hidden_size))[0].T
        pairs = {
            "attn_q_b": (
                indexer.wq_b.qweight.data,
                torch.from_numpy(files[name + "attn_q_b.weight"].data.copy()),
            ),
            "attn_k and proj": (
                projection,
                torch.cat([plain(name + "attn_k.weight"), plain(name + "proj.weight")]),
            ),
            "k_norm": (
                torch.stack([indexer.k_norm.weight.data, indexer.k_norm.bias.data]),
                torch.stack([plain(name + "k_norm.weight"), plain(name + "k_norm.bias")]),
            ),
        }
        faults += [
            f"{name}{part} is not that of the file"
            for part, (loaded, wanted) in pairs.items()
            if loaded.shape != wanted.shape or not torch.equal(loaded, wanted)
        ]
    return faults


# Tensors that ranks share out; every rank reads the others whole.
_SHARED_OUT = re.compile(
    r"token_embd|output|blk\.\d+\.(attn_[qkv]_b|attn_output|ffn_(gate|up|down)(_exps|_shexp)?)"
)


def _record_reads(path: Path) -> None:
    """Write the bytes of the file that this rank reads for a model to ``path``, one line a model.

    A tensor that the plugin hands on in memory of its own was read whole; of a view of the mapped
    file, what PyTorch or gguf takes as an operand is read.
    """
    import gguf
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm_gguf_plugin import loader
    from vllm_gguf_plugin.weights_adapter import default

    mapped: list[tuple[int, int]] = []
    count = 0

    def in_file(address: int) -> bool:
        return any(begin <= address < end for begin, end in mapped)

    class Operands(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal count
            if not function.is_view:
                count += sum(
                    argument.nbytes
                    for argument in args
                    if isinstance(argument, torch.Tensor)
                    and argument.device.type == "cpu"
                    and in_file(argument.data_ptr())
                )
            return function(*args, **(kwargs or {}))

    iterate, load, dequantize = (
        default.gguf_quant_weights_iterator_multi,
        loader.GGUFModelLoader.load_model,
        gguf.dequantize,
    )

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        weights = iterate(*args, **kwargs)
        while True:
            before = count
            name, weight = next(weights, (None, None))
            if weight is None:
                return
            count = before  # a copy that was made in there counts below, once
            if not mapped or not in_file(weight.data_ptr()):
                mapped[:] = [
                    tuple(int(part, 16) for part in line.split()[0].split("-"))
                    for line in Path("/proc/self/maps").read_text().splitlines()
                    if line.endswith(".gguf")
                ]
            if weight.ndim and not in_file(weight.data_ptr()):
                count += weight.nbytes
            yield name, weight

    def counted_dequantize(data: Any, quant_type: Any) -> Any:
        nonlocal count
        count += data.nbytes if in_file(data.ctypes.data) else 0
        return dequantize(data, quant_type)

    def counted_load(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count = 0
        with Operands():
            model = load(*args, **kwargs)
        with path.open("a") as file:
            file.write(json.dumps([get_tensor_model_parallel_rank(), count]) + "\n")
        return model

    default.gguf_quant_weights_iterator_multi = counted
    loader.GGUFModelLoader.load_model = counted_load
    gguf.dequantize = counted_dequantize


def _bytes_to_read(path: Path, layers: int, ranks: int) -> int:
    """Bytes of the file's first ``layers`` layers that one of ``ranks`` ranks needs."""
    import gguf
    from reference import shards

    whole = shared_out = 0
    for shard in shards(path):
        for tensor in gguf.GGUFReader(shard).tensors:
            block = re.match(r"blk\.(\d+)\.", tensor.name)
            if block and int(block[1]) >= layers:
                continue
            if _SHARED_OUT.fullmatch(tensor.name.removesuffix(".weight")):
                shared_out += int(tensor.n_bytes)
            else:
                whole += int(tensor.n_bytes)
    return whole + shared_out // ranks


def _record_drafts(path: Path) -> None:
    """Write position and first proposed token of every draft to ``path``, from rank 0."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    original = SpecDecodeBaseProposer.propose

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        index = kwargs["token_indices_to_sample"]
        position = int(kwargs["target_positions"][-1 if index is None else int(index[0])])
        proposed = original(self, *args, **kwargs)
        if get_tensor_model_parallel_rank() == 0:
            with path.open("a") as file:
                file.write(json.dumps([position, int(proposed[0][0])]) + "\n")
        return proposed

    SpecDecodeBaseProposer.propose = propose


def _engine(job: dict[str, Any]) -> dict[str, Any]:
    """Serve the model in this process and let it answer the prompts."""
    from vllm import LLM, SamplingParams
    from vllm.v1.executor import multiproc_executor

    path = Path(job["model"])
    drafts = Path(job["result"]).with_suffix(".drafts")
    drafts.unlink(missing_ok=True)
    arguments: dict[str, Any] = {
        "model": str(path),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 1 << 25,
        "disable_log_stats": True,
        **job["arguments"],
    }
    reads = Path(job["result"]).with_suffix(".reads")
    if "speculative_config" in arguments:
        _record_drafts(drafts)
    else:
        _record_reads(reads)
    # vLLM's CPU platform spawns workers, and each would import everything again
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    started = time.monotonic()
    llm = LLM(**arguments)
    ready = time.monotonic()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
        SamplingParams(
            max_tokens=job["max_tokens"],
            temperature=0,
            logprobs=0,
            prompt_logprobs=0,
            ignore_eos=True,
            detokenize=False,
        ),
        use_tqdm=False,
    )
    answers = [
        {
            "prompt_logprobs": [
                entry[token].logprob
                for token, entry in zip(
                    output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
                )
            ],
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                entry[token].logprob
                for token, entry in zip(
                    output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
                )
            ],
        }
        for output in outputs
    ]
    result: dict[str, Any] = {
        "answers": answers,
        "start_seconds": ready - started,
        "answer_seconds": time.monotonic() - ready,
    }
    if drafts.exists():
        result["drafts"] = [json.loads(line) for line in drafts.read_text().splitlines()]
    ranks = arguments.get("tensor_parallel_size", 1)
    result["faults"] = _faults(llm, path) if ranks == 1 else []
    if reads.exists():
        layers = llm.llm_engine.model_config.hf_config.num_hidden_layers
        wanted = _bytes_to_read(path, layers, ranks)
        result["read_bytes"] = [json.loads(line) for line in reads.read_text().splitlines()]
        result["faults"] += [
            f"rank {rank} read {count} bytes of the file, not {wanted}"
            for rank, count in result["read_bytes"]
            if count != wanted
        ]
    return result


def _reference(job: dict[str, Any]) -> dict[str, Any]:
    import reference

    return reference.compute(Path(job["model"]), job["prompts"], job["max_tokens"])


def _cli(job: dict[str, Any]) -> dict[str, Any]:
    """The vllm command in this process; what it prints is in the log."""
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *job["arguments"]]
    try:
        main()
    except SystemExit as end:
        return {"status": end.code or 0}
    return {"status": 0}


_KINDS = {"engine": _engine, "reference": _reference, "cli": _cli}


def _run(job: dict[str, Any]) -> None:
    """Do the job in this (forked) process."""
    os.setpgid(0, 0)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job.get("environment", {}))
    if job.get("override"):
        loaded = [name for name in job["override"] if name in sys.modules]
        if loaded:
            raise RuntimeError(f"imported before the fork: {loaded}")
        sys.meta_path.insert(0, _Override(job["override"]))
    if job.get("overlay"):
        sys.path.insert(0, job["overlay"])
    result = _KINDS[job["kind"]](job)
    Path(job["result"]).write_text(json.dumps(result))


def _fork(job: dict[str, Any]) -> int:
    """Run the job in a child; its exit status, 124 when it took too long."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _run(job)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    deadline = time.monotonic() + job["timeout"]
    status = None
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = 124
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):  # workers of the engine that outlived it
        os.killpg(child, signal.SIGKILL)
    return status


def main() -> None:
    """Serve jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(_ENVIRONMENT)
    sys.path.insert(0, str(Path(__file__).parent))
    import transformers  # noqa: F401
    import vllm

    answers.write(json.dumps({"ready": vllm.__version__}) + "\n")
    answers.flush()
    for line in sys.stdin:
        job = json.loads(line)
        if job["kind"] == "engine" and not job.get("override"):
            # imports what every engine needs; only jobs that replace a module come before it
            import vllm.v1.worker.cpu_worker
        started = time.monotonic()
        status = _fork(job)
        answer = {"id": job["id"], "status": status, "seconds": time.monotonic() - started}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
