# SPDX-License-Identifier: Apache-2.0
"""``ExecStartPost=`` of the unit: it is active when a token has come, and not before.

systemd runs this beside the server that it has just started and waits for it. So ``systemctl
start`` returns, and ``systemctl is-active`` says active, when the server has generated a real
token; after every restart too, with nobody watching.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import GpuboxError
from .readiness import Endpoint, NotYetError, Question, complete

POLL_SECONDS = 1.0


def await_token(
    endpoint: Endpoint, question: Question, deadline_seconds: float, main_pid: int, root: Path
) -> float:
    """Ask until an answer has come.

    Args:
        endpoint: the server.
        question: what is asked.
        deadline_seconds: longest time.
        main_pid: the server's process; 0 when unknown.
        root: where ``/proc`` lies.

    Returns:
        Seconds waited.

    Raises:
        GpuboxError: the server has ended, gave a wrong answer, or the deadline has passed.
    """
    begin = time.monotonic()
    deadline = begin + deadline_seconds
    answer = "it was not asked yet"
    while time.monotonic() < deadline:
        if main_pid and not (root / "proc" / str(main_pid)).exists():
            raise GpuboxError(
                f"process {main_pid} has ended", "a server that runs", "read the lines above"
            )
        try:
            complete(endpoint, question, deadline)
        except NotYetError as error:
            answer = str(error)
        else:
            return time.monotonic() - begin
        time.sleep(POLL_SECONDS)
    raise GpuboxError(
        f"no token within {deadline_seconds:g} s: {answer}",
        f"a token of {question.model}",
        "read the lines above; raise serving_start_timeout for a slow disk or a large model",
    )


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Entry point; what it prints goes to the unit's journal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--deadline", type=float, required=True, help="seconds")
    given = parser.parse_args(arguments)
    try:
        seconds = await_token(
            Endpoint.parse(given.base_url),
            Question(given.model, given.prompt, given.max_tokens),
            given.deadline,
            int(environment.get("MAINPID") or 0),
            Path("/"),
        )
    except GpuboxError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"the first token came {seconds:.1f} s after the start")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
