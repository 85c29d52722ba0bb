# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server of files that can be told to misbehave, request by request."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer:
    """Serves ``files`` (path to bytes) with ranges and ETags; ``seen`` holds what was asked.

    ``plan`` holds, by number of the request counted from 0, what to do instead of answering well.
    """

    def __init__(self, context: Any = None) -> None:
        self.files: dict[str, bytes] = {}
        self.plan: dict[int, Callable[[BaseHTTPRequestHandler, bytes], None]] = {}
        self.seen: list[tuple[str, str | None, str | None]] = []  # path, Range, Authorization
        self.ranges = True
        self.token = ""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # clients that leave early are part of the tests

        self.server = Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        number = len(self.seen)
        headers = request.headers
        self.seen.append((request.path, headers.get("Range"), headers.get("Authorization")))
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            status(401)(request, b"")
            return
        content = self.files.get(request.path.partition("?")[0])
        if number in self.plan:
            self.plan[number](request, content or b"")
        elif content is None:
            status(404)(request, b"")
        else:
            good(request, content, ranges=self.ranges)


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'  # noqa: S324 - as object stores do


def good(
    request: BaseHTTPRequestHandler, content: bytes, ranges: bool = True, sent: int | None = None
) -> None:
    """The right answer; ``sent`` cuts the connection after so many bytes."""
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
    condition = request.headers.get("If-Range")
    body = content
    if match and ranges and condition in (None, etag(content)):
        start, last = int(match[1]), int(match[2] or len(content) - 1)
        if start >= len(content):
            status(416)(request, content)
            return
        body = content[start : last + 1]
        request.send_response(206)
        end = start + len(body) - 1
        request.send_header("Content-Range", f"bytes {start}-{end}/{len(content)}")
    else:
        request.send_response(200)
    request.send_header("ETag", etag(content))
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    request.close_connection = sent is not None
    with contextlib.suppress(OSError):  # the client has read enough
        request.wfile.write(body if sent is None else body[:sent])


def cut(sent: int) -> Callable[[BaseHTTPRequestHandler, bytes], None]:
    """An answer that ends after ``sent`` bytes of its body."""
    return lambda request, content: good(request, content, sent=sent)


def instead(other: bytes) -> Callable[[BaseHTTPRequestHandler, bytes], None]:
    """The right answer about another content."""
    return lambda request, _: good(request, other)


def status(code: int, **headers: str) -> Callable[[BaseHTTPRequestHandler, bytes], None]:
    """An answer without a body."""

    def answer(request: BaseHTTPRequestHandler, _: bytes) -> None:
        request.send_response(code)
        for name, text in headers.items():
            request.send_header(name, text)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer
