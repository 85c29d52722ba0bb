# SPDX-License-Identifier: Apache-2.0
"""All tests that need an NVIDIA GPU, and one table: ``make gpu-check``.

Uses the environment of the release that /opt/gpubox/current names, or the interpreter given with
--python (vLLM, the patched plugin). Writes the models that are served: 18 GB in the folder for
temporary files (TMPDIR), 45 GB with --time. Without an NVIDIA GPU it says that nothing was checked
and ends with 0. With --time it also times the kernels and what is served (benchmark.py); --only
runs some of the parts.
Stop a running server first: the kernels are tested at GLM-5's real sizes, stacks of up to 14 GB,
four of them at a time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CURRENT = Path("/opt/gpubox/current/manifest.json")
VERSIONS = """
import importlib.metadata as metadata
names = ("vllm", "vllm-gguf-plugin", "torch", "triton", "transformers")
print(", ".join(f"{name} {metadata.version(name)}" for name in names))
"""


def release_python() -> Path | None:
    """The interpreter of the current release's environment, None when there is none."""
    if not CURRENT.is_file():
        return None
    environment = json.loads(CURRENT.read_text(encoding="utf-8"))["environment"]
    return Path(f"/opt/gpubox/environments/{environment}/venv/bin/python")


def output(*command: str | Path) -> str:
    """What a command prints, or why it did not."""
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout if done.returncode == 0 else done.stderr or "it failed").strip()


def run(name: str, command: list[str | Path]) -> tuple[str, int, int, float]:
    """Run one part and show its lines; (name, passed, failed, seconds)."""
    print(f"\n== {name}", flush=True)
    begun = time.monotonic()
    passed = failed = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            passed += line.startswith("PASS ")
            failed += line.startswith("FAIL ")
    if process.returncode != 0 or not passed:
        failed = max(failed, 1)
    return name, passed, failed, time.monotonic() - begun


def main() -> int:
    """Run every part; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", type=Path, help="of the environment to test")
    parser.add_argument("--time", action="store_true", help="also time kernels and what is served")
    parser.add_argument("--llama-server", help="llama.cpp's server, to time beside vLLM")
    parser.add_argument("--only", nargs="+", metavar="PART", help="as the table names them")
    arguments = parser.parse_args()
    if not Path("/proc/driver/nvidia/version").exists():
        print("gpu-check: no NVIDIA GPU here (no /proc/driver/nvidia/version); NOTHING WAS CHECKED")
        return 0
    python = arguments.python or release_python()
    if python is None or not python.exists():
        print(
            f"measured: {python or CURRENT} does not exist\n"
            "wanted: the environment of a release of gpubox\n"
            "do: run site.yml on this machine first, or give --python",
            file=sys.stderr,
        )
        return 2
    parts: list[tuple[str, list[str | Path]]] = [
        ("compile", [python, HERE / "compile.py"]),
        ("interpret", [python, HERE / "interpret.py"]),
        ("dispatch", [python, HERE / "dispatch.py", "--patches", ROOT / "files/patches"]),
        ("kernels", [python, HERE / "kernels.py"]),
        ("attention", [python, HERE / "attention.py"]),
        ("serving", [python, HERE / "serving.py"]),
        ("true sizes", [python, HERE / "true_sizes.py"]),
    ]
    if arguments.time:
        parts.append(("times", [python, HERE / "kernels.py", "--time"]))
        parts.append(("expert times", [python, HERE / "tune_experts.py"]))
        parts.append(("linear times", [python, HERE / "tune_linear.py"]))
        parts.append(("attention times", [python, HERE / "attention.py", "--time"]))
        benchmark: list[str | Path] = [python, HERE / "benchmark.py", "--profile"]
        benchmark += ["--limit", "1200"]  # seconds
        if arguments.llama_server:
            benchmark += ["--llama-server", arguments.llama_server]
        parts.append(("benchmark", benchmark))
    if arguments.only:
        unknown = sorted(set(arguments.only) - {name for name, _ in parts})
        if unknown:
            parser.error(
                f"--only {', '.join(unknown)}: wanted some of {', '.join(n for n, _ in parts)}"
            )
        parts = [part for part in parts if part[0] in arguments.only]
    results = [run(name, command) for name, command in parts]
    card = output(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    print(f"\n{datetime.date.today()}; {'; '.join(sorted(set(card.splitlines())))}")
    print(output(python, "-c", VERSIONS))
    print(f"\n{'part':<15} {'passed':>7} {'failed':>7} {'seconds':>8}")
    for name, passed, failed, seconds in results:
        print(f"{name:<15} {passed:>7} {failed:>7} {seconds:>8.0f}")
    wrong = [name for name, _, failed, _ in results if failed]
    print(f"\ngpu-check: {'wrong: ' + ', '.join(wrong) if wrong else 'all of it is right'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
