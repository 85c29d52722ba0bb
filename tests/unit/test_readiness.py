# SPDX-License-Identifier: Apache-2.0
"""Readiness against real servers and real processes; only systemd is stood in for."""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from gpubox.errors import GpuboxError
from gpubox.readiness import (
    Completion,
    Endpoint,
    NotYetError,
    Question,
    UnitState,
    command_of,
    complete,
    in_control_group,
    is_descendant,
    parse_listeners,
    port_listeners,
    shown,
    systemd_groups,
    unit_fault,
    wait_until_ready,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.timing import AT_ONCE, FOREVER

ROOT = Path(__file__).resolve().parents[2]
UNIT = "vllm-glm5.service"
INVOCATION = "7c9b1f0e5a3d4c2b8f6e1d0c9b8a7f65"

# --- texts of the kernel --------------------------------------------------------------------------

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000   998        0 48213 1 0000000000000000 100 0 0 10 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 20100 1 0000000000000000 100 0 0 10 0
   2: 0100007F:1F40 0100007F:9C42 01 00000000:00000000 02:000AFC2D 00000000   998        0 48300 2 0000000000000000 20 4 30 10 -1
   3: 0500000A:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 50000 1 0000000000000000 100 0 0 10 0
"""  # noqa: E501 - as the kernel prints it
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000000000000000000000000000:1F40 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 61000 1 0000000000000000 100 0 0 10 0
   1: 0000000000000000FFFF00000100007F:1F40 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 62000 1 0000000000000000 100 0 0 10 0
   2: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 63000 1 0000000000000000 100 0 0 10 0
"""  # noqa: E501 - as the kernel prints it

little_endian = pytest.mark.skipif(sys.byteorder != "little", reason="texts of a little-endian box")


@little_endian
def test_listeners_of_ipv4() -> None:
    found = [(str(one.address), one.inode) for one in parse_listeners(TCP, 8000)]
    assert found == [("127.0.0.1", 48213), ("10.0.0.5", 50000)]


@little_endian
def test_listeners_of_ipv6() -> None:
    found = [(str(one.address), one.inode) for one in parse_listeners(TCP6, 8000)]
    assert found == [("::", 61000), ("127.0.0.1", 62000)]
    assert parse_listeners(TCP6, 8080)[0].address == ipaddress.IPv6Address("::1")


@given(st.text(), st.integers(0, 65535))
def test_any_text_of_listeners(text: str, port: int) -> None:
    parse_listeners(text, port)
    parse_listeners(TCP.replace("0100007F", text), port)


V1 = """\
12:pids:/system.slice/vllm-glm5.service
4:memory:/system.slice/vllm-glm5.service
1:name=systemd:/system.slice/vllm-glm5.service/workers
0::/system.slice/vllm-glm5.service
"""


def test_groups_of_both_hierarchies() -> None:
    service = "/system.slice/vllm-glm5.service"
    assert systemd_groups(V1) == {service, service + "/workers"}
    assert systemd_groups("0::/user.slice/user-0.slice/session-1.scope\n") == {
        "/user.slice/user-0.slice/session-1.scope"
    }
    assert systemd_groups("3:cpu:/x\nrubbish\n") == set()


class Proc:
    """A recorded /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/net").mkdir(parents=True)
        (root / "proc/net/tcp").write_text(TCP)
        (root / "proc/net/tcp6").write_text("")

    def process(self, pid: int, group: str, parent: int = 1, inode: int = 0, *words: str) -> None:
        path = self.root / "proc" / str(pid)
        (path / "fd").mkdir(parents=True)
        (path / "cgroup").write_text(group)
        (path / "stat").write_text(f"{pid} (a) b ) x) S {parent} 1 1 0 -1\n")
        (path / "cmdline").write_bytes("\0".join([*words, ""]).encode())
        (path / "fd/0").symlink_to("/dev/null")
        (path / "fd/7").symlink_to(f"socket:[{inode}]")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


GROUP = "/system.slice/vllm-glm5.service"


@little_endian
def test_own_listener_by_control_group(proc: Proc) -> None:
    proc.process(100, f"0::{GROUP}\n", 1, 48213, "vllm")
    assert port_listeners(proc.root, 8000, GROUP, host="127.0.0.1") == []
    foreign = port_listeners(proc.root, 8000, "/system.slice/other.service", host="127.0.0.1")
    assert foreign == [(100, "vllm")]
    # a name that only begins alike
    assert port_listeners(proc.root, 8000, GROUP[:-1], host="127.0.0.1") == [(100, "vllm")]
    assert port_listeners(proc.root, 8000, "", host="127.0.0.1") == [(100, "vllm")]


@little_endian
def test_listener_on_another_address_counts_only_without_host(proc: Proc) -> None:
    proc.process(100, f"0::{GROUP}\n", 1, 48213, "vllm")
    proc.process(200, "0::/user.slice\n", 1, 50000, "other", "--port", "8000")
    assert port_listeners(proc.root, 8000, GROUP, host="127.0.0.1") == []
    assert port_listeners(proc.root, 8000, GROUP) == [(200, "other --port 8000")]


@little_endian
def test_listener_of_nobody_that_can_be_seen(proc: Proc) -> None:
    (found,) = port_listeners(proc.root, 8000, GROUP, host="127.0.0.1")
    assert found[0] == 0
    assert "CAP_SYS_PTRACE" in found[1]


@little_endian
def test_socket_shared_with_our_unit_is_ours(proc: Proc) -> None:
    proc.process(1, "0::/init.scope\n", 0, 48213, "/sbin/init")  # socket activation
    proc.process(100, f"0::{GROUP}\n", 1, 48213, "vllm")
    assert port_listeners(proc.root, 8000, GROUP, host="127.0.0.1") == []


def test_control_group_below_that_of_a_container(proc: Proc) -> None:
    box = "/machine.slice/libpod-12.scope"
    proc.process(1, f"1:name=systemd:{box}/init.scope\n", 0, 0, "/sbin/init")
    proc.process(100, f"1:name=systemd:{box}{GROUP}\n", 1, 0, "vllm")
    proc.process(101, f"1:name=systemd:/machine.slice/libpod-99.scope{GROUP}\n", 1, 0, "vllm")
    assert in_control_group(proc.root, 100, GROUP)
    assert in_control_group(proc.root, 100, box + GROUP)
    assert not in_control_group(proc.root, 101, GROUP)
    assert not in_control_group(proc.root, 999, GROUP)
    assert not in_control_group(proc.root, 100, "/")


def test_descendants(proc: Proc) -> None:
    proc.process(100, "", 1)
    proc.process(101, "", 100)
    proc.process(102, "", 101)
    proc.process(200, "", 1)
    proc.process(300, "", 301)
    proc.process(301, "", 300)  # pids that were used again must not loop
    assert is_descendant(proc.root, 102, 100)
    assert is_descendant(proc.root, 100, 100)
    assert not is_descendant(proc.root, 200, 100)
    assert not is_descendant(proc.root, 300, 100)
    assert not is_descendant(proc.root, 999, 100)


def test_command_hides_secrets(proc: Proc) -> None:
    proc.process(
        100, "", 1, 0, "serve", "--api-key", "s3cret", "-x", "--hf-token=s3cret", "--port", "1"
    )
    assert command_of(proc.root, 100) == "serve --api-key *** -x --hf-token=*** --port 1"
    assert command_of(proc.root, 101) == "command unknown"


def test_own_process_is_found_on_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_listeners(Path("/"), port, "", os.getpid()) == []
        found = port_listeners(Path("/"), port, "/system.slice/none.service", 0)
        assert [pid for pid, _ in found] == [os.getpid()]
        assert "python" in found[0][1]
    assert port_listeners(Path("/"), port, "", 0) == []


# --- the unit -------------------------------------------------------------------------------------

RUNNING = f"""\
LoadState=loaded
ActiveState=active
SubState=running
Result=success
ExecMainStatus=0
MainPID=4711
ControlGroup={GROUP}
NRestarts=0
InvocationID={INVOCATION}
Job=0
"""


def unit(**changes: Any) -> UnitState:
    return replace(UnitState.parse(RUNNING), **changes)


def test_unit_is_parsed() -> None:
    assert UnitState.parse(RUNNING) == UnitState(
        "loaded", "active", "running", "success", "0", 4711, GROUP, 0, INVOCATION, False
    )
    assert UnitState.parse("MainPID=[not set]\nNRestarts=\nJob=812\n").job_pending
    assert UnitState.parse("MainPID=[not set]\n").main_pid == 0


@given(st.text())
def test_any_text_of_systemctl(text: str) -> None:
    UnitState.parse(text)


@pytest.mark.parametrize(
    ("state", "restarts", "fault"),
    [
        (unit(), 0, None),
        (unit(restarts=3), 3, None),
        (unit(restarts=4), 3, "was restarted"),
        (unit(active_state="activating", sub_state="start-pre"), 0, None),
        (unit(active_state="deactivating", sub_state="stop-sigterm"), 0, None),
        (unit(active_state="failed", sub_state="failed", result="exit-code"), 0, "exit-code"),
        (unit(active_state="inactive", sub_state="dead"), 0, "does not run"),
        (unit(active_state="activating", sub_state="auto-restart"), 0, "does not run"),
        # a start that is on its way: what is seen is the past
        (unit(active_state="failed", sub_state="failed", job_pending=True), 0, None),
        (unit(active_state="inactive", job_pending=True), 0, None),
        (unit(load_state="not-found"), 0, "not loaded"),
        (unit(load_state=""), 0, "no answer from systemd"),
    ],
)
def test_when_waiting_is_in_vain(state: UnitState, restarts: int, fault: str | None) -> None:
    found = unit_fault(state, restarts)
    assert (found is None) if fault is None else (found is not None and fault in found)


# --- servers --------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """A server whose answers a test chooses."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), Handler)
        self.port = int(self.server_address[1])
        self.model = "glm-5"
        self.words = ["The", " answer", " is", " 42"]
        self.pause = 0.0
        self.behaviour: Callable[[Handler], None] | None = None
        self.key: str | None = None
        self.requests: list[dict[str, Any]] = []
        self.usage = True
        self.done = True
        self.released = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM's server does."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: Any) -> None:
        """Nothing on the console."""

    def answer(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": self.server.model}]})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.requests.append(body)
        if server.behaviour is not None:
            server.behaviour(self)
            return
        if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
            self.answer(401, {"error": "Unauthorized"})
            return
        if self.path != "/v1/completions" or body["model"] != server.model:
            message = f"The model `{body['model']}` does not exist."
            self.answer(404, {"error": {"message": message, "type": "NotFoundError", "code": 404}})
            return
        self.begin_stream()
        for word in server.words:
            time.sleep(server.pause)
            event = {"choices": [{"index": 0, "text": word, "finish_reason": None}]}
            self.chunk(f"data: {json.dumps(event)}\n\n")
        if server.usage:
            count = len(server.words)
            usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
            self.chunk(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
        if server.done:
            self.chunk("data: [DONE]\n\n")
        self.chunk("")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


QUESTION = Question("glm-5", "Hello", 16)


def ask(server: Server, question: Question = QUESTION, seconds: float = AT_ONCE) -> Any:
    endpoint = Endpoint("127.0.0.1", server.port, "")
    return complete(endpoint, question, time.monotonic() + seconds)


def test_completion(server: Server) -> None:
    server.pause = 0.1
    found = ask(server)
    assert found.text == "The answer is 42"
    assert (found.prompt_tokens, found.completion_tokens) == (3, 4)
    # sleeps end late on a busy machine, never early: lower bounds only
    assert 0.1 <= found.time_to_first_token_seconds < found.seconds
    assert found.seconds >= 0.4
    decode_seconds = found.seconds - found.time_to_first_token_seconds
    assert found.tokens_per_second == pytest.approx(3 / decode_seconds)
    assert server.requests == [
        {
            "model": "glm-5",
            "prompt": "Hello",
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_speed_is_that_of_decoding() -> None:
    assert Completion("x", 1, 5, 1.0, 3.0).tokens_per_second == 2.0
    assert Completion("x", 1, 1, 1.0, 2.0).tokens_per_second == 0.5
    assert Completion("x", 1, 5, 2.0, 2.0).tokens_per_second == 2.5  # all in one event
    assert Completion("x", 1, 5, 0.0, 0.0).tokens_per_second == 0.0


def test_speed_of_a_single_token(server: Server) -> None:
    server.words, server.pause = ["Hi"], 0.2
    assert ask(server).tokens_per_second == pytest.approx(1 / 0.2, rel=0.3)


def test_key_is_sent(server: Server) -> None:
    server.key = "s3cret"
    assert ask(server, replace(QUESTION, api_key="s3cret")).completion_tokens == 4
    with pytest.raises(GpuboxError, match="HTTP 401 to a request without key"):
        ask(server)
    with pytest.raises(GpuboxError, match="HTTP 401 to the given key") as caught:
        ask(server, replace(QUESTION, api_key="wr0ng"))
    assert "wr0ng" not in str(caught.value)


@pytest.mark.parametrize("key", ["s3cret\n", "s3 cret", "s3cr\u00e9t"])
def test_key_that_no_header_takes_is_not_shown(server: Server, key: str) -> None:
    with pytest.raises(GpuboxError, match="api_key") as caught:
        ask(server, replace(QUESTION, api_key=key))
    assert "s3" not in str(caught.value)


def test_wrong_name_lists_the_names_served(server: Server) -> None:
    server.model = "glm-4"
    with pytest.raises(GpuboxError, match=r"models served: glm-4 .*\n.*the model glm-5"):
        ask(server)


def answering(status: int, body: Any, kind: str = "application/json") -> Callable[[Handler], None]:
    return lambda handler: handler.answer(status, body, kind)


def streaming(*events: str) -> Callable[[Handler], None]:
    def behave(handler: Handler) -> None:
        handler.begin_stream()
        for event in events:
            handler.chunk(event)
        handler.chunk("")

    return behave


TEXT = 'data: {"choices": [{"text": "Hi"}]}\n\n'
USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": %s}}\n\n'


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (answering(200, "<html>It works</html>", "text/html"), "text/html: <html>It works"),
        (answering(200, {"choices": []}), "application/json"),
        (answering(400, {"error": {"message": "max_tokens too large"}}), "max_tokens too large"),
        (answering(307, ""), "HTTP 307"),
        (streaming("data: <html>\n\n"), "<html>"),
        (streaming("data: []\n\n"), r"\[\]"),
        (streaming(f"data: {'[' * 100_000}\n\n"), r"\[\["),
        (streaming('data: {"choices": [3]}\n\n'), "3"),
        (streaming('data: {"error": {"message": "EngineDead"}}\n\n'), "EngineDead"),
        (streaming(USAGE % 0, "data: [DONE]\n\n"), "0 completion tokens"),
        (streaming(USAGE % 2, "data: [DONE]\n\n"), "0 characters"),
        (streaming(TEXT, USAGE % '"2"', "data: [DONE]\n\n"), "0 completion tokens"),
        (streaming(TEXT, "data: [DONE]\n\n"), "no usage"),
    ],
)
def test_answers_that_another_try_will_not_change(
    server: Server, behaviour: Callable[[Handler], None], message: str
) -> None:
    server.behaviour = behaviour
    with pytest.raises(GpuboxError, match=message):
        ask(server)


def test_events_may_be_cut_anywhere(server: Server) -> None:
    text = ": comment\nevent: x\ndata: {\nid: 7\n: comment\n"
    text += 'data: "choices": [{"text": "H\u00fc"}]}\r\n\r\n'
    text += USAGE % 1 + "data:[DONE]"

    def behave(handler: Handler) -> None:
        handler.begin_stream()
        for byte in text.encode():
            handler.wfile.write(b"1\r\n%c\r\n" % byte)
        handler.chunk("")

    server.behaviour = behave
    assert ask(server).text == "H\u00fc"


def stall_before_headers(handler: Handler) -> None:
    handler.server.released.wait(FOREVER)


def stall_in_stream(handler: Handler) -> None:
    handler.begin_stream()
    handler.chunk(TEXT)
    handler.server.released.wait(FOREVER)


def trickle(handler: Handler) -> None:
    handler.begin_stream()
    with contextlib.suppress(OSError):
        while not handler.server.released.wait(0.05):
            handler.chunk("x")  # never a whole line, never silent for long


def trickle_without_length(handler: Handler) -> None:
    handler.close_connection = True
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    with contextlib.suppress(OSError):
        while not handler.server.released.wait(0.05):
            handler.wfile.write(b"x")


def drop(handler: Handler) -> None:
    handler.begin_stream()
    handler.chunk(TEXT)
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "behaviour", [stall_before_headers, stall_in_stream, trickle, trickle_without_length]
)
def test_the_deadline_ends_an_answer_that_does_not_end(
    server: Server, behaviour: Callable[[Handler], None]
) -> None:
    server.behaviour = behaviour
    begin = time.monotonic()
    with pytest.raises(NotYetError, match="within the deadline"):
        ask(server, seconds=0.5)
    assert 0.5 <= time.monotonic() - begin < AT_ONCE


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (drop, "IncompleteRead|before its end mark|reset"),
        (streaming(TEXT), "before its end mark"),
        (answering(503, {"error": "loading"}), "HTTP 503"),
        (answering(500, {"error": "boom"}), "boom"),
    ],
)
def test_answers_that_may_still_come(
    server: Server, behaviour: Callable[[Handler], None], message: str
) -> None:
    server.behaviour = behaviour
    with pytest.raises(NotYetError, match=message):
        ask(server)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(NotYetError, match="refused"):
        complete(Endpoint("127.0.0.1", port, ""), QUESTION, time.monotonic() + 1)


