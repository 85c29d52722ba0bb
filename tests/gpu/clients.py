# SPDX-License-Identifier: Apache-2.0
"""Clients of a server of completions, all in one thread: what arrived when.

vLLM's own benchmark (vllm.benchmarks.serve) parses every event as it arrives and knows one kind of
server; 256 clients of a model of few layers then measure the client. Here the bytes are kept with
their times and are read when all is over.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Read = tuple[float, bytes]  # seconds of the clock, what came


@dataclass
class Answer:
    """One streamed answer; times in seconds of the clock, tokens by event."""

    begun: float
    ended: float
    events: list[tuple[float, float]] = field(default_factory=list)
    tokens: int = 0  # that the server says it generated
    error: str = ""


@dataclass(frozen=True)
class Rates:
    """What a group of clients got together.

    ``total``: tokens/s from the first token of the last client to the last token of the one that
    ended first, so while all of them decoded; ``stream``: of one of them; ``tpot``: milliseconds
    between tokens, median of the clients; ``whole``: tokens/s from the first request to the last
    token, prompts included; ``ttft``: milliseconds, median.
    """

    clients: int
    total: float
    stream: float
    tpot: float
    whole: float
    ttft: float


def unchunk(raw: bytes) -> tuple[bytes, list[int], list[int]]:
    """A body from its chunks, and where each chunk begins: in the body, in ``raw``."""
    body, starts, sources = bytearray(), [0], [0]
    position = 0
    while (end := raw.find(b"\r\n", position)) >= 0:
        try:
            size = int(raw[position:end].split(b";")[0], 16)
        except ValueError:
            break
        if size == 0:
            break
        starts.append(len(body))
        sources.append(end + 2)
        body += raw[end + 2 : end + 2 + size]
        position = end + 2 + size + 2
    return bytes(body), starts, sources


def _tokens(event: dict[str, Any]) -> tuple[float, int | None]:
    """Tokens of an event of either server, and the number of all, where it tells that."""
    usage = event.get("usage") or {}
    total = usage.get("completion_tokens", event.get("tokens_predicted"))
    if event.get("stop") is not True:  # llama.cpp sends 0 with every event
        total = usage.get("completion_tokens")
    for choice in event.get("choices") or ():  # vLLM sends none without a token
        return float(len(choice.get("token_ids") or [0])), total
    if event.get("tokens"):
        return float(len(event["tokens"])), total
    return float(bool(event.get("content"))), total


def read_answer(begun: float, reads: Sequence[Read]) -> Answer:
    """What an HTTP answer with server-sent events says; ``reads`` as they came."""
    answer = Answer(begun, reads[-1][0] if reads else begun)
    raw = b"".join(data for _, data in reads)
    head, found, body = raw.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode("latin-1")
    if not found or " 200" not in status:
        answer.error = f"{status or 'no answer'}: {body[:300].decode('utf-8', 'replace')}"
        return answer
    starts, sources = [0], [0]
    if b"chunked" in head.lower():
        body, starts, sources = unchunk(body)
    ends, size = [], 0  # of the reads, in the raw bytes
    for _, data in reads:
        size += len(data)
        ends.append(size)
    position = 0
    for line in body.split(b"\n"):
        position += len(line) + 1
        text = line.strip()
        if not text.startswith(b"data:") or text.endswith(b"[DONE]"):
            continue
        try:
            event = json.loads(text[5:])
        except ValueError:
            event = None
        if not isinstance(event, dict):
            answer.error = (
                f"an event that is no JSON object: {text[:200].decode('utf-8', 'replace')}"
            )
            return answer
        if "error" in event:
            answer.error = str(event["error"])[:300]
            return answer
        try:
            count, total = _tokens(event)
        except (AttributeError, TypeError) as fault:
            answer.error = f"an event of another form ({fault}): {text[:200]!r}"
            return answer
        answer.tokens = total or answer.tokens
        last = min(position, len(body)) - 1
        chunk = bisect.bisect_right(starts, last) - 1
        where = len(head) + 4 + sources[chunk] + last - starts[chunk]
        came = reads[min(bisect.bisect_right(ends, where), len(reads) - 1)][0]
        if count or (answer.tokens and not answer.events):  # a single one may have no text
            answer.events.append((came, count or answer.tokens))
    if not answer.events:
        answer.error = "no token came"
        return answer
    counted = sum(count for _, count in answer.events)
    answer.tokens = answer.tokens or round(counted)
    # text that is no whole character yet is sent with a later event
    factor = answer.tokens / counted
    answer.events = [(came, count * factor) for came, count in answer.events]
    answer.ended = answer.events[-1][0]
    return answer


def rates(answers: Sequence[Answer]) -> Rates:
    """Rates of clients that began together and all answered."""
    first = [answer.events[0][0] for answer in answers]
    begun, opened = min(answer.begun for answer in answers), max(first)
    closed = min(answer.ended for answer in answers)
    tokens = sum(
        count for answer in answers for came, count in answer.events if opened < came <= closed
    )
    each = [
        (answer.ended - answer.events[0][0]) / (answer.tokens - answer.events[0][1]) * 1e3
        for answer in answers
        if answer.tokens > answer.events[0][1]
    ]
    total = tokens / (closed - opened) if closed > opened else 0.0
    return Rates(
        clients=len(answers),
        total=total,
        stream=total / len(answers),
        tpot=median(each) if each else 0.0,
        whole=sum(a.tokens for a in answers) / (max(a.ended for a in answers) - begun),
        ttft=median(one - a.begun for one, a in zip(first, answers, strict=True)) * 1e3,
    )


class Connection(asyncio.Protocol):
    """Keeps what arrives, with the time."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.events = 0
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), data))
        self.events += data.count(b"data:")

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)


def request(port: int, path: str, body: dict[str, Any]) -> bytes:
    """A POST after whose answer the server closes the connection."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nAccept: text/event-stream\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def ask(
    port: int, path: str, bodies: Sequence[dict[str, Any]], limit: float, *extra: Any
) -> list[Answer]:
    """Send all requests at once and wait for the answers.

    Args:
        port: of the server on this host.
        path: of the completions.
        bodies: one for each client.
        limit: seconds after which what is missing counts as an error.
        extra: coroutine functions that run beside, given the connections.
    """
    loop = asyncio.get_running_loop()
    waiting = [request(port, path, body) for body in bodies]
    made = [loop.create_connection(Connection, "127.0.0.1", port) for _ in bodies]
    connections = await asyncio.gather(*made)
    begun = []
    for (transport, _), content in zip(connections, waiting, strict=True):
        begun.append(time.perf_counter())
        transport.write(content)
    protocols = [protocol for _, protocol in connections]
    beside = [asyncio.ensure_future(one(protocols)) for one in extra]
    await asyncio.wait([protocol.closed for protocol in protocols], timeout=limit)
    answers = []
    for start, (transport, protocol) in zip(begun, connections, strict=True):
        answer = read_answer(start, protocol.reads)
        if not protocol.closed.done():
            answer.error = answer.error or f"not answered in {limit:.0f} s"
            transport.abort()
        answers.append(answer)
    for one in beside:
        await asyncio.wait_for(one, limit)
    return answers
