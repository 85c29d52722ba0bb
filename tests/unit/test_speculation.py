# SPDX-License-Identifier: Apache-2.0
"""What a server tells of its drafts, in the words of vLLM's /metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gpubox.readiness import Endpoint, drafts
from gpubox.speculation import Drafts, read_drafts
from hypothesis import given
from hypothesis import strategies as st

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="glm-5"} 0.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="glm-5"} 131.0
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="glm-5"} 262.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="glm-5"} 200.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="glm-5",position="0"} 120.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="glm-5",position="1"} 80.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="glm-5"} 1.7966e+09
"""


@contextmanager
def server(status: int, body: bytes) -> Iterator[Endpoint]:
    """A server that gives one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield Endpoint("127.0.0.1", running.server_address[1], "")
        finally:
            running.shutdown()
            thread.join()


def test_counts_of_one_engine() -> None:
    read = read_drafts(METRICS)
    assert read == Drafts(262, 200, (120, 80))
    assert read.acceptance_rate == 200 / 262


def test_engines_are_added() -> None:
    assert read_drafts(METRICS + METRICS.replace('engine="0"', 'engine="1"')) == Drafts(
        524, 400, (240, 160)
    )


def test_no_draft_yet() -> None:
    read = read_drafts(METRICS.replace("262.0", "0.0").replace("200.0", "0.0"))
    assert read is not None
    assert read.acceptance_rate is None


def test_a_server_without_speculation_has_none() -> None:
    assert read_drafts(METRICS.split("# HELP vllm:spec")[0]) is None


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    read_drafts(text)
    read_drafts(METRICS.replace("262.0", text))
    read_drafts(METRICS.replace('position="0"', text))


def test_a_position_that_no_draft_has_is_none() -> None:
    read = read_drafts(METRICS.replace('position="0"', f'position="{"9" * 5000}"'))
    assert read is not None
    assert read.by_position == (80,)


def test_it_is_asked_for() -> None:
    with server(200, METRICS.encode()) as endpoint:
        assert drafts(endpoint, time.monotonic() + 60) == Drafts(262, 200, (120, 80))


def test_a_server_that_does_not_tell() -> None:
    with server(404, METRICS.encode()) as endpoint:
        assert drafts(endpoint, time.monotonic() + 60) is None
    assert drafts(endpoint, time.monotonic() + 60) is None  # nobody listens any more
