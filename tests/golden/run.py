# SPDX-License-Identifier: Apache-2.0
"""Is the answer right? Compares what vLLM serves from a GGUF with transformers in fp32.

    python tests/golden/run.py --python /opt/gpubox/current/venv/bin/python \
        --model merged.gguf --shards model-00001-of-00003.gguf --patches files/patches

One line a case: name, PASS or FAIL, seconds, what was measured. Exit status 0 when all pass, 1 when
one fails, 2 for wrong arguments. Needs nothing but a Python 3.11 (that of the environment serves).
With --server it compares a running server (fp32, no API key) instead of engines of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import overlay
from cases import (
    CASES,
    MAX_TOKENS,
    PLUGIN,
    PLUGIN_CPU,
    PROMPTS,
    TOLERANCE,
    VLLM_CPU,
    WRONG,
    Case,
    Damage,
)

_JOB_SECONDS = 240
_PATHS = "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"


@dataclass(frozen=True)
class Settings:
    """What is tested: the environment's Python, the model's files, the patch folders."""

    python: Path
    model: Path
    shards: Path | None
    patches: Path
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Outcome:
    """Result of one case."""

    passed: bool
    seconds: float
    measured: str


def compare(
    answers: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float
) -> tuple[float, list[str]]:
    """Largest absolute difference of logprobs, and which greedy tokens differ.

    The logprobs are those of the prompts and of the continuations, as far as these are the same. A
    greedy token may differ where the reference itself sees a tie (a lead below the tolerance): the
    rest of that continuation then says nothing and is left out.
    """
    largest = 0.0
    faults = []
    for number, (answer, reference) in enumerate(zip(answers, wanted, strict=True)):
        pairs = list(zip(answer["prompt_logprobs"], reference["prompt_logprobs"], strict=True))
        for index, token in enumerate(reference["tokens"]):
            if answer["tokens"][index] != token:
                if reference["leads"][index] > tolerance:
                    other = answer["tokens"][index]
                    faults.append(f"token {index} of answer {number} is {other}, not {token}")
                break
            pairs.append((answer["logprobs"][index], reference["logprobs"][index]))
        largest = max(largest, *(abs(one - other) for one, other in pairs))
    return largest, faults


def draft_faults(
    drafts: list[list[int]], wanted: list[dict[str, Any]], accepted_lead: float
) -> list[str]:
    """Proposals that differ from the reference, ties left out."""
    if not drafts:
        return ["the draft model proposed nothing"]
    return [
        f"position {position}: {token}, not {wanted[position]['token']}"
        for position, token in drafts
        if position < len(wanted)
        and wanted[position]["token"] != token
        and wanted[position]["lead"] > accepted_lead
    ]


class Golden:
    """The environment under test: one process that imports vLLM once, one fork a case."""

    def __init__(self, settings: Settings, work: Path) -> None:
        self.settings = settings
        self.work = work
        self._probe: subprocess.Popen[str] | None = None
        self._references: dict[Path, dict[str, Any]] = {}
        self._jobs = 0
        found = subprocess.run(
            [settings.python, "-c", _PATHS], check=True, capture_output=True, text=True
        )
        self.site_packages = Path(json.loads(found.stdout))

    def __enter__(self) -> Golden:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._probe is not None and self._probe.stdin is not None:
            self._probe.stdin.close()
            self._probe.wait(timeout=30)

    def _answer(self) -> dict[str, Any]:
        assert self._probe is not None
        assert self._probe.stdout is not None
        line = self._probe.stdout.readline()
        if not line:
            log = (self.work / "probe.log").read_text()[-3000:]
            raise RuntimeError(f"{self.settings.python} probe.py ended: {log}")
        return dict(json.loads(line))

    def job(self, **job: Any) -> tuple[dict[str, Any] | None, str, float]:
        """Run one job; its result (None when it failed), its log and its seconds."""
        if self._probe is None:
            with (self.work / "probe.log").open("w") as log:
                self._probe = subprocess.Popen(
                    [self.settings.python, Path(__file__).with_name("probe.py")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
                )
            self._answer()
        assert self._probe.stdin is not None
        self._jobs += 1
        log_file = self.work / f"{self._jobs:02d}-{job['id']}.log"
        result = log_file.with_suffix(".json")
        job |= {"log": str(log_file), "result": str(result), "timeout": _JOB_SECONDS}
        self._probe.stdin.write(json.dumps(job) + "\n")
        self._probe.stdin.flush()
        answer = self._answer()
        text = log_file.read_text(errors="replace")
        if answer["status"] == 124:
            text += f"\nkilled after {_JOB_SECONDS} s"
        passed = answer["status"] == 0
        return (json.loads(result.read_text()) if passed else None), text, answer["seconds"]

    def reference(self, model: Path) -> dict[str, Any]:
        """What transformers computes from that file, once."""
        if model not in self._references:
            result, log, _ = self.job(
                id="reference",
                kind="reference",
                model=str(model),
                prompts=PROMPTS,
                max_tokens=MAX_TOKENS,
            )
            if result is None:
                raise RuntimeError(f"the reference failed: {log[-3000:]}")
            self._references[model] = result
        return self._references[model]

    def _leave_out(self, case: Case) -> dict[str, Any]:
        """Job fields that take one patch away."""
        if case.left_out is None:
            return {}
        folder, number = case.left_out.split("/")
        target = self.work / case.name
        if folder == VLLM_CPU:
            patch = next((self.settings.patches / folder).glob(f"{number}-*.patch"))
            return {"override": overlay.files_without(self.site_packages, patch, target)}
        stack = [
            patch
            for name in (PLUGIN, PLUGIN_CPU)
            for patch in overlay.series(self.settings.patches / name)
        ]
        made = overlay.package_without(
            self.site_packages, "vllm_gguf_plugin", stack, [case.left_out, *case.dependants], target
        )
        return {"overlay": str(made)}

    def run(self, case: Case) -> Outcome:
        """Run one case."""
        if case.name == "cpu-cli":
            result, log, seconds = self.job(id=case.name, kind="cli", arguments=["--version"])
            return Outcome(result == {"status": 0}, seconds, log.strip().splitlines()[-1])
        # The reference reads the file that the engine reads; shards and merged file are equal, so
        # one of them is enough.
        model = self.settings.shards if case.shards else self.settings.model
        if model is None:
            return Outcome(False, 0, "no --shards given")
        if case.damage is not None:
            model = damaged(model, case.damage, self.work / f"{case.name}-model")
        cores = sorted(os.sched_getaffinity(0))
        ranks = case.tensor_parallel_size
        result, log, seconds = self.job(
            id=case.name,
            kind="engine",
            model=str(model),
            prompts=PROMPTS[:1] if case.drafts else PROMPTS,
            max_tokens=MAX_TOKENS,
            arguments={"tensor_parallel_size": ranks, **case.arguments},
            environment={
                "VLLM_CPU_OMP_THREADS_BIND": "|".join(
                    str(cores[rank % len(cores)]) for rank in range(ranks)
                )
            },
            **self._leave_out(case),
        )
        passed, measured = self._judge(case, result, log)
        return Outcome(passed, seconds, measured)

    def _judge(self, case: Case, result: dict[str, Any] | None, log: str) -> tuple[bool, str]:
        if result is None:
            errors = [line for line in log.splitlines() if "Error" in line] or [log[-300:]]
            if case.symptom in (None, "wrong"):
                return False, f"the engine failed: {errors[-1][-300:]}"
            assert case.symptom is not None
            if case.symptom in log:
                return True, f"fails as expected: {case.symptom}"
            return False, f"failed with {errors[-1][-300:]!r}, not with {case.symptom!r}"
        wanted = self.reference(self.settings.model)
        tolerance = self.settings.tolerance
        difference, faults = compare(
            result["answers"], wanted["answers"][: len(result["answers"])], tolerance
        )
        if case.symptom == "wrong":
            return difference > WRONG, f"largest difference {difference:.1e}, wrong as expected"
        faults += result.get("faults", [])
        measured = f"largest difference {difference:.1e}"
        if "read_bytes" in result:
            most = max(count for _, count in result["read_bytes"])
            measured += f", {most / 1e6:.1f} MB read by a rank"
        if case.drafts:
            drafts = result.get("drafts", [])
            faults += draft_faults(drafts, wanted["drafts"], tolerance)
            measured += f", {len(drafts)} drafts"
        if faults:
            measured += f"; {len(faults)} faults: {', '.join(faults[:3])}"
        if case.symptom is not None:
            return any(case.symptom in fault for fault in faults), measured
        return difference <= tolerance and not faults, measured

    def server(self, base_url: str, name: str) -> Outcome:
        """Compare a running server's completions with the reference."""
        wanted = self.reference(self.settings.model)
        started = time.monotonic()
        answers = [ask(base_url, name, prompt) for prompt in PROMPTS]
        difference, faults = compare(answers, wanted["answers"], self.settings.tolerance)
        return Outcome(
            difference <= self.settings.tolerance and not faults,
            time.monotonic() - started,
            ", ".join([f"largest difference {difference:.1e}", *faults]),
        )


