# SPDX-License-Identifier: Apache-2.0
"""Is a served model ready: a real completion, by its name, from the process of our own unit.

An open port or a healthy ``/health`` proves neither that the model answers nor that it is ours that
answers (field report V14), so the listener of the port is traced to the unit's control group and a
completion is asked for. A unit that has failed ends the wait at once, with its journal.

Formats: proc(5) for ``/proc/net/tcp`` and ``/proc/<pid>``, systemctl(1) ``show``, the
``text/event-stream`` of the HTML standard and OpenAI's completions API.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from .errors import GpuboxError
from .speculation import Drafts, read_drafts
from .units import unit_properties

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

LISTEN = "0A"  # the kernel's TCP_LISTEN
# Of a journal: lines that are read, and of these the last ones that are shown. Each process of a
# server ends with a traceback of its own, and only the first one names the cause.
JOURNAL_READ = 2000
JOURNAL_LINES = 40
ERROR = re.compile(r"(?<![\w.])(?:[A-Za-z_][\w.]*(?:Error|Exception)|CUDA error): \S.*")
NO_ERROR = re.compile(r"\b(?:WARNING|INFO|DEBUG)\b")
POLL_SECONDS = 1.0
# Longest text of a foreign answer or command in a message, in characters.
EXCERPT = 300
# Most that is read of /metrics: vLLM's own are some 100 KB.
METRICS_BYTES = 8 << 20
METRICS_SECONDS = 10.0
PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "ExecMainStatus",
    "MainPID",
    "ControlGroup",
    "NRestarts",
    "InvocationID",
    "Job",
)
_SECRET_OPTION = re.compile(r"key|token|secret|passw", re.IGNORECASE)


# --- who listens ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket."""

    address: Address
    port: int
    inode: int


def _address(text: str) -> Address:
    """Address of ``/proc/net/tcp{,6}``: 32-bit words in the host's byte order, as hexadecimal."""
    words = [int(text[index : index + 8], 16) for index in range(0, len(text), 8)]
    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    if len(raw) == 4:
        return ipaddress.IPv4Address(raw)
    address = ipaddress.IPv6Address(raw)
    return address.ipv4_mapped or address


def parse_listeners(text: str, port: int) -> list[Listener]:
    """Sockets that listen on ``port``, from the text of ``/proc/net/tcp`` or ``tcp6``.

    Lines that are not understood are passed over.
    """
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 10 or fields[3] != LISTEN:
            continue
        with suppress(ValueError):
            address, _, number = fields[1].rpartition(":")
            if int(number, 16) == port and len(address) in (8, 32):
                found.append(Listener(_address(address), port, int(fields[9])))
    return found


def read_listeners(root: Path, port: int) -> list[Listener]:
    """Sockets that listen on ``port``, of both address families."""
    found = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            text = (root / "proc/net" / name).read_text(encoding="ascii", errors="replace")
            found += parse_listeners(text, port)
    return found


def socket_holders(root: Path, inodes: Iterable[int]) -> dict[int, list[int]]:
    """Process ids that hold each socket; a process whose files cannot be read is passed over."""
    links = {f"socket:[{inode}]": inode for inode in inodes}
    holders: dict[int, list[int]] = {inode: [] for inode in links.values()}
    if not links:
        return holders
    for process in (root / "proc").glob("[0-9]*"):
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    inode = links.get(str(descriptor.readlink()))
                    if inode is not None and int(process.name) not in holders[inode]:
                        holders[inode].append(int(process.name))
    return {inode: sorted(pids) for inode, pids in holders.items()}


def command_of(root: Path, pid: int) -> str:
    """The command line of a process, shortened and without values that look secret."""
    try:
        raw = (root / "proc" / str(pid) / "cmdline").read_bytes()
    except OSError:
        return "command unknown"
    words: list[str] = []
    hide = False
    for word in raw.decode("utf-8", "replace").split("\0"):
        name, separator, _ = word.partition("=")
        secret = bool(_SECRET_OPTION.search(name)) and name.startswith("-")
        if hide and not word.startswith("-"):
            words.append("***")
        else:
            words.append(f"{name}=***" if secret and separator else word)
        hide = secret and not separator
    return " ".join(words).strip()[:EXCERPT] or "command unknown"


def systemd_groups(text: str) -> set[str]:
    """Control groups of ``/proc/<pid>/cgroup`` that systemd manages (cgroup v2 and v1)."""
    found = set()
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (number == "0" and controllers == "") or controllers == "name=systemd":
            found.add(path)
    return found