def test_base_url() -> None:
    assert Endpoint.parse("http://127.0.0.1:8000") == Endpoint("127.0.0.1", 8000, "")
    assert Endpoint.parse("http://[::1]:8000/v1/") == Endpoint("::1", 8000, "")
    assert Endpoint.parse("http://box/base/v1") == Endpoint("box", 80, "/base")
    for bad in ("https://x", "127.0.0.1:8000", "", "http://", "http://x:99999", "http://[x:1"):
        with pytest.raises(GpuboxError, match="base_url"):
            Endpoint.parse(bad)


# --- the wait -------------------------------------------------------------------------------------


class StandInSystem:
    """systemd's answers, in turn; the last one stays."""

    def __init__(self, *states: UnitState, log: str = "line of the journal") -> None:
        self.states = list(states)
        self.log = log
        self.asked: list[str] = []

    def unit_state(self, unit: str) -> UnitState:
        assert unit == UNIT
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def journal(self, unit: str, invocation: str) -> str:
        assert unit == UNIT
        self.asked.append(invocation)
        return self.log


OURS = unit(main_pid=os.getpid())


def wait(
    server_port: int,
    system: StandInSystem,
    seconds: float = AT_ONCE,
    question: Question = QUESTION,
    pause: Callable[[float], None] = lambda _: time.sleep(0.01),
) -> Any:
    endpoint = Endpoint("127.0.0.1", server_port, "")
    return wait_until_ready(UNIT, endpoint, question, seconds, Path("/"), system, pause)


