# SPDX-License-Identifier: Apache-2.0
"""How fast vLLM serves GLM-5 from a GGUF on one card, beside what the card could do at most.

    python tests/gpu/benchmark.py --profile [--llama-server PATH] [--out DIR]

Run it with the Python of a release's environment. For each model it writes a random GGUF with the
types of a Q4_K_XL file, serves it with the stack's own options and measures:

- decode: 1, 8, 64 and 256 clients. Tokens/s while all of them decode (prompts of 128 tokens are
  over), three rounds after one that warms up, and that as a share of the memory's limit: the bytes
  that a step must read (tests/gpu/limits.py) at the copy bandwidth that this card has right now.
- prefill: time to the first token of a prompt of 512 and 8,192 tokens, and its share of the limit
  of arithmetic: the operations of the prompt at the rate of a bfloat16 product of 8192 x 8192.
- with --profile, which kernels a step consists of, and the share of the limit while the card is
  busy: a model of few layers needs less time for a token than the host does, GLM-5 does not.
- with --llama-server, the same requests to llama.cpp's server with the same file.

Models: tp1-6, six layers as a single card holds them; rank-20, twenty layers with what one rank of
eight holds of each (heads, inner sizes and vocabulary divided by eight), served as a model of its
own: all-reduces apart, what each of eight cards does. Its layers have 8 attention heads, which
vLLM's kernels for Hopper pad to 64. The vocabulary of tp1-6 is 6/78 of GLM-5's, as its layers are.

PASS or FAIL says whether every request was answered in full; the exit status is 1 when one was not.
Speed fails nothing: GOAL lines say what was wanted and whether it was met. Without an NVIDIA GPU it
says that nothing was checked (--cpu: a tiny model on vLLM's CPU build, to try this program).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import clients
import kineto
import limits
import serving
import true_sizes

ROOT = serving.ROOT
STACK = ROOT / "stacks/glm5-cu130.yml"
PROMPT = 128  # tokens before what is decoded
LENGTHS = ((1, 256), (8, 128), (64, 96), (256, 64))  # clients up to: tokens that each decodes
ROUNDS, PROMPT_ROUNDS = 3, 5
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, 256]
PROFILED_STEPS, PROFILED_TOKENS = 20, 192
LOST = 0.1  # of a trace: kernels that an earlier step launched are less
START, ANSWER = 300.0, 120.0  # seconds
WANTED_SHARE, WANTED_GAIN, MANY = 0.6, 10.0, 64
MODEL = re.compile(r"tiny|(?:tp1|rank)-(?:[2-9]|[1-7][0-9])")
VOCABULARY = 154880
RANK_VOCABULARY = VOCABULARY // 8 // 64 * 64  # vLLM would pad what is no multiple of 64
GB, TB = 1e9, 1e12
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def dimensions(name: str) -> Any:
    """Sizes of a model that is served here."""
    from demo.tiny_glm5.model import Dimensions

    if name == "tiny":
        return Dimensions(nextn_layers=0, vocabulary=1024, unused_tokens=512)
    count = int(name.split("-")[1])
    whole = replace(true_sizes.sizes(count), context=16384)
    if name.startswith("tp1-"):
        vocabulary = VOCABULARY * count // 78 // 64 * 64
        return replace(whole, vocabulary=vocabulary, unused_tokens=vocabulary - 512)
    return replace(
        whole,
        heads=whole.heads // 8,
        feed_forward=whole.feed_forward // 8,
        expert_feed_forward=whole.expert_feed_forward // 8,
        vocabulary=RANK_VOCABULARY,
        unused_tokens=RANK_VOCABULARY - 512,
    )


def write_model(name: str, folder: Path) -> None:
    """Write a model, unless a run before this one wrote all of it."""
    from demo.tiny_glm5.writer import write

    stamp = folder / "complete"
    if not stamp.exists():
        write(folder, 1, dim=dimensions(name), distinct=true_sizes.DISTINCT, alike=True)
        stamp.touch()


def measure_card() -> dict[str, Any]:
    """Copy bandwidth (bytes/s) and rate of a bfloat16 product (operations/s)."""
    import torch

    if torch.cuda.is_available():
        from tune_experts import copy_bandwidth, milliseconds

        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        seconds = milliseconds(torch, [lambda: torch.matmul(a, b)] * 4) / 1e3
        return {
            "name": torch.cuda.get_device_name(),
            "copy": copy_bandwidth(torch) * TB,
            "product": 2 * 8192**3 / seconds,
        }
    a = torch.randn(512, 512)
    source = torch.empty(1 << 26, dtype=torch.uint8)
    target, times = torch.empty_like(source), {}
    for key, call in (("copy", lambda: target.copy_(source)), ("product", lambda: a @ a)):
        call()
        begun = time.perf_counter()
        call()
        times[key] = time.perf_counter() - begun
    return {
        "name": "CPU",
        "copy": 2 * source.numel() / times["copy"],
        "product": 2 * 512**3 / times["product"],
    }


# --- servers --------------------------------------------------------------------------------------


def free_port() -> int:
    """A port of the loopback that nothing uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def post(port: int, path: str, body: dict[str, Any] | None = None, limit: float = 120) -> str:
    """What is wrong with the answer to a POST; empty when nothing is."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body or {}).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with DIRECT.open(asked, timeout=limit):
            return ""
    except (OSError, http.client.HTTPException) as fault:
        return f"{path}: {fault}"


def healthy(port: int) -> bool:
    """Whether the server says that it is ready."""
    try:
        with DIRECT.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def end(process: subprocess.Popen[bytes], patience: float = 15) -> None:
    """End a server and all that it started; the memory of the card is free afterwards."""

    def send(number: int) -> bool:
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    send(signal.SIGTERM)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    finally:  # also when a signal ends the waiting
        send(signal.SIGKILL)
        process.wait()
    until = time.monotonic() + patience
    while send(0) and time.monotonic() < until:
        time.sleep(0.1)


def cause(log: Path) -> str:
    """What a server's log names first as an error; else the log's own last words."""
    for line in log.read_text(errors="replace").splitlines():
        found = re.search(r"(?:[\w.]+(?:Error|Exception)|CUDA error): .*", line)
        if found and not re.search(r"\b(?:WARNING|INFO)\b", line):
            return found[0][:400]
    return serving.last_error(log)


@contextlib.contextmanager
def served(
    command: Sequence[str], port: int, log: Path, environment: dict[str, str], limit: float
) -> Iterator[float]:
    """A server, ready; gives the seconds that it took.

    Raises:
        RuntimeError: it ended, or was not ready in time.
    """
    begun = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=log.parent,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        while not healthy(port):
            if process.poll() is not None:
                raise RuntimeError(f"ended with {process.returncode}: {cause(log)}")
            if time.monotonic() - begun > limit:
                raise RuntimeError(f"not ready after {limit:.0f} s: {cause(log)}")
            time.sleep(0.2)
        yield time.monotonic() - begun
    finally:
        end(process)


def vllm_command(
    model: Path, port: int, traces: Path | None, cpu: bool, longest: int, options: dict[str, Any]
) -> list[str]:
    """``vllm serve`` as the stack does it."""
    import yaml
    from gpubox.serving import serve_arguments

    stack = yaml.safe_load(STACK.read_text(encoding="utf-8"))["serve"]["options"]
    own: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "served_model_name": "glm-5",
        "max_model_len": longest,
        "max_num_seqs": 256,
        "no_enable_prefix_caching": True,
        "compilation_config": {"cudagraph_capture_sizes": CAPTURED},
    }
    if cpu:
        own |= {"dtype": "float32", "kv_cache_dtype": None, "enforce_eager": True}
        own |= {"max_num_seqs": 8, "compilation_config": None, "gpu_memory_utilization": 0.5}
    if traces:
        own["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
            "ignore_frontend": True,
        }
    arguments = serve_arguments(str(model), stack, own, options)
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]


VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first
}


def llama_command(server: str, model: Path, port: int, slots: int, context: int) -> list[str]:
    """llama.cpp's server with ``slots`` streams of ``context`` tokens each."""
    command = [server, "-m", str(model), "-ngl", "99", "-fa", "on", "-fit", "off", "-cram", "0"]
    cells = -(-context // 256) * 256  # what its attention kernels read at a time
    command += ["-c", str(slots * cells), "-np", str(slots)]
    command += ["-b", "8192", "-ub", "2048"]  # prompts in larger pieces than by default
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--no-ui"]


# --- requests -------------------------------------------------------------------------------------


class Load:
    """Requests to one server."""

    def __init__(self, port: int, llama: bool, vocabulary: int, until: float = math.inf) -> None:
        self.port, self.llama, self.vocabulary, self.until = port, llama, vocabulary, until
        self.path = "/completion" if llama else "/v1/completions"
        self.asked = self.answered = 0
        self.faults: list[str] = []

    def body(self, prompt: list[int], tokens: int, temperature: float) -> dict[str, Any]:
        """One request. Several clients draw their tokens, so that each goes its own way."""
        common = {"prompt": prompt, "temperature": temperature, "stream": True, "ignore_eos": True}
        if self.llama:
            own: dict[str, Any] = {
                "n_predict": tokens,
                "cache_prompt": False,
                "return_tokens": True,
            }
            return {**common, **own, "samplers": ["temperature"]}
        own = {"model": "glm-5", "max_tokens": tokens, "return_token_ids": tokens > 1}
        return {**common, **own, "stream_options": {"include_usage": True}}

    def prompt(self, tokens: int) -> list[int]:
        """Random ids that a text could have."""
        return [random.randrange(8, self.vocabulary) for _ in range(tokens)]  # noqa: S311

    def ask(self, count: int, prompt: int, tokens: int, *extra: Any) -> list[clients.Answer]:
        """So many requests at once; an answer that is not whole is a fault.

        Raises:
            RuntimeError: there is no time left.
        """
        limit = min(ANSWER, self.until - time.monotonic())
        if limit <= 0:
            raise RuntimeError("no time left for the rest (--limit)")
        bodies = [
            self.body(self.prompt(prompt), tokens, 0.0 if count == 1 else 1.0) for _ in range(count)
        ]
        answers = asyncio.run(clients.ask(self.port, self.path, bodies, limit, *extra))
        self.asked += count
        for one in answers:
            if not one.error and one.tokens != tokens:
                one.error = f"{one.tokens} tokens instead of {tokens}"
            self.answered += not one.error
            if one.error and len(self.faults) < 5:
                self.faults.append(one.error)
        return answers

    def decode(self, count: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
        """Rates of some rounds, after one that warms up."""
        found = []
        for number in range(rounds + 1):
            answers = self.ask(count, PROMPT, tokens)
            if number and not any(one.error for one in answers):
                found.append(asdict(clients.rates(answers)))
        return found

    def first_tokens(self, prompt: int, rounds: int) -> list[float]:
        """Milliseconds to the first token of a prompt, of some rounds after one that warms up."""
        found = []
        for number in range(rounds + 1):
            (answer,) = self.ask(1, prompt, 1)
            if number and not answer.error:
                found.append((answer.events[0][0] - answer.begun) * 1e3)
        return found

    def profile(self, name: str, count: int, prompt: int) -> str:
        """Trace some steps: of decoding, or (``prompt``) one prompt; what went wrong."""
        faults: list[str] = []
        start = {"profile_prefix": name, "max_iterations": PROFILED_STEPS}

        async def beside(connections: list[clients.Connection]) -> None:
            until = time.monotonic() + ANSWER
            while time.monotonic() < until and any(
                c.events < 4 and not c.closed.done() for c in connections
            ):
                await asyncio.sleep(0.005)
            faults.append(await asyncio.to_thread(post, self.port, "/start_profile", start))

        if prompt:
            faults.append(post(self.port, "/start_profile", start))
            self.ask(1, prompt, 2)
        else:
            self.ask(count, PROMPT, PROFILED_TOKENS, beside)
        faults.append(post(self.port, "/stop_profile"))
        return "; ".join(fault for fault in faults if fault)


def length_of(count: int, cpu: bool) -> int:
    """Tokens that each of ``count`` clients decodes."""
    if cpu:
        return 12
    return next((tokens for most, tokens in LENGTHS if count <= most), LENGTHS[-1][1])


# --- results --------------------------------------------------------------------------------------


def limits_of(
    model: Path, latent: int, arguments: argparse.Namespace, card: dict[str, Any]
) -> dict[str, Any]:
    """Least milliseconds of a step by clients, and of a prompt by tokens, with what they are of."""
    from gpubox.decode_model import reads
    from gpubox.gguf import read_header
    from gpubox.model_facts import model_facts, read_config

    config, fault = read_config(model.parent)
    header = read_header(model)
    facts = model_facts(config, [header])
    if fault or config is None:
        raise RuntimeError(f"the model's own config.json: {fault}")
    found: dict[str, Any] = {"tensor bytes": facts["tensor_bytes"], "decode": {}, "prefill": {}}
    for count in arguments.clients:
        context = PROMPT + length_of(count, arguments.cpu) // 2
        one = reads(facts, latent, context, ranks=1)
        if one is None:
            raise RuntimeError(f"sizes that the limits need are unknown: {facts}")
        parts = limits.decode_bytes(one, count)
        whole = sum(parts.values())
        found["decode"][count] = {"bytes": parts, "ms": whole / card["copy"] * 1e3}
    for tokens in arguments.prompts:
        parts = limits.prefill_operations(facts, header.tensors, tokens)
        one = reads(facts, latent, tokens, ranks=1)
        found["prefill"][tokens] = {
            "operations": parts,
            "ms": sum(parts.values()) / card["product"] * 1e3,
            "bytes ms": limits.prefill_bytes(one, tokens) / card["copy"] * 1e3,
        }
    return found


def measure(
    load: Load, found: dict[str, Any], counts: Sequence[int], prompts: Sequence[int], cpu: bool
) -> None:
    """Decode and prefill of one server, into ``found``, so that what there is survives a fault."""
    for count in counts:
        rounds = 1 if cpu else ROUNDS
        found["decode"][count] = load.decode(count, length_of(count, cpu), rounds)
    for tokens in prompts:
        found["prefill"][tokens] = load.first_tokens(tokens, 1 if cpu else PROMPT_ROUNDS)


def ends(prompts: Sequence[int]) -> list[int]:
    """The first length and the last one, each once."""
    return list(dict.fromkeys([*prompts[:1], *prompts[-1:]]))


def profiled(
    load: Load,
    found: dict[str, Any],
    traces: Path,
    counts: Sequence[int],
    prompts: Sequence[int],
    cpu: bool,
) -> None:
    """Profiles of decode (1 and 64 clients), the first prompt and the last, into ``found``."""
    before = set(traces.glob("*"))  # --out is kept: what is there is of another run
    wanted = [(f"decode-{count}", count, 0) for count in counts if count in (1, MANY)]
    wanted += [(f"prefill-{tokens}", 1, tokens) for tokens in ends(prompts)]
    for name, count, prompt in wanted:
        fault = load.profile(name, count, prompt)
        paths = sorted(set(traces.glob(f"{name}_*.pt.trace.json*")) - before)
        try:
            if fault or not paths:
                raise RuntimeError(fault or f"no trace in {traces}")
            events = kineto.load(paths[-1])
            steps = kineto.steps(events)
            if cpu and not any(step.work for step in steps):
                steps = kineto.steps(events, ("cpu_op",))  # nested, so counted more than once
            if (lost := kineto.unassigned(events, steps)) > LOST:
                print(f"{name}: {lost:.0%} of the card's time in the trace belongs to no step")
            chosen = kineto.prefilling(steps) if prompt else kineto.decoding(steps, count)
            profile = kineto.summarize(chosen)
            if profile is None:
                seen = [(step.contexts, step.generations, len(step.work)) for step in steps[:4]]
                raise RuntimeError(f"no step of it in the trace; contexts, generations: {seen}")
            found[name] = profile
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            print(f"{name}: no profile: {str(error)[:300]}", flush=True)


def share(least: float, took: float) -> str:
    """``least`` as a share of what it took."""
    return f"{least / took:6.1%}" if took else "     -"


def known(number: float, form: str) -> str:
    """A number, or - for what was not measured."""
    return format(number, form) if number else "-"


def busy_columns(least: float, profile: kineto.Profile | None, form: str) -> str:
    """Milliseconds of a profile in which the card is busy, and ``least`` as a share of them.

    ``form``: width and digits of the milliseconds, as of ``format``.
    """
    if profile is None:
        width = int(form.partition(".")[0])
        return f"{'-':>{width}} {'-':>6}"
    return f"{profile.busy:{form}} {share(least, profile.busy)}"


def together(rows: Sequence[dict[str, float]]) -> float:
    """Median tokens/s of the rounds in which all clients decoded at once, 0 without one."""
    return median([row["total"] for row in rows if row["total"]] or [0.0])


def decode_lines(
    server: str, rounds: dict[int, list[dict[str, Any]]], found: dict[str, Any], profiles: Any
) -> list[str]:
    """A line for each number of clients."""
    lines = []
    for count, rows in rounds.items():
        if not rows:
            lines.append(f"{server:<6}{count:>8}  no round was answered in full")
            continue
        total = together(rows)
        least = found["decode"][count]["ms"]
        step = count / total * 1e3 if total else 0.0
        busy = busy_columns(least, profiles.get(f"decode-{count}"), "8.3f")
        each = ", ".join(known(row["total"], ".0f") for row in rows)
        ttft, tpot = (median(row[key] for row in rows) for key in ("ttft", "tpot"))
        lines.append(
            f"{server:<6}{count:>8}{known(total, '.1f'):>10}{known(total / count, '.1f'):>9}"
            f"{known(tpot, '.3f'):>9}{least:>9.3f} {share(least, step)} {busy}"
            f"{median(row['whole'] for row in rows):>10.1f}{ttft:>9.1f}  {each}"
        )
    return lines


def prefill_lines(
    server: str, times: dict[int, list[float]], found: dict[str, Any], profiles: Any
) -> list[str]:
    """A line for each length of prompts."""
    lines = []
    for tokens, row in times.items():
        if not row:
            lines.append(f"{server:<6}{tokens:>8}  no prompt was answered in full")
            continue
        took, least = median(row), found["prefill"][tokens]
        busy = busy_columns(least["ms"], profiles.get(f"prefill-{tokens}"), "9.2f")
        lines.append(
            f"{server:<6}{tokens:>8}{took:>9.2f}{tokens / took * 1e3:>10.0f}{least['ms']:>9.2f} "
            f"{share(least['ms'], took)}{least['bytes ms']:>9.2f} {busy}"
            f"  {', '.join(f'{one:.1f}' for one in row)}"
        )
    return lines


def goals(results: dict[str, Any], found: dict[str, Any], profiles: Any) -> list[str]:
    """A line for each goal whose numbers are there; ``results``: by server."""

    def total(server: str, count: int) -> float:
        return together(results.get(server, {}).get("decode", {}).get(count) or [])

    lines = []

    def say(met: bool, what: str, measured: str, wanted: str) -> None:
        lines.append(f"GOAL {'met' if met else 'missed'}: {what}: {measured}; wanted {wanted}")

    one, many = total("vllm", 1), total("vllm", MANY)
    if one:
        least = found["decode"][1]["ms"]
        part = least * one / 1e3
        measured = f"{part:.1%} of the bandwidth limit"
        if "decode-1" in profiles and (busy := profiles["decode-1"].busy):
            measured += f", {least / busy:.1%} while the card is busy"
        say(part >= WANTED_SHARE, "one stream", measured, f"{WANTED_SHARE:.0%}")
    if one and many:
        gain = many / one
        # 64 tokens choose most experts, one only eight: both at the limit may be nearer than wanted
        able = MANY * found["decode"][1]["ms"] / found["decode"][MANY]["ms"]
        measured = f"{gain:.1f} x one (limit against limit {able:.1f} x)"
        say(gain >= WANTED_GAIN, f"{MANY} clients", measured, f"{WANTED_GAIN:.0f} x")
    for count in results.get("llama", {}).get("decode", {}):
        ours, other = total("vllm", count), total("llama", count)
        if ours and other:
            measured = f"{ours:.1f} tokens/s, llama.cpp {other:.1f}: {ours / other:.2f} x"
            say(ours > other, f"{count} clients against llama.cpp", measured, "ahead of it")
        else:
            what = f"{ours:.1f} and {other:.1f} tokens/s (0: no round in which all decoded at once)"
            lines.append(f"GOAL unknown: {count} clients against llama.cpp: {what}")
    return lines


def judge(server: str, name: str, load: Load, extra: Sequence[str] = ()) -> bool:
    """Print whether every request was answered in full."""
    faults = [*load.faults, *extra]
    passed = load.asked > 0 and load.answered == load.asked and not faults
    line = f"{load.answered} of {load.asked} requests answered in full"
    print(
        f"{'PASS' if passed else 'FAIL'} {server} {name} {line}{''.join(f'; {f}' for f in faults)}"
    )
    return passed


def report(
    name: str, card: dict[str, Any], found: dict[str, Any], results: dict[str, Any], profiles: Any
) -> list[str]:
    """All tables of a model."""
    lines = ["", f"== {name}: {found['tensor bytes'] / GB:.1f} GB of tensors; {card['name']}"]
    lines.append(
        f"{'decode':<6}{'clients':>8}{'tokens/s':>10}{'a stream':>9}{'TPOT ms':>9}{'limit ms':>9}"
        f" {'share':>6} {'busy ms':>8} {'share':>6}{'whole/s':>10}{'TTFT ms':>9}  rounds"
    )
    for server, row in results.items():
        own = profiles if server == "vllm" else {}
        lines += decode_lines(server, row["decode"], found, own)
    lines.append(
        f"{'prefill':<7}{'tokens':>7}{'TTFT ms':>9}{'tokens/s':>10}{'limit ms':>9} {'share':>6}"
        f"{'bytes ms':>9} {'busy ms':>9} {'share':>6}  rounds"
    )
    for server, row in results.items():
        own = profiles if server == "vllm" else {}
        lines += prefill_lines(server, row["prefill"], found, own)
    for title, profile in profiles.items():
        lines += kineto.table(f"{name} {title}", profile)
    return lines + goals(results, found, profiles)


def bench(
    name: str, folder: Path, out: Path, card: dict[str, Any], arguments: argparse.Namespace
) -> tuple[int, dict[str, Any]]:
    """Serve one model and print its tables; how many checks failed, and all numbers."""
    from demo.tiny_glm5.model import FILE_STEM

    model = folder / f"{FILE_STEM}.gguf"
    longest = max([PROMPT + PROFILED_TOKENS, *arguments.prompts]) + 64
    latent = limits.LATENT_BYTES["float32" if arguments.cpu else "fp8"]
    found = limits_of(model, latent, arguments, card)
    vocabulary = dimensions(name).vocabulary - 16
    traces = out / f"traces-{name}"
    results: dict[str, Any] = {}
    profiles: dict[str, Any] = {}
    failed, starts = 0, {}

    def left() -> float:
        return max(30.0, min(START, arguments.until - time.monotonic()))

    port = free_port()
    environment = VLLM_ENVIRONMENT | dict(arguments.environment)
    command = vllm_command(
        model,
        port,
        traces if arguments.profile else None,
        arguments.cpu,
        longest,
        arguments.options,
    )
    load = Load(port, False, vocabulary, arguments.until)
    fault, wanted = [], (arguments.clients, arguments.prompts)
    if not arguments.no_vllm:
        try:
            with served(command, port, out / f"vllm-{name}.log", environment, left()) as seconds:
                starts["vllm"] = seconds
                print(f"{name}: vLLM ready in {seconds:.0f} s", flush=True)
                results["vllm"] = {"decode": {}, "prefill": {}}
                measure(load, results["vllm"], *wanted, arguments.cpu)
                if arguments.profile:
                    profiled(load, profiles, traces, *wanted, arguments.cpu)
        except (RuntimeError, OSError) as error:
            fault.append(str(error)[:600])
        failed += not judge("vllm", name, load, fault)
    if arguments.llama_server:
        wide = [count for count in arguments.clients if count > 1]
        runs: list[tuple[int, int, Sequence[int], Sequence[int]]] = []
        if 1 in arguments.clients or arguments.prompts:
            runs.append((1, longest, [c for c in arguments.clients if c == 1], arguments.prompts))
        if wide:
            runs.append((max(wide), PROMPT + LENGTHS[0][1], wide, []))
        results["llama"] = {"decode": {}, "prefill": {}}
        for slots, context, counts, prompts in runs:
            port, fault = free_port(), []
            load = Load(port, True, vocabulary, arguments.until)
            log = out / f"llama-{name}-{slots}.log"
            command = llama_command(arguments.llama_server, model, port, slots, context)
            try:
                with served(command, port, log, {}, left()) as seconds:
                    starts[f"llama-{slots}"] = seconds
                    print(f"{name}: llama.cpp ready in {seconds:.0f} s", flush=True)
                    measure(load, results["llama"], counts, prompts, arguments.cpu)
            except (RuntimeError, OSError) as error:
                fault.append(str(error)[:600])
            failed += not judge("llama", f"{name}-{slots}", load, fault)
    lines = report(name, card, found, results, profiles)
    (out / f"report-{name}.txt").write_text("\n".join([*lines, ""]))
    print("\n".join(lines), flush=True)
    return failed, {
        "limits": found,
        "results": results,
        "seconds to start": starts,
        "profiles": {key: asdict(value) for key, value in profiles.items()},
    }


def parts(arguments: argparse.Namespace, work: Path, out: Path) -> dict[str, Any] | None:
    """Write the models and measure the card, side by side; what the card can, None on a fault."""
    running = {}
    for part in ("card", *arguments.model):
        command = [sys.executable, str(Path(__file__).resolve()), "--part", part]
        running[part] = serving.run([*command, "--work", str(work)], out / f"{part}.log")
    try:
        for part, process in running.items():
            try:
                code: Any = process.wait(timeout=max(1.0, arguments.until - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = "no answer in time"
            if code != 0:
                print(f"FAIL {part} {code}: {serving.last_error(out / f'{part}.log')}")
                return None
    finally:  # also when this program is told to end
        for process in running.values():
            process.kill()
            process.wait()
    return dict(json.loads((work / "card.json").read_text()))


def positive(text: str) -> int:
    """A number of clients or tokens."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    """Options of ``vllm serve``.

    Raises:
        argparse.ArgumentTypeError: the text is no JSON object.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as fault:
        found = fault
    if not isinstance(found, dict):
        wanted = """wanted a JSON object, such as '{"max_num_seqs": 64}'"""
        raise argparse.ArgumentTypeError(f"{text!r} is none; {wanted}")
    return found


def assignment(text: str) -> tuple[str, str]:
    """An environment variable and its value.

    Raises:
        argparse.ArgumentTypeError: the text is no KEY=VALUE.
    """
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
        raise argparse.ArgumentTypeError(f"{text!r} is none; wanted KEY=VALUE")
    return key, value


def main() -> int:
    """Write, serve, measure and print; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", nargs="+", help="tp1-LAYERS or rank-LAYERS (tp1-6 rank-20)")
    parser.add_argument("--clients", type=positive, nargs="*", help="(1 8 64 256)")
    parser.add_argument("--prompts", type=positive, nargs="*", help="tokens (512 8192)")
    parser.add_argument("--profile", action="store_true", help="also which kernels take how long")
    parser.add_argument("--llama-server", help="program to compare with")
    parser.add_argument("--no-vllm", action="store_true", help="only the program to compare with")
    parser.add_argument("--out", type=Path, help="folder for logs, traces and benchmark.json, kept")
    parser.add_argument("--work", type=Path, help="folder for the models (up to 45 GB), kept")
    parser.add_argument(
        "--options", type=json_object, default={}, help="more options of vllm serve, as JSON"
    )
    parser.add_argument(
        "--environment", type=assignment, nargs="*", default=[], help="KEY=VALUE of vllm serve"
    )
    parser.add_argument("--limit", type=float, default=540, help="seconds for all of it")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on vLLM's CPU build")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "plugins/module_utils")]
    if arguments.part == "card":
        (arguments.work / "card.json").write_text(json.dumps(measure_card()))
        return 0
    if arguments.part:
        write_model(arguments.part, arguments.work / arguments.part)
        return 0
    if not Path("/proc/driver/nvidia/version").exists() and not arguments.cpu:
        print("no NVIDIA GPU (no /proc/driver/nvidia/version): nothing was checked or timed")
        return 0
    if unknown := [name for name in arguments.model or () if not MODEL.fullmatch(name)]:
        parser.error(f"--model {' '.join(unknown)}: wanted tp1-6 or rank-20, 2 layers at least")
    if arguments.no_vllm and not arguments.llama_server:
        parser.error("--no-vllm without --llama-server PATH leaves nothing to measure")
    from gpubox.errors import GpuboxError

    try:
        vllm_command(Path("model"), 1, None, arguments.cpu, 1, arguments.options)
    except GpuboxError as fault:
        parser.error(f"--options {json.dumps(arguments.options)}: {fault}")
    arguments.until = time.monotonic() + arguments.limit
    arguments.model = arguments.model or (["tiny"] if arguments.cpu else ["tp1-6", "rank-20"])
    if arguments.clients is None:
        arguments.clients = [1, 4] if arguments.cpu else [1, 8, 64, 256]
    if arguments.prompts is None:
        arguments.prompts = [64, 512] if arguments.cpu else [512, 8192]
    for number in (signal.SIGTERM, signal.SIGHUP):  # the servers are ended, too
        signal.signal(number, lambda *caught: sys.exit(128 + caught[0]))
    failed, everything = 0, {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        out = (arguments.out or Path(temporary) / "out").resolve()
        for folder in (work, out):
            folder.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        card = parts(arguments, work, out)
        if card is None:
            return 1
        rates = f"copy {card['copy'] / TB:.2f} TB/s, bfloat16 {card['product'] / TB:.0f} TFLOP/s"
        print(f"{card['name']}: {rates}; written in {time.monotonic() - begun:.0f} s", flush=True)
        everything["card"] = card
        for name in arguments.model:
            fails, numbers = bench(name, work / name, out, card, arguments)
            failed += fails
            everything[name] = numbers
            (out / "benchmark.json").write_text(json.dumps(everything, indent=1))
            if arguments.work is None:
                shutil.rmtree(work / name, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