def _groups_of(root: Path, pid: int) -> set[str]:
    try:
        return systemd_groups((root / "proc" / str(pid) / "cgroup").read_text(errors="replace"))
    except OSError:
        return set()


def in_control_group(root: Path, pid: int, control_group: str) -> bool:
    """Whether a process is in a unit's control group or below it.

    In a container without its own cgroup namespace ``/proc`` has the path of the host, so the path
    may also begin with the group that process 1 of this root lies in.
    """
    if control_group in ("", "/"):
        return False
    roots = {""} | {group.removesuffix("/init.scope").rstrip("/") for group in _groups_of(root, 1)}
    wanted = {prefix + control_group for prefix in roots}
    return any(
        group == one or group.startswith(one + "/")
        for group in _groups_of(root, pid)
        for one in wanted
    )


def is_descendant(root: Path, pid: int, ancestor: int) -> bool:
    """Whether a process is ``ancestor`` or was started below it."""
    seen = set()
    while pid > 1 and pid not in seen:
        if pid == ancestor:
            return True
        seen.add(pid)
        try:
            text = (root / "proc" / str(pid) / "stat").read_text(errors="replace")
            # the second field is the command in brackets and may hold anything
            pid = int(text.rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return False
    return False


def port_listeners(
    root: Path,
    port: int,
    control_group: str,
    main_pid: int = 0,
    host: str | None = None,
) -> list[tuple[int, str]]:
    """Process id and command of each listener of a port that is not of our unit.

    Args:
        root: where ``/proc`` lies, ``/`` but for recorded states.
        port: TCP port.
        control_group: the unit's ControlGroup, empty when it does not run.
        main_pid: the unit's MainPID, 0 when it does not run.
        host: only listeners that would take a connection to this host; None for all.

    Returns:
        Process id 0 stands for a process whose open files may not be read: that takes root, and
        CAP_SYS_PTRACE for the processes of other users (containers lack it by default).
    """
    foreign: list[tuple[int, str]] = []
    listeners = [one for one in read_listeners(root, port) if _reaches(one.address, host)]
    for inode, pids in socket_holders(root, (one.inode for one in listeners)).items():
        ours = any(
            in_control_group(root, pid, control_group)
            or (main_pid > 1 and is_descendant(root, pid, main_pid))
            for pid in pids
        )
        if not ours and not pids:
            # closed since it was listed, or held by a process of another user
            if any(one.inode == inode for one in read_listeners(root, port)):
                foreign.append(
                    (0, "a process whose open files cannot be read without CAP_SYS_PTRACE")
                )
        elif not ours:
            foreign += [(pid, command_of(root, pid)) for pid in pids]
    return sorted(set(foreign))


def _reaches(address: Address, host: str | None) -> bool:
    """Whether a connection to ``host`` may end at a socket bound to ``address``."""
    if host is None or address.is_unspecified:
        return True
    with suppress(OSError):
        for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            if ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) == address:
                return True
    return False


# --- the unit -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitState:
    """What systemd says of a unit at one moment."""

    load_state: str
    active_state: str
    sub_state: str
    result: str
    exit_status: str
    main_pid: int
    control_group: str
    restarts: int
    invocation: str
    job_pending: bool

    @classmethod
    def parse(cls, text: str) -> UnitState:
        """From the output of ``systemctl show``; what is missing is empty or 0."""
        values = unit_properties(text)

        def number(name: str) -> int:
            return (
                int(values[name])
                if values.get(name, "").isascii() and (values.get(name, "").isdigit())
                else 0
            )

        return cls(
            values.get("LoadState", ""),
            values.get("ActiveState", ""),
            values.get("SubState", ""),
            values.get("Result", ""),
            values.get("ExecMainStatus", ""),
            number("MainPID"),
            values.get("ControlGroup", ""),
            number("NRestarts"),
            values.get("InvocationID", ""),
            values.get("Job", "") not in ("", "0"),
        )

    def sentence(self) -> str:
        """The state in words."""
        return (
            f"{self.active_state or 'unknown'} ({self.sub_state or 'unknown'}), result "
            f"{self.result or 'unknown'}, last exit status {self.exit_status or 'unknown'}, "
            f"{self.restarts} automatic restarts"
        )


def unit_fault(now: UnitState, restarts: int) -> str | None:
    """Why waiting any longer is in vain, None while there is hope.

    Args:
        now: the present state.
        restarts: the lowest count of automatic restarts seen in this wait (a start by hand sets
            the count to 0).
    """
    if now.load_state != "loaded":
        return f"is not loaded ({now.load_state or 'no answer from systemd'})"
    if now.restarts > restarts:
        return f"ended and was restarted by systemd: {now.sentence()}"
    if now.job_pending:  # a start or restart is on its way: what is seen is the past
        return None
    if now.active_state in ("failed", "inactive") or now.sub_state == "auto-restart":
        return f"does not run: {now.sentence()}"
    return None


class System(Protocol):
    """What the wait needs of the machine."""

    def unit_state(self, unit: str) -> UnitState:
        """The present state of a unit."""

    def journal(self, unit: str, invocation: str) -> str:
        """The end of a unit's journal, of one invocation when it is known."""


def shown(journal: str) -> str:
    """The last lines of a journal, and before them its first error when it is not among them."""
    lines = journal.strip("\n").splitlines()
    last = lines[-JOURNAL_LINES:]
    for line in lines[:-JOURNAL_LINES]:
        found = ERROR.search(line)
        if found and not NO_ERROR.search(line):
            return "\n".join([f"first error: {found[0][:EXCERPT]}", "…", *last])
    return "\n".join(last)


class Systemd:
    """The machine's systemd, through the commands on PATH."""

    def _run(self, *command: str) -> str:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=30, check=False
            )
        except FileNotFoundError:
            return ""
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout

    def unit_state(self, unit: str) -> UnitState:
        """The present state of a unit; empty when systemd does not answer."""
        return UnitState.parse(
            self._run("systemctl", "show", "--property", ",".join(PROPERTIES), "--", unit)
        )

    def journal(self, unit: str, invocation: str) -> str:
        """The end of a unit's journal, of one invocation when there is any of it."""
        options = ("journalctl", "-n", str(JOURNAL_READ), "-o", "cat", "--no-pager", "-q")
        text = ""
        if invocation:
            # the service's own lines carry the first field, the manager's about it the second
            text = self._run(
                *options,
                f"_SYSTEMD_INVOCATION_ID={invocation}",
                "+",
                f"INVOCATION_ID={invocation}",
            )
        return (text.strip() and text) or self._run(*options, "-u", unit)


# --- the completion -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completion:
    """A completion as it came; times in seconds."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    time_to_first_token_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one by the time after the first one (decoding).

        With a single token there is no such time: tokens by the whole time of the request.
        """
        decoding = self.seconds - self.time_to_first_token_seconds
        if self.completion_tokens > 1 and decoding > 0:
            return (self.completion_tokens - 1) / decoding
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0


class NotYetError(Exception):
    """No answer for now (nobody listens, 503, connection lost): worth another try."""


@dataclass(frozen=True)
class Endpoint:
    """Where an OpenAI server listens."""

    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, base_url: str) -> Endpoint:
        """From ``http://host:port``, with or without ``/v1``.

        Raises:
            GpuboxError: not such a URL.
        """
        try:
            parts = urlsplit(base_url)
            port = parts.port or 80
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme != "http" or not parts.hostname or parts.query or parts.username:
            raise GpuboxError(
                f"base_url {base_url!r}", "a URL such as http://127.0.0.1:8000", "correct it"
            )
        return cls(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))


@dataclass(frozen=True)
class Question:
    """What is asked."""

    model: str
    prompt: str
    max_tokens: int
    api_key: str | None = None


@contextmanager
def _connected(endpoint: Endpoint, deadline: float) -> Iterator[http.client.HTTPConnection]:
    """A connection that is cut at the deadline, however slowly its bytes trickle."""
    left = max(deadline - time.monotonic(), 0.001)
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=left)
    cut = threading.Event()
    late = "no complete answer within the deadline"
    timer: threading.Timer | None = None
    try:
        connection.connect()
        # http.client lets go of the socket when the server will close it; the response goes on
        stream = connection.sock

        def cut_off() -> None:
            cut.set()
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(max(deadline - time.monotonic(), 0.001), cut_off)
        timer.daemon = True
        timer.start()
        yield connection
    except (OSError, http.client.HTTPException, NotYetError) as error:
        if cut.is_set() or isinstance(error, TimeoutError):
            raise NotYetError(late) from error
        raise NotYetError(str(error) or type(error).__name__) from error
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()


def _headers(question: Question) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
    if question.api_key:
        if not re.fullmatch(r"[!-~]+", question.api_key):
            raise GpuboxError(
                "an api_key with blanks or characters beyond ASCII",
                "a key of one printable word",
                "correct the key (a line break at its end?)",
            )
        headers["Authorization"] = f"Bearer {question.api_key}"
    return headers


def served_models(endpoint: Endpoint, question: Question, deadline: float) -> list[str]:
    """Names that the server has, empty when it does not tell."""
    try:
        with _connected(endpoint, deadline) as connection:
            connection.request("GET", f"{endpoint.prefix}/v1/models", headers=_headers(question))
            data = json.loads(connection.getresponse().read(1 << 20))
            return [str(entry["id"]) for entry in data["data"]]
    except (NotYetError, ValueError, TypeError, KeyError, RecursionError):
        return []


def drafts(endpoint: Endpoint, deadline: float) -> Drafts | None:
    """What a server with speculative decoding has counted; None of another, or when it is silent.

    Args:
        endpoint: the server.
        deadline: moment of ``time.monotonic()`` at which the connection is cut.
    """
    try:
        with _connected(endpoint, deadline) as connection:
            connection.request(
                "GET", f"{endpoint.prefix}/metrics", headers={"Accept": "text/plain"}
            )
            response = connection.getresponse()
            if response.status != 200:
                return None
            return read_drafts(response.read(METRICS_BYTES).decode("utf-8", "replace"))
    except NotYetError:
        return None


def _refuse(
    status: int, body: bytes, endpoint: Endpoint, question: Question, deadline: float
) -> Exception:
    """What an answer other than 200 means."""
    text = body.decode("utf-8", "replace").strip()[:EXCERPT]
    if status in (401, 403):
        given = "the given key" if question.api_key else "a request without key"
        return GpuboxError(
            f"HTTP {status} to {given}", "an api_key that the server takes", "give the server's key"
        )
    if status == 404:
        names = served_models(endpoint, question, deadline)
        if question.model not in names:
            return GpuboxError(
                f"models served: {', '.join(names) or 'none that it tells'} (HTTP 404: {text})",
                f"the model {question.model}",
                "set the served model name, or ask for one that is served",
            )
    if status in (408, 425, 429) or status >= 500:
        return NotYetError(f"HTTP {status}: {text}")
    return GpuboxError(
        f"HTTP {status}: {text}",
        "a completion from an OpenAI server",
        "see what the server logs of this request",
    )


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each event of a ``text/event-stream``."""
    data: list[str] = []
    while line := response.readline(1 << 20):
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text[5:].removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)


def complete(endpoint: Endpoint, question: Question, deadline: float) -> Completion:
    """Ask for one streamed completion.

    Args:
        endpoint: the server.
        question: what is asked.
        deadline: moment of ``time.monotonic()`` at which the connection is cut.

    Raises:
        NotYetError: no answer for now.
        GpuboxError: an answer that another try will not change.
    """
    body = json.dumps(
        {
            "model": question.model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    headers = _headers(question)
    with _connected(endpoint, deadline) as connection:
        begin = time.monotonic()
        connection.request("POST", f"{endpoint.prefix}/v1/completions", body=body, headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _refuse(response.status, response.read(1 << 16), endpoint, question, deadline)
        kind = response.headers.get_content_type()
        if kind != "text/event-stream":
            text = response.read(EXCERPT).decode("utf-8", "replace")
            raise GpuboxError(
                f"an answer of type {kind}: {text}",
                "a stream of completions from an OpenAI server",
                "check that base_url is the model server's own address",
            )
        texts: list[str] = []
        first = last = 0.0
        usage: Mapping[str, Any] | None = None
        done = False
        for event in _events(response):
            if event == "[DONE]":
                done = True
                break
            text, counted = _read_event(event)
            if text:
                last = time.monotonic()
                first = first or last
                texts.append(text)
            usage = counted or usage
        if not done:
            raise NotYetError("the stream ended before its end mark")
    return _result("".join(texts), usage, first - begin, last - begin)


def _read_event(event: str) -> tuple[str, Mapping[str, Any] | None]:
    """Text and usage of one event.

    Raises:
        GpuboxError: an error of the server, or no such event.
    """
    remedy = "see what the server logs of this request"
    try:
        data = json.loads(event)
        if "error" in data:
            raise GpuboxError(
                f"the server says: {json.dumps(data['error'])[:EXCERPT]}", "a completion", remedy
            )
        texts = [choice.get("text") or "" for choice in data.get("choices") or []]
        usage = data.get("usage")
        return "".join(texts), usage if isinstance(usage, Mapping) else None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise GpuboxError(
            f"an event that reads {event[:EXCERPT]!r}", "an event of a completion", remedy
        ) from error


def _result(text: str, usage: Mapping[str, Any] | None, first: float, seconds: float) -> Completion:
    """The completion, refused when it is none.

    Raises:
        GpuboxError: no text or no tokens.
    """
    counts = [(usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens")]
    prompt_tokens, completion_tokens = (
        count if isinstance(count, int) and count > 0 else 0 for count in counts
    )
    if not text or not completion_tokens:
        raise GpuboxError(
            f"{len(text)} characters of text, {completion_tokens} completion tokens"
            + ("" if usage else " (no usage in the stream)"),
            "at least one token of text",
            "ask for more tokens or with another prompt; a model that still says nothing is broken",
        )
    return Completion(text, prompt_tokens, completion_tokens, first, seconds)


# --- the wait -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The unit answered."""

    state: UnitState
    completion: Completion
    seconds: float