def failing(*arguments: Any, **options: Any) -> str:
    with pytest.raises(GpuboxError) as caught:
        wait(*arguments, **options)
    return str(caught.value)


def test_ready(server: Server) -> None:
    found = wait(server.port, StandInSystem(OURS))
    assert found.state.main_pid == os.getpid()
    assert found.completion.text == "The answer is 42"
    assert found.seconds >= found.completion.seconds


def test_waits_for_the_unit_and_for_the_model(server: Server) -> None:
    answers = iter([503, 503])

    def loading(handler: Handler) -> None:
        status = next(answers, None)
        if status is None:
            server.behaviour = None
            handler.answer(503, "last time")
        else:
            handler.answer(status, "loading")

    server.behaviour = loading
    starting = unit(main_pid=0, active_state="inactive", job_pending=True)
    activating = unit(main_pid=0, active_state="activating", sub_state="start")
    system = StandInSystem(starting, activating, unit(load_state="", active_state=""), OURS)
    assert wait(server.port, system).completion.text
    assert len(server.requests) == 4


def test_old_process_that_is_being_replaced_does_not_count(server: Server) -> None:
    old = replace(OURS, job_pending=True)
    system = StandInSystem(old, old, OURS, old, OURS)
    assert wait(server.port, system).completion.text
    assert len(server.requests) == 2  # the first answer fell together with a restart


