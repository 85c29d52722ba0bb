# SPDX-License-Identifier: Apache-2.0
"""Runs molecule's scenarios side by side as far as memory allows: ``python -m tests.scenarios``.

Each scenario is a process of its own with a log in ``.cache/logs``. A scenario starts when the
memory that it needs is available beside what the running ones may still take.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".cache" / "logs"
SIGN_OF_LIFE = 30.0  # seconds

# GiB at the worst moment, measured (docs/performance.md): a server takes 3, one of two ranks 4.7,
# transformers and its weights beside it the rest.
MEMORY = {"site": 9.0, "boxes": 1.5, "reprovision": 1.0}
MEMORY_DEFAULT = 4.0

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ACTION = re.compile(r"INFO\s+\S+ ➜ (?P<action>\w+): Executing")
_BORDER = re.compile(r"^\s*│ ?")  # molecule frames what its commands print
_CLOSING = re.compile(r"=+ (.*\b(?:passed|failed|error)\b.* in [\d.]+s.*?) =+")
# What molecule lets pass: deprecations, and a step of the sequence that was not there to run.
SIGNS = ("[DEPRECATION WARNING]", "Executed: Missing playbook")


def available(meminfo: str) -> float:
    """Available memory in GiB, from the text of /proc/meminfo; infinite when it does not say."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) / (1 << 20) if match else float("inf")


def next_to_start(waiting: list[str], running: list[str], free: float) -> str | None:
    """The first waiting scenario that fits into ``free`` GiB; any one when nothing runs.

    What a running scenario will take is not yet taken when it has just begun, so all of it counts.
    """
    if not running:
        return waiting[0] if waiting else None
    left = free - sum(MEMORY.get(name, MEMORY_DEFAULT) for name in running)
    return next((name for name in waiting if MEMORY.get(name, MEMORY_DEFAULT) <= left), None)


def action(text: str) -> str:
    """What a scenario is doing, from its log."""
    found = ""
    for raw in _ANSI.sub("", text).splitlines():
        line = _BORDER.sub("", raw)
        match = _ACTION.search(line)
        if match:
            found = match["action"]
        elif line.startswith(("TASK [", "RUNNING HANDLER [")):
            task = line.partition("[")[2].partition("]")[0]
            found = f"{found.partition(':')[0]}: {task}"
    return found or "starting"


def closing_lines(text: str) -> list[str]:
    """Closing lines of pytest in a log, such as ``12 passed in 8.1s``."""
    return _CLOSING.findall(_ANSI.sub("", text))


@dataclass
class Run:
    """A scenario that was started."""

    name: str
    process: subprocess.Popen[bytes]
    stream: TextIO
    log: Path
    began: float
    seconds: float = 0.0

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def problem(self) -> str:
        """Why it failed, '' when it passed."""
        if self.process.returncode != 0:
            return f"molecule ended with {self.process.returncode}"
        text = _ANSI.sub("", self.text())
        for sign in SIGNS:
            if sign in text:
                return f"{sign!r} in its log"
        return ""


def start(name: str) -> Run:
    """Start ``molecule test`` of one scenario."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"molecule-{name}.log"
    stream = log.open("w", encoding="utf-8")
    process = subprocess.Popen(
        ["molecule", "test", "--no-command-borders", "--scenario-name", name],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    print(f"==> {name} began (log: {log.relative_to(ROOT)})", flush=True)
    return Run(name, process, stream, log, time.monotonic())


def run(names: list[str]) -> list[Run]:
    """Run scenarios; returns when all have ended."""
    waiting = list(names)
    running: list[Run] = []
    ended: list[Run] = []
    told = time.monotonic()
    try:
        while waiting or running:
            free = available(Path("/proc/meminfo").read_text(encoding="utf-8"))
            name = next_to_start(waiting, [one.name for one in running], free)
            if name is not None:
                waiting.remove(name)
                running.append(start(name))
                continue
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                ended.append(one)
                one.seconds = time.monotonic() - one.began
                one.stream.close()
                print(
                    f"==> {one.name} {one.problem() or 'passed'} ({one.seconds:.0f} s)", flush=True
                )
            if time.monotonic() - told >= SIGN_OF_LIFE:
                told = time.monotonic()
                for one in running:
                    print(
                        f"    … {one.name}: {action(one.text())} ({told - one.began:.0f} s so far)"
                    )
                sys.stdout.flush()
            time.sleep(0.5)
    except BaseException:
        for one in running:
            one.process.send_signal(signal.SIGINT)
        for one in running:
            one.process.wait()
        raise
    return ended


def main(arguments: list[str]) -> int:
    """Run the named scenarios, or all; the exit status."""
    known = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
    names = arguments or os.environ.get("SCENARIOS", "").split() or known
    unknown = sorted(set(names) - set(known))
    if unknown:
        print(f"measured: scenarios {unknown}\nwanted: some of {known}\ndo: correct the names")
        return 2
    # the longest first
    names.sort(key=lambda name: -MEMORY.get(name, MEMORY_DEFAULT))
    ended = run(names)
    for one in ended:
        if one.problem():
            print(f"\n---- {one.name}: the end of {one.log.relative_to(ROOT)}")
            print("\n".join(one.text().splitlines()[-120:]))
    print()
    for one in ended:
        for line in closing_lines(one.text()):
            print(f"{one.name}: pytest: {line}")
        print(f"{one.name}: {one.problem() or 'passed'} in {one.seconds:.0f} s")
    failed = sum(bool(one.problem()) for one in ended)
    print(f"scenarios: {len(ended) - failed} passed, {failed} failed", flush=True)
    return 1 if failed or not ended else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
