# SPDX-License-Identifier: Apache-2.0
"""The unit's own wait for a token, against real servers on loopback."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import yaml
from gpubox import await_token
from gpubox.errors import GpuboxError
from gpubox.readiness import Endpoint, Question

from tests.unit.timing import AT_ONCE, FOREVER

QUESTION = Question("glm-5", "Hello", 4)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers 503 to the first requests, then one streamed completion."""

    refusals: Iterator[int]

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if next(self.refusals, None) is not None:
            self.send_response(503)
            self.end_headers()
            return
        assert asked["model"] == "glm-5"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        for event in ({"choices": [{"text": "x"}]}, {"choices": [], "usage": usage}):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def server(refusals: Iterator[int]) -> Iterator[Endpoint]:
    handler = type("Once", (Handler,), {"refusals": refusals})
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield Endpoint("127.0.0.1", running.server_port, "")
    finally:
        running.shutdown()
        running.server_close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(await_token, "POLL_SECONDS", 0.05)


def test_it_waits_for_the_token() -> None:
    refusals = iter(range(3))
    with server(refusals) as endpoint:
        seconds = await_token.await_token(endpoint, QUESTION, AT_ONCE, 0, Path("/"))
    assert next(refusals, None) is None
    assert seconds >= 3 * await_token.POLL_SECONDS


def test_it_gives_up_at_the_deadline() -> None:
    with server(count()) as endpoint, pytest.raises(GpuboxError, match=r"no token within 0\.3 s"):
        await_token.await_token(endpoint, QUESTION, 0.3, 0, Path("/"))


def test_it_stops_at_once_when_the_server_has_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    with server(count()) as endpoint, pytest.raises(GpuboxError, match="process 4711 has ended"):
        await_token.await_token(endpoint, QUESTION, FOREVER, 4711, tmp_path)
    assert time.monotonic() - begin < AT_ONCE


def test_the_release_carries_every_file_it_needs(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    variables = yaml.safe_load((root / "roles" / "serving" / "vars" / "main.yml").read_text())
    for name in variables["__serving_library_files"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((root / "plugins" / "module_utils" / name).read_text())
    subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            "import sys, runpy; sys.path.insert(0, sys.argv[1]);"  # noqa: ISC004
            "sys.argv = ['x', '--help']; runpy.run_module('gpubox.await_token', run_name='x')",
            str(tmp_path),
        ],
        check=True,
    )


def test_the_command_line_says_how_long_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    with server(iter(())) as endpoint:
        code = await_token.main(
            [
                f"--base-url=http://{endpoint.host}:{endpoint.port}",
                "--model=glm-5",
                "--prompt=Hello",
                "--max-tokens=4",
                "--deadline=60",
            ],
            {},
        )
    assert code == 0
    assert "the first token came" in capsys.readouterr().out