def _redact(text: str, secret: str | None) -> str:
    return text.replace(secret, "***") if secret else text


def wait_until_ready(
    unit: str,
    endpoint: Endpoint,
    question: Question,
    deadline_seconds: float,
    root: Path,
    system: System,
    sleep: Callable[[float], None] = time.sleep,
) -> Ready:
    """Wait until the unit's own process has completed a prompt.

    Args:
        unit: name with suffix.
        endpoint: where it listens.
        question: what is asked of it.
        deadline_seconds: longest time for everything.
        root: where ``/proc`` lies.
        system: the machine's systemd.
        sleep: pause between two looks.

    Raises:
        GpuboxError: the unit failed, somebody else listens, the answer is wrong, or the deadline
            has passed. Ends with the unit's journal.
    """
    begin = time.monotonic()
    deadline = begin + deadline_seconds
    before = now = system.unit_state(unit)
    restarts = now.restarts
    answer = ""  # of the last try that had time for one

    def failure(error: GpuboxError, invocation: str) -> GpuboxError:
        journal = shown(system.journal(unit, invocation))
        if not now.load_state:
            journal = "unknown, systemd does not answer"
        tail = f"\njournal of {unit}:\n{journal or 'empty'}"
        secret = question.api_key
        return GpuboxError(
            _redact(f"{unit} {error.measured}", secret),
            error.wanted,
            _redact(error.remedy + tail, secret),
        )

    while True:
        fault = unit_fault(now, restarts) if now.load_state or not before.load_state else None
        others = [
            f"port {endpoint.port} is held by PID {pid} ({command})"
            for pid, command in port_listeners(
                root, endpoint.port, now.control_group, now.main_pid, endpoint.host
            )
        ]
        left = deadline - time.monotonic()
        try:
            if fault:
                raise GpuboxError(
                    "; ".join([fault, *others]),
                    f"{unit} running",
                    "mend what the journal names, then run again",
                )
            if now.job_pending or now.active_state != "active" or not now.main_pid:
                outcome = f"is {now.active_state or 'unknown'} ({now.sub_state or 'unknown'})"
            elif others:
                raise GpuboxError(
                    f"runs as PID {now.main_pid}, but {'; '.join(others)}",
                    f"{unit} to listen there",
                    "stop that process or give the unit another port",
                )
            elif not any(
                _reaches(one.address, endpoint.host) for one in read_listeners(root, endpoint.port)
            ):
                outcome = f"does not listen on port {endpoint.port} yet"
            else:
                completion = complete(endpoint, question, deadline)
                after = system.unit_state(unit)
                if (after.main_pid, after.job_pending) == (now.main_pid, False):
                    return Ready(after, completion, time.monotonic() - begin)
                outcome = "answered, but was replaced meanwhile"
        except NotYetError as error:
            if not answer or left >= POLL_SECONDS:
                answer = str(error)
            outcome = f"gives no completion: {answer}"
        except GpuboxError as error:
            # what was restarted has a new invocation; the one that ended is of interest
            ended = now.restarts > restarts
            raise failure(error, before.invocation if ended else now.invocation) from None
        if time.monotonic() >= deadline:
            late = GpuboxError(
                f"{outcome}; {now.sentence()}",
                f"a completion by {question.model} within {deadline_seconds:g} s",
                "mend what the journal names, or raise the deadline for a slow disk or large model",
            )
            raise failure(late, now.invocation)
        sleep(min(POLL_SECONDS, max(deadline - time.monotonic(), 0)))
        before, now = now, system.unit_state(unit)
        restarts = min(restarts, now.restarts) if now.load_state else restarts
