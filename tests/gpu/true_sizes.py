# SPDX-License-Identifier: Apache-2.0
"""Does a model of GLM-5's true sizes load at the machine's own speed, and answer right on a GPU?

    python tests/gpu/true_sizes.py

Run it with the Python of a release's environment. It writes a random GLM-5 of a few layers whose
tensors have the true sizes (stacks of experts beyond 2**31 bytes; 18 GB with four layers), serves
it alone on one card, and prints one line a check: PASS or FAIL and what was measured; exit status 1
when one fails. Without an NVIDIA GPU it says so and ends with 0.

- cold: bytes of the file by the seconds from the first weight to the last one in place, with the
  file on the disk; at least 80 % of what eight threads read from the file into the card through
  pinned memory, measured before and after.
- warm: the same with the file in the page cache; no slower than from the disk, and its share of
  what the threads read is told. There what is computed while loading counts.
- prefixes: the log probabilities of 8,176 tokens at once are those that beginnings of them get
  alone, from other kernels: they differ by less than 15 % of their deviation, which is what
  rounding does to routers with 256 experts. (Unrelated ones differ by more than all of it.)
- graphs: 16 texts decoded at once in CUDA graphs are those decoded without; a text may part at a
  near-tie only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import serving

SHARE = 0.8  # of what the machine reads
LONG, PREFIXES = 8176, (64, 300, 1500)  # tokens
SAME = 0.15  # of the deviation of the log probabilities
DISTINCT = 1 << 20  # weights that are drawn of a tensor, then repeated
READERS, PIECE = 8, 16 << 20  # threads; bytes
GB = 1e9


def sizes(layers: int) -> Any:
    """GLM-5's own sizes, a few layers and a small vocabulary.

    Source: config.json of zai-org/GLM-5.
    """
    from demo.tiny_glm5.model import Dimensions

    return Dimensions(
        hidden=6144,
        layers=layers,
        nextn_layers=0,
        heads=64,
        q_lora_rank=2048,
        feed_forward=12288,
        expert_feed_forward=2048,
        experts=256,
        experts_used=8,
        context=8192,
    )


def text() -> list[int]:
    """Random token ids, always the same."""
    generator = random.Random(2)  # noqa: S311 - no secret
    return [generator.randrange(8, 512) for _ in range(LONG)]


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def from_disk() -> int:
    """Bytes that this process has had fetched from a disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def reading(path: Path) -> dict[str, float]:
    """What this machine reads from a file into the card: bytes, seconds, bytes from the disk."""
    import torch

    size, before = path.stat().st_size, from_disk()
    torch.zeros(1, device="cuda")
    buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(READERS)]
    on_card = [torch.empty(PIECE, dtype=torch.uint8, device="cuda") for _ in range(READERS)]
    file = os.open(path, os.O_RDONLY)

    def read(number: int) -> None:
        stream, buffer = torch.cuda.Stream(), memoryview(buffers[number].numpy())
        with torch.cuda.stream(stream):
            for start in range(number * PIECE, size, READERS * PIECE):
                count = os.preadv(file, [buffer], start)
                on_card[number][:count].copy_(buffers[number][:count], non_blocking=True)
                stream.synchronize()

    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, range(READERS)))
    seconds = time.monotonic() - begun
    os.close(file)
    return {"bytes": size, "seconds": seconds, "from disk": from_disk() - before}