def test_failed_unit_ends_the_wait_at_once() -> None:
    failed = unit(active_state="failed", sub_state="failed", result="exit-code", main_pid=0)
    begin = time.monotonic()
    message = failing(1, StandInSystem(OURS, OURS, failed, log="ValueError: no such file"), FOREVER)
    assert time.monotonic() - begin < AT_ONCE
    assert "result exit-code" in message
    assert "journal of vllm-glm5.service:\nValueError: no such file" in message


def test_the_first_error_is_shown_where_tracebacks_follow_it() -> None:
    cause = (
        "(EngineCore pid=7) ERROR 12-04 [core.py:9] ValueError: the indexer's weights are missing"
    )
    late = "RuntimeError: Engine core initialization failed. See root cause above."
    noise = [
        "INFO 12-04 retried after TimeoutError: none",
        "WARNING 12-04 OSError: no numa",
        "Error",
    ]
    lines = [*noise, cause, *(f'  File "x.py", line {n}' for n in range(90)), late]
    text = shown("\n".join(lines)).splitlines()
    assert text[:2] == ["first error: ValueError: the indexer's weights are missing", "…"]
    assert text[2:] == lines[-40:]
    # nothing is said twice, and without an error nothing is added
    for few in ([cause, late], lines[-40:], ["a"] * 40, [cause, *["b"] * 39]):
        assert shown("\n".join(few)) == "\n".join(few)
    assert shown("\n".join(["a"] * 90)) == "\n".join(["a"] * 40)
    assert shown("\n".join([cause, *["b"] * 40])).startswith("first error: ValueError: the")
    assert shown("") == ""
    key = QUESTION.api_key or "s3cret"
    failed = unit(active_state="failed", sub_state="failed", result="exit-code", main_pid=0)
    log = "\n".join([f"OSError: key {key} is odd", *["b"] * 90])
    question = replace(QUESTION, api_key=key)
    with pytest.raises(GpuboxError) as caught:
        wait(1, StandInSystem(OURS, failed, log=log), FOREVER, question)
    assert "first error: OSError: key *** is odd\n…\nb\n" in str(caught.value)