def damaged(model: Path, damage: Damage, folder: Path) -> Path:
    """A copy of ``model`` with one tensor's record changed, configuration and tokenizer beside."""
    shutil.copytree(model.parent, folder, ignore=lambda *_: [model.name], dirs_exist_ok=True)
    content = bytearray(model.read_bytes())
    name = damage.tensor.encode()
    found = content.index(struct.pack("<Q", len(name)) + name) + 8
    if damage.name is not None:
        content[found : found + len(name)] = damage.name.encode()
    if damage.quantization_type is not None:
        # behind the name: the number of dimensions, each of them, the type (GGUF specification)
        dimensions = struct.unpack_from("<I", content, found + len(name))[0]
        struct.pack_into(
            "<I", content, found + len(name) + 4 + 8 * dimensions, damage.quantization_type
        )
    copy = folder / model.name
    copy.write_bytes(content)
    return copy


def ask(base_url: str, name: str, prompt: list[int]) -> dict[str, Any]:
    """One completion with the logprobs of the prompt and of the greedy continuation."""
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "prompt_logprobs": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(  # noqa: S310 - the caller's own server
        base_url.rstrip("/") + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
            choice = json.load(reply)["choices"][0]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{request.full_url} answered {error}: {error.read()[:500]!r}") from None
    return {
        "prompt_logprobs": [
            entry[str(token)]["logprob"]
            for token, entry in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        ],
        "tokens": choice["token_ids"],
        "logprobs": choice["logprobs"]["token_logprobs"],
    }


def main() -> int:
    """Run the chosen cases; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="of the patched environment")
    parser.add_argument("--model", type=Path, required=True, help="merged GGUF, config.json beside")
    parser.add_argument("--shards", type=Path, help="first shard of the same model")
    parser.add_argument("--patches", type=Path, help="files/patches of the repository")
    parser.add_argument("--server", help="base URL of a running server to compare")
    parser.add_argument("--name", default="glm-5", help="model name of the server")
    parser.add_argument("--cases", help="comma separated names, all by default; none with --server")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--work", type=Path, help="folder for logs, kept")
    parser.add_argument("--list", action="store_true", help="show the cases and stop")
    arguments = parser.parse_args()
    if arguments.list:
        for case in CASES:
            print(f"{case.name:20} {case.about}")
        return 0
    names = [case.name for case in CASES]
    if arguments.cases is not None:
        names = [name for name in arguments.cases.split(",") if name]
    elif arguments.server:
        names = []
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))} (see --list)")
    patches = arguments.patches or Path(__file__).parents[2] / "files/patches"
    settings = Settings(
        arguments.python, arguments.model, arguments.shards, patches, arguments.tolerance
    )
    started = time.monotonic()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        with Golden(settings, work) as golden:
            runs = [(case.name, golden.run, (case,)) for case in CASES if case.name in names]
            if arguments.server:
                runs.append(("server", golden.server, (arguments.server, arguments.name)))
            for name, run, given in runs:
                outcome = run(*given)
                failed += not outcome.passed
                verdict = "PASS" if outcome.passed else "FAIL"
                print(
                    f"{name:20} {verdict} {outcome.seconds:6.1f} s  {outcome.measured}", flush=True
                )
    print(f"{len(runs) - failed} passed, {failed} failed in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