def timed_loading() -> dict[str, float]:
    """Seconds that the plugin will have needed for building the model, and for its weights."""
    import torch
    from vllm_gguf_plugin import loader

    times: dict[str, float] = {}
    initialize, load = loader.initialize_model, loader.GGUFModelLoader.load_model

    def timed_initialize(*args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        model = initialize(*args, **kwargs)
        times["build"] = time.monotonic() - begun
        return model

    def timed_load(*args: Any, **kwargs: Any) -> Any:
        begun, before = time.monotonic(), from_disk()
        model = load(*args, **kwargs)
        torch.cuda.synchronize()
        times["seconds"] = time.monotonic() - begun - times["build"]
        times["from disk"] = from_disk() - before
        return model

    loader.initialize_model, loader.GGUFModelLoader.load_model = timed_initialize, timed_load
    return times


def engine(path: Path, graphs: bool) -> dict[str, Any]:
    """Load, and answer the text, its beginnings and what is continued."""
    times = timed_loading()
    tokens = text()
    options: dict[str, Any] = {
        "max_model_len": LONG + 16,
        "max_num_batched_tokens": LONG + 16,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 1 << 30,
        **(serving.GRAPHS if graphs else {}),
    }
    # one after the other, so that each makes a batch of its own
    forced = {str(length): [tokens[:length]] for length in (LONG, *PREFIXES)} if graphs else {}
    return {"load": times, **serving.engine(path, forced, options)}


def judge_load(
    load: dict[str, float], read: list[dict[str, float]], cold: float | None
) -> tuple[bool, str]:
    """Whether the weights came as fast as the machine reads.

    ``cold``: None for the file on the disk, else the seconds that it took from there.
    """
    size = read[0]["bytes"]
    able = fmean(size / GB / one["seconds"] for one in read)
    rate = size / GB / load["seconds"]
    line = f"{size / GB:.1f} GB in {load['seconds']:.1f} s (the model built in {load['build']:.1f})"
    line += f": {rate:.2f} GB/s, {rate / able:.0%} of "
    line += ", ".join(f"{size / GB / one['seconds']:.2f}" for one in read)
    share = [one["from disk"] / size for one in (load, *read)]
    line += f"; from the disk {', '.join(f'{part:.0%}' for part in share)}"
    if cold is None:
        return rate >= SHARE * able and all(part > 0.9 for part in share), line
    return load["seconds"] <= cold and share[0] < 0.1, line


def judge_prefixes(served: dict[str, list[list[float]]]) -> tuple[bool, str]:
    """Whether long and short batches agree."""
    long, deviation = served[str(LONG)][0], pstdev(served[str(LONG)][0])
    means = {}
    for length in PREFIXES:
        row = served[str(length)][0]
        means[length] = fmean(serving.apart([long[: len(row)]], [row]))
    line = ", ".join(f"{length} tokens {mean:.4f}" for length, mean in means.items())
    return (
        all(mean <= SAME * deviation for mean in means.values()),
        f"mean differences: {line}; deviation {deviation:.2f}",
    )


def judged(results: dict[str, list[dict[str, Any]]]) -> dict[str, tuple[bool, str]]:
    """The checks whose measurements are all there: whether it passed, and what was measured."""
    checks = {}
    warm, cold, read = results["warm"], results["cold"], results["read"]
    if warm:
        checks["prefixes"] = judge_prefixes(warm[0])
    if warm and cold:
        tie = serving.NEAR_TIE["mtp"]
        checks["warm"] = judge_load(warm[0]["load"], read[:1], cold[0]["load"]["seconds"])
        checks["graphs"] = serving.judge_same("graphs", tie, cold[0], warm[0])
    if cold and len(read) == 3:
        checks["cold"] = judge_load(cold[0]["load"], read[1:], None)
    return checks


def main() -> int:
    """Write the model, load it twice, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="the first has no experts")
    parser.add_argument("--out", type=Path, help="folder for the model and logs, kept")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(serving.ROOT))
    if not Path("/proc/driver/nvidia/version").exists():
        print("no NVIDIA GPU (no /proc/driver/nvidia/version): nothing was checked")
        return 0
    from demo.tiny_glm5.model import FILE_STEM
    from demo.tiny_glm5.writer import write

    with tempfile.TemporaryDirectory(prefix="true-sizes-") as temporary:
        work = arguments.out or Path(temporary)
        path = work / f"{FILE_STEM}.gguf"
        if arguments.part:
            answer = (
                reading(path)
                if arguments.part == "read"
                else engine(path, arguments.part == "warm")
            )
            (work / "answer.json").write_text(json.dumps(answer))
            return 0
        write(work, 1, dim=sizes(arguments.layers), distinct=DISTINCT)
        results: dict[str, list[dict[str, Any]]] = {"warm": [], "cold": [], "read": []}
        told: dict[str, bool] = {}
        for part, cold in (
            ("read", False),
            ("warm", False),
            ("read", True),
            ("cold", True),
            ("read", True),
        ):
            if cold:
                forget(path)
            (work / "answer.json").unlink(missing_ok=True)
            log = work / f"{part}.log"
            command = [sys.executable, __file__, "--part", part, "--out", str(work)]
            if serving.run(command, log).wait() != 0:
                print(f"FAIL {part} {serving.last_error(log)}")
                return 1
            results[part].append(json.loads((work / "answer.json").read_text()))
            one = results[part][-1].get("load", results[part][-1])
            state = "the disk" if cold else "the page cache"
            print(f"{part:<5} {one['seconds']:.1f} s, from {state}", flush=True)
            for check, (passed, line) in judged(results).items():
                if check not in told:
                    told[check] = passed
                    print(f"{'PASS' if passed else 'FAIL'} {check:<9} {line}", flush=True)
    failed = sum(not passed for passed in told.values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