def test_restarted_unit_shows_the_journal_of_the_run_that_ended() -> None:
    again = replace(OURS, restarts=1, invocation="b" * 32)
    system = StandInSystem(OURS, OURS, again)
    message = failing(1, system, FOREVER)
    assert "1 automatic restarts" in message
    assert system.asked == [INVOCATION]


def test_restarts_of_the_past_do_not_count(server: Server) -> None:
    past = replace(OURS, restarts=7)
    assert wait(server.port, StandInSystem(past, past)).completion.text
    # a start by hand sets the count to zero, and then one restart is one too many
    system = StandInSystem(
        replace(past, job_pending=True), replace(OURS, main_pid=0), replace(OURS, restarts=1)
    )
    assert "1 automatic restarts" in failing(server.port, system, FOREVER)


def test_unit_that_does_not_exist() -> None:
    assert "not loaded (not-found)" in failing(
        1, StandInSystem(unit(load_state="not-found")), FOREVER
    )
    assert "systemd does not answer" in failing(1, StandInSystem(unit(load_state="")), FOREVER)


def test_deadline_says_what_was_awaited(server: Server) -> None:
    server.behaviour = answering(503, "loading weights")
    message = failing(server.port, StandInSystem(OURS), 3)
    assert "HTTP 503: loading weights" in message
    assert "a completion by glm-5 within 3 s" in message
    assert "line of the journal" in message


