# SPDX-License-Identifier: Apache-2.0
"""Times the merger against `cat` and llama-gguf-split, paired, and prints one table.

``python -m tests.bench.gguf_merge FOLDER --tool PATH``: the set is written below FOLDER, which
needs three times its size. Each round runs every method once, as a whole process, in the same
state of the page cache: cold (dropped), or pretouched (dropped, and the memory that a method takes
for the page cache handed out and given back before). As root the caches are dropped by the kernel;
without, POSIX_FADV_DONTNEED drops those of the files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpubox.gguf import read_header

from tests.bench.gguf_set import write_header

ROOT = Path(__file__).resolve().parents[2]
DROP = Path("/proc/sys/vm/drop_caches")


@dataclass
class Figures:
    """Of one method: one entry a round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)


def memory(name: str) -> int:
    """Bytes of one line of /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/meminfo without {name}")


def drop(paths: Sequence[Path]) -> None:
    """Take the files out of the page cache."""
    os.sync()
    if os.access(DROP, os.W_OK):
        DROP.write_text("3")
        return
    for path in paths:
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pretouch(size: int) -> None:
    """Let the host hand out memory now, so that no method pays for it later; most of what is free.

    In a process of its own, which gives it back by ending.
    """
    size = min(size, memory("MemAvailable") * 6 // 10)
    code = "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)"  # noqa: E501
    subprocess.run([sys.executable, "-c", code, str(size)], check=True)


def timed(command: Sequence[str | Path], figures: Figures) -> None:
    """Run one whole process."""
    before = memory("Cached")
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "plugins" / "module_utils")}
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command}: exit status {process.returncode}")
    figures.wall.append(time.monotonic() - began)
    figures.cpu.append(usage.ru_utime + usage.ru_stime)
    figures.rss.append(usage.ru_maxrss * 1024)
    figures.cached.append(memory("Cached") - before)


def commands(
    python: str, shards: Sequence[Path], dest: Path, tool: str | None
) -> dict[str, list[str | Path]]:
    """What is compared: name to command that writes ``dest``."""
    ours: list[str | Path] = [python, "-m", "gpubox.gguf_merge", "--quiet", shards[0], dest]
    found: dict[str, list[str | Path]] = {
        "cat": ["sh", "-c", 'out=$1; shift; cat "$@" > "$out" && sync "$out"', "-", dest, *shards],
    }
    if tool:
        found["llama-gguf-split"] = [
            "sh", "-c", '"$1" --merge "$2" "$3" && sync "$3"', "-", tool, shards[0], dest,
        ]  # fmt: skip
    return {**found, "gpubox": ours, "gpubox --verify": [*ours, "--verify"]}


def remove(dest: Path) -> None:
    for path in (dest, dest.with_name(f"{dest.name}.manifest.json")):
        path.unlink(missing_ok=True)


def paired(figures: Figures, base: Figures) -> str:
    """Times as multiples of another method's in the same round, least and most."""
    ratios = [one / other for one, other in zip(figures.wall, base.wall, strict=True)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def compare(
    dest: Path, shards: Sequence[Path], size: int, rounds: int, python: str, tool: str | None
) -> None:
    """Run all methods and print the table."""
    state_names = ("cold", "pretouched")
    for state in state_names:
        table: dict[str, Figures] = {}
        for _ in range(rounds):
            for name, command in commands(python, shards, dest, tool).items():
                remove(dest)
                drop(shards)
                if state == "pretouched":
                    pretouch(2 * size)
                timed(command, table.setdefault(name, Figures()))
        print(f"\n{state}, {rounds} rounds; ratio: cat's time by the method's, of each round\n")
        print("| method | s | GB/s | ratio | CPU s/GB | RSS MiB | page cache left, GB |")
        print("|---|---|---|---|---|---|---|")
        for name, found in table.items():
            ratios = [c / o for c, o in zip(table["cat"].wall, found.wall, strict=True)]
            wall = statistics.median(found.wall)
            print(
                f"| {name} | {min(found.wall):.1f} to {max(found.wall):.1f} "
                f"| {size / wall / 1e9:.2f} "
                f"| {min(ratios):.2f} to {max(ratios):.2f} "
                f"| {min(found.cpu) / size * 1e9:.2f} to {max(found.cpu) / size * 1e9:.2f} "
                f"| {max(found.rss) >> 20} | {statistics.median(found.cached) / 1e9:.2f} |",
                flush=True,
            )
        verified = paired(table["gpubox --verify"], table["gpubox"])
        print(f"\ncopy and verification: {verified} times the copy's time")
        if tool:
            print(
                f"llama-gguf-split: {paired(table['llama-gguf-split'], table['gpubox'])} times it"
            )
    if tool:
        theirs = dest.with_name("theirs.gguf")
        subprocess.run([tool, "--merge", shards[0], theirs], check=True, capture_output=True)
        same = subprocess.run(["cmp", dest, theirs], check=False).returncode == 0
        theirs.unlink()
        print(f"\nidentical to llama-gguf-split --merge: {'yes' if same else 'NO'}")


def headers(path: Path) -> None:
    """Time to parse ten headers of a real model's size."""
    write_header(path)
    wall, cpu = [], []
    for _ in range(7):
        began, used = time.monotonic(), time.process_time()
        for _ in range(10):
            header = read_header(path)
        wall.append(time.monotonic() - began)
        cpu.append(time.process_time() - used)
    path.unlink()
    print(
        f"ten headers of {header.end / 1e6:.1f} MB, {len(header.tensors)} tensors: "
        f"{min(wall):.3f} to {max(wall):.3f} s, {min(cpu):.3f} to {max(cpu):.3f} CPU s"
    )


def reflink(work: Path, shards: Sequence[Path], python: str, kind: str) -> None:
    """Time and extra space where blocks are shared, on a file system in a loop device."""
    if os.geteuid() or shutil.which(f"mkfs.{kind}") is None:
        print(f"reflink, {kind}: needs root and mkfs.{kind}")
        return
    image, folder = work / "image", work / "mounted"
    folder.mkdir(exist_ok=True)
    size = sum(path.stat().st_size for path in shards)
    with image.open("wb") as stream:
        stream.truncate(size * 5 // 4 + (1 << 30))
    subprocess.run([f"mkfs.{kind}", "-q", image], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        own = [Path(shutil.copy(path, folder)) for path in shards]
        dest = folder / "merged.gguf"
        command = [
            python,
            "-m",
            "gpubox.gguf_merge",
            "--quiet",
            "--method",
            "reflink",
            own[0],
            dest,
        ]
        figures, extra = Figures(), []
        for _ in range(3):
            remove(dest)
            drop(own)
            before = free(folder)
            timed(command, figures)
            os.sync()
            extra.append(before - free(folder))
        header = read_header(dest).end
    finally:
        subprocess.run(["umount", folder], check=True)
        image.unlink()
    print(
        f"reflink, {kind}: {min(figures.wall):.2f} to {max(figures.wall):.2f} s, at most "
        f"{max(extra) / 1e6:.2f} MB more space (header {header / 1e6:.2f} MB)"
    )


def free(folder: Path) -> int:
    """Bytes that are left on a file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def in_place(shards: Sequence[Path], dest: Path, python: str) -> None:
    """Time and extra space of a merge in place. Consumes the set."""
    os.sync()
    before = least = free(dest.parent)
    size = sum(path.stat().st_size for path in shards)
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "plugins" / "module_utils")}
    command = [python, "-m", "gpubox.gguf_merge", "--quiet", "--method", "in_place",
               str(shards[0]), str(dest)]  # fmt: skip
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        least = min(least, free(dest.parent))
        time.sleep(0.01)
    took = time.monotonic() - began
    print(
        f"in place: {took:.1f} s ({size / took / 1e9:.2f} GB/s), exit status "
        f"{process.returncode}, at most {(before - least) / 1e6:.0f} MB more space (sampled each "
        "10 ms; other writers on this file system count too)"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tool", default=os.environ.get("LLAMA_GGUF_SPLIT"))
    parser.add_argument(
        "--python", default=sys.executable, help="the box's own, as Ansible uses it"
    )
    parser.add_argument("--size", type=float, default=6.2, help="GB")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    size = int(given.size * 1e9)
    given.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(given.folder).free
    if free < 3 * size:
        raise SystemExit(f"{given.folder}: {free / 1e9:.1f} GB free, {3 * size / 1e9:.1f} wanted")
    work = given.folder / "gguf-bench"
    shutil.rmtree(work, ignore_errors=True)
    try:
        # apart: a child's largest memory counts from that of its parent
        writer = [sys.executable, "-m", "tests.bench.gguf_set", str(work / "shards"), str(size)]
        subprocess.run(writer, check=True)
        shards = sorted((work / "shards").iterdir())
        count = sum(len(read_header(path).tensors) for path in shards)
        total = sum(path.stat().st_size for path in shards)
        print(
            f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}; {len(shards)} shards, {count} tensors, "
            f"{total / 1e9:.2f} GB"
        )
        dest = work / "merged.gguf"
        compare(dest, shards, total, given.rounds, given.python, given.tool)
        remove(dest)
        for kind in ("xfs", "btrfs"):
            reflink(work, shards, given.python, kind)
        in_place(shards, dest, given.python)
        headers(work / "header.gguf")  # last: it takes memory, which children inherit
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
