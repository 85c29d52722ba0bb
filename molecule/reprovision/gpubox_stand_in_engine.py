# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``vllm serve``: it answers what readiness asks, and computes nothing."""

from __future__ import annotations

import http.server
import json
import sys
from typing import Any

WORDS = ("this ", "is ", "a ", "stand-in")


def option(name: str) -> str:
    """Value of an option of the command line."""
    return sys.argv[sys.argv.index(name) + 1]


class Handler(http.server.BaseHTTPRequestHandler):
    """The model's name and completions."""

    def answer(self, kind: str, body: str) -> None:
        """Send an answer."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        """The list of models."""
        if self.path != "/v1/models":
            self.send_error(404)
            return
        models = {"data": [{"id": option("--served-model-name")}]}
        self.answer("application/json", json.dumps(models))

    def do_POST(self) -> None:
        """A streamed completion."""
        self.rfile.read(int(self.headers["Content-Length"]))
        events: list[dict[str, Any]] = [{"choices": [{"text": word}]} for word in WORDS]
        events.append({"usage": {"prompt_tokens": 1, "completion_tokens": len(WORDS)}})
        lines = [*(json.dumps(event) for event in events), "[DONE]"]
        self.answer("text/event-stream", "".join(f"data: {line}\n\n" for line in lines))


def main() -> None:
    """``vllm serve MODEL --option value …``."""
    print("stand-in engine started:", *sys.argv[1:], flush=True)
    address = (option("--host"), int(option("--port")))
    http.server.ThreadingHTTPServer(address, Handler).serve_forever()