def test_nobody_listens_until_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    message = failing(port, StandInSystem(OURS), 0.2)
    assert f"does not listen on port {port} yet" in message


def test_silent_server_is_cut_at_the_deadline(server: Server) -> None:
    server.behaviour = stall_in_stream
    begin = time.monotonic()
    assert "within the deadline" in failing(server.port, StandInSystem(OURS), 0.5)
    assert time.monotonic() - begin < AT_ONCE


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is neither ours nor below us: the unit stood in for in the other tests."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_foreign_process_on_the_port(server: Server, stranger: subprocess.Popen[bytes]) -> None:
    message = failing(server.port, StandInSystem(unit(main_pid=stranger.pid)), FOREVER)
    assert f"port {server.port} is held by PID {os.getpid()} (" in message
    assert "python" in message
    assert f"MainPID {stranger.pid}" in message or f"PID {stranger.pid}" in message
    assert server.requests == []


def test_listener_in_a_child_of_the_unit() -> None:
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', "
        '\'import socket,time; s=socket.create_server(("127.0.0.1",0)); '
        "print(s.getsockname()[1], flush=True); time.sleep(600)'])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        port = int(parent.stdout.readline())
        assert port_listeners(Path("/"), port, "", parent.pid) == []
        (found,) = port_listeners(Path("/"), port, "", os.getpid() + 10**6)
        assert found[0] != parent.pid
    finally:
        for pid, _ in port_listeners(Path("/"), port, ""):
            os.kill(pid, 9)
        parent.kill()
        parent.wait()


def test_failed_unit_and_the_process_that_took_its_port(server: Server) -> None:
    failed = unit(active_state="failed", sub_state="failed", main_pid=0, control_group="")
    message = failing(server.port, StandInSystem(failed), FOREVER)
    assert "does not run" in message
    assert f"port {server.port} is held by PID {os.getpid()}" in message


def test_key_is_nowhere_in_the_message(server: Server) -> None:
    server.behaviour = answering(400, {"error": {"message": "key s3cret-key is odd"}})
    question = replace(QUESTION, api_key="s3cret-key")
    log = "args: --api-key s3cret-key"
    message = failing(server.port, StandInSystem(OURS, log=log), question=question)
    assert "s3cret" not in message
    assert "key *** is odd" in message
    assert "--api-key ***" in message


# --- the module -----------------------------------------------------------------------------------


class StandIns:
    """Commands on PATH that stand in for systemd's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state(RUNNING.replace("4711", str(os.getpid())))
        self.script("systemctl", f"cat {directory}/state\n")
        self.script(
            "journalctl",
            f"case \"$*\" in *_SYSTEMD_INVOCATION_ID={INVOCATION}*) echo 'of this run' ;;"
            " *-u*) echo 'of any run' ;; esac\n",
        )

    def script(self, name: str, text: str) -> None:
        path = self.directory / name
        log = f"printf '%s\\n' \"$*\" >>{self.directory}/calls\n"
        path.write_text(f"#!/bin/sh\n# stand-in for {name}\n{log}{text}")
        path.chmod(0o755)

    def state(self, text: str) -> None:
        (self.directory / "state").write_text(text)

    def calls(self) -> list[str]:
        return (self.directory / "calls").read_text().splitlines()


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    directory = tmp_path / "stand-ins"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return StandIns(directory)


Call = Callable[..., dict[str, Any]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(port: int, **arguments: Any) -> dict[str, Any]:
        path = ROOT / "plugins/modules/openai_ready.py"
        spec = importlib.util.spec_from_file_location("openai_ready_under_test", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        given = {
            "unit": UNIT,
            "base_url": f"http://127.0.0.1:{port}",
            "model": "glm-5",
            "deadline": 5,
            **arguments,
        }
        with patch_module_args(given), pytest.raises(SystemExit):
            module.main()
        return dict(json.loads(capsys.readouterr().out))

    return run


def test_module_returns_the_completion(server: Server, stand_ins: StandIns, call: Call) -> None:
    server.pause = 0.05
    for check in (False, True):
        result = call(server.port, _ansible_check_mode=check)
        assert result["ready"]
        assert not result["changed"]
        assert result["main_pid"] == os.getpid()
        assert result["text"] == "The answer is 42"
        assert (result["prompt_tokens"], result["completion_tokens"]) == (3, 4)
        assert 0 < result["time_to_first_token_seconds"] < result["seconds"]
        assert result["tokens_per_second"] > 1
    assert stand_ins.calls()[0] == (
        "show --property LoadState,ActiveState,SubState,Result,ExecMainStatus,MainPID,ControlGroup,"
        f"NRestarts,InvocationID,Job -- {UNIT}"
    )


def test_module_fails_with_the_journal_of_this_run(
    server: Server, stand_ins: StandIns, call: Call
) -> None:
    failed = RUNNING.replace("=active", "=failed").replace("4711", "0")
    stand_ins.state(failed)
    result = call(server.port)
    assert result["failed"]
    assert result["msg"].endswith("journal of vllm-glm5.service:\nof this run")
    stand_ins.state(failed.replace(INVOCATION, ""))
    assert call(server.port)["msg"].endswith("of any run")
    stand_ins.state(failed.replace(INVOCATION, "c" * 32))
    assert call(server.port)["msg"].endswith("of any run")
    assert any("-n 2000 -o cat --no-pager" in line for line in stand_ins.calls())


@pytest.mark.parametrize("state", ["", "LoadState=not-found\nActiveState=inactive\n"])
def test_module_in_check_mode_on_a_bare_box(stand_ins: StandIns, call: Call, state: str) -> None:
    stand_ins.state(state)
    result = call(1, _ansible_check_mode=True, deadline=1800)
    assert not result.get("failed")
    assert not result["ready"]
    assert "within 1800 s" in result["awaited"]
    assert "text" not in result
    assert call(1)["failed"]


def test_module_in_check_mode_before_a_change(
    server: Server, stand_ins: StandIns, call: Call
) -> None:
    server.model = "glm-4"  # the running unit has the name that will be changed
    assert stand_ins.directory.exists()
    result = call(server.port, _ansible_check_mode=True)
    assert not result.get("failed")
    assert "models served: glm-4" in result["awaited"]
    assert "models served: glm-4" in json.dumps(result["warnings"])
    assert call(server.port)["failed"]


def test_module_without_systemd(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no answer from systemd" in call(server.port)["msg"]


def test_module_refuses_what_is_not_positive(stand_ins: StandIns, call: Call) -> None:
    assert stand_ins.directory.exists()
    assert "deadline 0.0" in call(1, deadline=0)["msg"]
    assert "max_tokens -1" in call(1, max_tokens=-1)["msg"]


def test_module_through_ansible(server: Server, stand_ins: StandIns) -> None:
    server.key = "s3cret-key"
    environment = {
        **os.environ,
        "ANSIBLE_LIBRARY": str(ROOT / "plugins/modules"),
        "ANSIBLE_MODULE_UTILS": str(ROOT / "plugins/module_utils"),
        "ANSIBLE_LOCALHOST_WARNING": "false",
    }
    base = [str(Path(sys.executable).with_name("ansible")), "localhost", "-c", "local"]
    base += ["-i", "localhost,", "-m", "openai_ready", "-vvv"]
    base += ["-e", f"ansible_python_interpreter={sys.executable}", "-a"]
    arguments = {
        "unit": UNIT,
        "base_url": f"http://127.0.0.1:{server.port}",
        "model": "glm-5",
        "deadline": 20,
        "api_key": "s3cret-key",
    }

    def run(*options: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        command = [*base, json.dumps({**arguments, **changes}), *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    for options in ((), ("--check", "--diff")):
        done = run(*options)
        assert done.returncode == 0, done.stdout
        assert "The answer is 42" in done.stdout
        assert "s3cret-key" not in done.stdout + done.stderr
    done = run(api_key="wr0ng-key")
    assert done.returncode != 0
    assert "HTTP 401" in done.stdout
    assert "wr0ng-key" not in done.stdout + done.stderr
    assert stand_ins.calls()
