# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/benchmark.py: what it concludes, without a GPU and without vLLM."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpubox.decode_model import reads
from gpubox.gguf import read_header
from gpubox.model_facts import model_facts, read_config

from demo.tiny_glm5.model import FILE_STEM, Dimensions, tensors
from demo.tiny_glm5.writer import write
from tests.unit.test_gpu_checks import GPU, load

for module in ("serving", "true_sizes", "limits", "clients", "kineto"):
    sys.modules[module] = load(module)  # benchmark imports them from its own folder
benchmark = load("benchmark")
clients, kineto, limits = (sys.modules[name] for name in ("clients", "kineto", "limits"))

# --- bytes and operations -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write(folder, 1, dim=Dimensions(nextn_layers=0))
    return folder / f"{FILE_STEM}.gguf"


def facts_of(path: Path) -> dict[str, Any]:
    config, fault = read_config(path.parent)
    assert fault is None
    return model_facts(config, [read_header(path)])


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_pairs_are_counted_as_one_by_one(tokens: int) -> None:
    for topk in (1, 4, 100):
        one_by_one = [min(last + 1, topk) for last in range(tokens)]
        assert limits.attended(tokens, topk) == sum(one_by_one)
        beyond = [last + 1 for last in range(tokens) if last >= topk]
        assert limits.scored(tokens, topk) == sum(beyond)


def test_operations_of_the_tiny_model_by_hand(tiny: Path) -> None:
    facts, stored = facts_of(tiny), read_header(tiny).tensors
    found = limits.prefill_operations(facts, stored, 100)
    # two layers of three matrices of 2 of 8 experts, 512 x 256 each
    assert found["experts"] == 2 * 100 * 2 * 3 * 2 * 512 * 256
    assert found["head"] == 2 * 512 * 256
    # 8 heads, keys of 192 + 64 and values of 256, three layers
    assert found["attention"] == 2 * 3 * 8 * (256 + 256) * (100 * 101 // 2)
    assert found["indexer"] == 0  # a text shorter than index_topk is attended to as a whole
    long = limits.prefill_operations(facts, stored, 2050)
    assert long["indexer"] == 3 * 2 * (2049 + 2050) * 32 * 128


def test_a_step_reads_each_weight_once_and_only_the_experts_that_are_chosen(tiny: Path) -> None:
    facts = facts_of(tiny)
    one = reads(facts, 656, context=100, ranks=1)
    assert one is not None
    weights = facts["weights"]
    assert one.always + one.experts == (
        weights["divided"] + weights["replicated"] - weights["embedding"]
    )
    alone, many = (limits.decode_bytes(one, count) for count in (1, 1000))
    assert alone["experts"] == pytest.approx(weights["routed"] * 2 / 8)
    assert many["experts"] == pytest.approx(weights["routed"])
    assert many["always"] == alone["always"]
    # three layers, latents and keys of the indexer of 132 bytes
    assert alone["cache"] == 3 * 100 * (656 + 132)
    assert many["cache"] == 1000 * alone["cache"]


def test_a_rank_of_eight_holds_an_eighth_of_what_eight_divide() -> None:
    rank = benchmark.dimensions("rank-20")
    whole = benchmark.true_sizes.sizes(20)
    assert (rank.heads * 8, rank.expert_feed_forward * 8, rank.feed_forward * 8) == (
        whole.heads,
        whole.expert_feed_forward,
        whole.feed_forward,
    )
    assert (rank.hidden, rank.experts, rank.layers) == (whole.hidden, whole.experts, 20)
    assert rank.vocabulary == 154880 // 8 - 32
    one = benchmark.dimensions("tp1-6")
    assert (one.heads, one.layers, one.nextn_layers) == (64, 6, 0)
    for name in ("tp1-6", "rank-20", "tiny"):
        dim = benchmark.dimensions(name)
        assert dim.vocabulary - dim.unused_tokens == 512
        assert dim.vocabulary % 64 == 0
        assert all(spec.shape[-1] % 32 == 0 for spec in tensors(dim) if len(spec.shape) > 1)


# --- clients --------------------------------------------------------------------------------------


def chunked(*events: object, status: str = "200 OK") -> bytes:
    """An HTTP answer as uvicorn sends it."""
    head = f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    texts = [e if isinstance(e, str) else json.dumps(e) for e in events]
    parts = [f"data: {text}\n\n".encode() for text in texts]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


def vllm_events(tokens: int, together: int = 1) -> list[object]:
    """Events of vLLM 0.33 (recorded from 0.32), ``together`` tokens in each."""
    found: list[object] = [
        {"choices": [{"text": "" if number else "a", "token_ids": [7] * together}]}
        for number in range(tokens // together)
    ]
    return [*found, {"choices": [], "usage": {"completion_tokens": tokens}}, "[DONE]"]


def llama_events(tokens: int) -> list[object]:
    """Events of llama.cpp's /completion: a token that is no whole character comes with no event."""
    found: list[object] = [
        {"content": "a", "tokens": [7], "stop": False, "tokens_predicted": number}
        for number in range(0, tokens, 2)
    ]
    return [*found, {"content": "", "tokens": [], "stop": True, "tokens_predicted": tokens}]


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_however_the_bytes_are_cut_the_events_are_the_same(size: int) -> None:
    raw = chunked(*vllm_events(5))
    reads_ = [(float(at), raw[at : at + size]) for at in range(0, len(raw), size)]
    answer = clients.read_answer(-1.0, reads_)
    assert (answer.error, answer.tokens, len(answer.events)) == ("", 5, 5)
    ends = [match.start() for match in re.finditer(b"\n\n", raw)]
    assert [came for came, _ in answer.events] == [end // size * size for end in ends[:5]]


def test_tokens_that_come_together_or_late_are_all_counted() -> None:
    together = clients.read_answer(0.0, [(1.0, chunked(*vllm_events(6, together=3)))])
    assert [count for _, count in together.events] == [3, 3]
    late = clients.read_answer(0.0, [(1.0, chunked(*llama_events(6)))])
    assert late.tokens == 6
    assert sum(count for _, count in late.events) == 6
    textless = clients.read_answer(0.0, [(1.0, chunked(*llama_events(1)[1:]))])
    assert (textless.tokens, len(textless.events), textless.error) == (1, 1, "")


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", "no answer"),
        (chunked({"message": "too long"}, status="400 Bad Request"), "400"),
        (chunked({"error": {"message": "the engine died"}}), "the engine died"),
        (chunked("{"), "no JSON"),
        (chunked("5"), "no JSON object"),
        (chunked('"error"'), "no JSON object"),
        (chunked({"choices": [None]}), "another form"),
        (chunked({"usage": [1]}), "another form"),
        (chunked("[DONE]"), "no token"),
    ],
)
def test_what_is_no_answer_is_an_error(raw: bytes, error: str) -> None:
    assert error in clients.read_answer(0.0, [(1.0, raw)] if raw else []).error


def answer(begun: float, first: float, step: float, tokens: int) -> Any:
    events = [(first + step * number, 1.0) for number in range(tokens)]
    return clients.Answer(begun, events[-1][0], events, tokens)


def test_the_rate_is_that_while_all_decode() -> None:
    """The second client waits for its prompt, the first ends before it."""
    found = clients.rates([answer(0, 1, 0.1, 101), answer(0, 6, 0.1, 101)])
    assert found.total == pytest.approx(20.0)  # 2 tokens each 0.1 s from 6 to 11 s
    assert found.stream == pytest.approx(10.0)
    assert found.tpot == pytest.approx(100.0)
    assert found.whole == pytest.approx(202 / 16)
    assert found.ttft == pytest.approx(3500.0)
    alone = clients.rates([answer(0, 1, 0.1, 11)])
    assert alone.total == pytest.approx(10.0)


class StandIn(BaseHTTPRequestHandler):
    """Stands in for vLLM's and llama.cpp's servers; answers with as many tokens as are wanted."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, Any]]
    events: Callable[[str, int], list[object]]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append((self.path, body))
        if self.path.endswith("_profile"):
            self.do_GET()
            return
        tokens = body.get("max_tokens", body.get("n_predict"))
        raw = chunked(*type(self).events(self.path, tokens))
        for start in range(0, len(raw), 100):
            self.wfile.write(raw[start : start + 100])
            time.sleep(0.001)
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[tuple[int, type[StandIn]]]:
    class Handler(StandIn):
        seen: list[tuple[str, Any]] = []  # noqa: RUF012 - of this test
        events = staticmethod(
            lambda path, n: vllm_events(n) if path.startswith("/v1") else llama_events(n)
        )

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.server_port, Handler
        running.shutdown()


@pytest.mark.parametrize("llama", [False, True])
def test_both_servers_are_asked_and_measured(
    llama: bool, server: tuple[int, type[StandIn]]
) -> None:
    port, handler = server
    load_ = benchmark.Load(port, llama, 512)
    found: dict[str, Any] = {"decode": {}, "prefill": {}}
    benchmark.measure(load_, found, [1, 4], [16], cpu=True)
    assert (load_.asked, load_.answered, load_.faults) == (2 + 8 + 2, 12, [])
    assert found["decode"][1][0]["total"] > 0
    assert found["decode"][4][0]["whole"] > 0
    assert len(found["prefill"][16]) == 1
    path = "/completion" if llama else "/v1/completions"
    assert {seen for seen, _ in handler.seen} == {path}
    bodies = [body for _, body in handler.seen]
    assert {len(body["prompt"]) for body in bodies} == {16, benchmark.PROMPT}
    assert all(body["ignore_eos"] and body["stream"] for body in bodies)
    # one stream is greedy, several draw their own tokens
    assert {body["temperature"] for body in bodies} == {0.0, 1.0}


def test_no_request_is_sent_when_the_time_is_over(server: tuple[int, type[StandIn]]) -> None:
    load_ = benchmark.Load(server[0], False, 512, until=time.monotonic() - 1)
    with pytest.raises(RuntimeError, match="no time left"):
        load_.ask(1, 8, 8)
    assert not server[1].seen


def test_fewer_tokens_than_asked_are_a_fault(
    server: tuple[int, type[StandIn]], capsys: pytest.CaptureFixture[str]
) -> None:
    port, handler = server
    handler.events = staticmethod(lambda _, n: vllm_events(n - 1))
    load_ = benchmark.Load(port, False, 512)
    assert load_.decode(1, 5, 1) == []
    assert load_.faults[0] == "4 tokens instead of 5"
    assert not benchmark.judge("vllm", "tiny", load_)
    assert capsys.readouterr().out.startswith("FAIL vllm tiny 0 of 2")


def test_a_profile_is_asked_for_while_all_decode(server: tuple[int, type[StandIn]]) -> None:
    port, handler = server
    load_ = benchmark.Load(port, False, 512)
    assert load_.profile("decode-2", 2, 0) == ""
    paths = [path for path, _ in handler.seen]
    assert sorted(paths[:2]) == ["/v1/completions"] * 2
    assert paths[2:] == ["/start_profile", "/stop_profile"]
    assert handler.seen[2][1]["profile_prefix"] == "decode-2"


def test_an_answer_that_does_not_end_is_an_error() -> None:
    async def silent() -> Any:
        running = await asyncio.start_server(lambda *_: asyncio.sleep(5), "127.0.0.1", 0)
        port = running.sockets[0].getsockname()[1]
        (one,) = await clients.ask(port, "/", [{}], 0.2)
        running.close()
        return one

    answer = asyncio.run(silent())
    assert "no answer" in answer.error
    assert answer.tokens == 0


# --- profiles -------------------------------------------------------------------------------------


def trace(steps: int, clients_: int) -> list[dict[str, Any]]:
    """Events as Kineto writes them for decode steps in CUDA graphs, of 1,000 us each.

    The work of a step runs 3,000 us after its launch, while later steps are launched.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "x"}}]

    def add(cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args})

    for number in range(steps):
        start, graph, sampler = 1000.0 * number, 2 * number + 1, 2 * number + 2
        add(
            "user_annotation",
            f"execute_context_0(0)_generation_{clients_}({clients_})",
            start,
            300,
        )
        add("cuda_runtime", "cudaGraphLaunch", start + 100, 20, correlation=graph)
        # the sampler is launched after the annotation has ended
        add("cuda_runtime", "cudaLaunchKernel", start + 400, 10, correlation=sampler)
        ran = start + 3000
        experts = "void moe_vec_q<c10::BFloat16, 256, 32, block_q4_K, 1>(void const*, int)"
        add("kernel", experts, ran, 400, correlation=graph, grid=[64, 1, 1])
        # on a second stream at the same time
        add("kernel", "nvjet_tst_64x8_64x16", ran + 100, 100, correlation=graph)
        add("gpu_memcpy", "Memcpy DtoD (Device -> Device)", ran + 400, 50, correlation=graph)
        argmax = "void at::native::reduce_kernel<512, 1, ArgMaxOps<float>>(float)"
        add("kernel", argmax, ran + 500, 100, correlation=sampler)
        add("gpu_user_annotation", "execute_context_0(0)_generation_1(1)", ran, 600)
        add("cpu_op", "aten::argmax", start + 390, 30)
    # launched before the trace began
    add("kernel", "void moe_vec_q<float>(int)", 10.0, 5000, correlation=9999)
    return events


def test_work_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    path = tmp_path / "decode-64_rank0.1.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": trace(6, 64)}).encode()))
    found = kineto.steps(kineto.load(path))
    assert [len(step.work) for step in found] == [4] * 6
    chosen = kineto.decoding(found, 64)
    assert len(chosen) == 4  # without the first and the last
    profile = kineto.summarize(chosen)
    assert profile.busy == pytest.approx(0.55)  # 400, 50 and 100 us; 100 at the same time
    assert profile.period == pytest.approx(1.0)
    assert profile.groups["experts"] == (pytest.approx(0.4), 1.0)
    assert profile.groups["matrices in bfloat16"] == (pytest.approx(0.1), 1.0)
    assert profile.groups["copies"] == (pytest.approx(0.05), 1.0)
    assert next(iter(profile.kernels)) == "moe_vec_q"
    lines = kineto.table("decode-64", profile)
    assert lines[0] == "-- decode-64: 4 steps, ms a step: busy 0.550, period 1.000"
    assert "experts" in lines[1]
    assert "61.5%" in lines[1]


def packed(events: object) -> bytes:
    return gzip.compress(json.dumps({"traceEvents": events}).encode())


@pytest.mark.parametrize(
    ("stored", "said_"),
    [
        (packed(trace(6, 64))[:-500], "end-of-stream marker"),  # cut off
        (packed(trace(6, 64))[:60] + b"x" * 900, "rank0.2.pt.trace.json.gz"),  # not gzip any more
        (b"{}", "Not a gzipped file"),
        (packed(None), "no list of events"),
        (packed([5]), "no list of events"),
        (packed([]), "no step of it"),
        # no kernel was recorded: what ran on the host is not the card's time
        (packed([e for e in trace(6, 64) if e.get("cat") in ("user_annotation", "cpu_op")]), "no "),
        (b"", "no trace in"),  # of this run: rank0.1 is an older one
    ],
    ids=["cut off", "broken", "plain", "nothing", "numbers", "empty", "no kernels", "an older one"],
)
def test_a_trace_that_says_nothing_is_no_profile(
    stored: bytes,
    said_: str,
    tmp_path: Path,
    server: tuple[int, type[StandIn]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "decode-64_rank0.1.pt.trace.json.gz").write_bytes(packed(trace(6, 64)))

    class Profiling(benchmark.Load):  # type: ignore[misc, name-defined]
        def profile(self, name: str, *_: Any) -> str:
            if stored:
                (tmp_path / f"{name}_rank0.2.pt.trace.json.gz").write_bytes(stored)
            return ""

    found: dict[str, Any] = {}
    benchmark.profiled(Profiling(server[0], False, 512), found, tmp_path, [64], [], False)
    assert found == {}
    told = capsys.readouterr().out
    assert told.startswith("decode-64: no profile: ")
    assert said_ in told


def test_a_trace_of_this_run_is_taken(tmp_path: Path, server: tuple[int, type[StandIn]]) -> None:
    class Profiling(benchmark.Load):  # type: ignore[misc, name-defined]
        def profile(self, name: str, *_: Any) -> str:
            (tmp_path / f"{name}_rank0.2.pt.trace.json.gz").write_bytes(packed(trace(6, 64)))
            return ""

    found: dict[str, Any] = {}
    benchmark.profiled(Profiling(server[0], False, 512), found, tmp_path, [64], [], False)
    assert found["decode-64"].busy == pytest.approx(0.55)


def test_other_steps_are_left_out() -> None:
    assert kineto.decoding(kineto.steps(trace(6, 64)), 63) == []
    assert kineto.prefilling(kineto.steps(trace(6, 64))) == []
    assert kineto.summarize([]) is None
    prompt = trace(3, 1)
    prompt[1]["name"] = "execute_context_1(8192)_generation_0(0)"
    (step,) = kineto.prefilling(kineto.steps(prompt))
    assert step.context_tokens == 8192
    assert kineto.summarize([step]).period == pytest.approx(0.6)
    # in two parts, of which the second is launched while the first runs
    prompt = trace(3, 1)
    for number in (1, 10):
        assert "execute" in prompt[number]["name"]
        prompt[number]["name"] = "execute_context_1(4096)_generation_0(0)"
    (step,) = kineto.prefilling(kineto.steps(prompt))
    assert (step.context_tokens, len(step.work)) == (8192, 8)
    assert kineto.summarize([step]).busy == pytest.approx(2 * 0.55)


def test_work_that_no_step_launched_is_told() -> None:
    events = trace(6, 64)  # 650 us each, and 5,000 of a step before
    assert kineto.unassigned(events, kineto.steps(events)) == pytest.approx(5000 / 8900)
    assert kineto.unassigned(events[:-1], kineto.steps(events)) == pytest.approx(0)
    assert kineto.unassigned([], []) == 0


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("void moe_q4_K<c10::BFloat16, true>(void const*)", "experts"),
        ("gate_up_kernel", "experts"),
        ("void mul_mat_vec_q<c10::BFloat16, 256, 32, block_q5_K, 2>()", "linear"),
        ("void mul_mat_q6_K<c10::BFloat16, true>(void const*)", "linear"),
        ("void quantize_q8_1<c10::BFloat16>(void const*)", "rounding to 8 bits"),
        (
            "void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<T>()",
            "attention",
        ),
        ("sparse_mla_kernel", "attention"),
        ("sm90_fp8_paged_mqa_logits", "indexer"),
        ("void vllm::moe::moe_align_block_size_kernel<int>(int)", "routing"),
        ("void vllm::topKPerRowDecode<512, true>(float)", "indexer"),
        ("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", "matrices in bfloat16"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "between"),
        ("some_new_kernel", "rest"),
    ],
)
def test_kernels_are_in_the_group_that_their_name_says(name: str, wanted: str) -> None:
    assert kineto.group(kineto.short({"name": name})) == wanted


def test_sums_belong_to_the_kernel_before_them() -> None:
    one = kineto.short({"name": "linear_kernel", "args": {"grid": [48, 1, 11]}})
    assert one == "linear_kernel [48, 1, 11]"
    assert kineto.group(one) == "linear"
    assert kineto.group("sum_kernel", one) == "linear"
    assert kineto.group("sum_kernel", "down_kernel") == "experts"
    assert kineto.group("packed_kernel [48, 1, 11]") == "linear"
    assert kineto.group("sum_kernel", "packed_kernel [48, 1, 11]") == "linear"
    assert kineto.group("packed_experts_kernel") == "experts"
    product = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN"
    assert kineto.group(product) == "matrices in bfloat16"
    assert kineto.group(product, "dequantize_block_q5_K") == "linear"
    assert kineto.group("large_batch_kernel [48, 1, 1]", one) == "experts"


# --- what is said ---------------------------------------------------------------------------------


def rounds(*totals: float) -> list[dict[str, float]]:
    return [{"total": total, "tpot": 1.0, "whole": 1.0, "ttft": 1.0} for total in totals]


def said(one: float, many: float, llama: float, busy: float = 0.0) -> list[str]:
    """GOAL lines with a limit of 1 ms a step."""
    results = {
        "vllm": {"decode": {1: rounds(one), 64: rounds(many)}},
        "llama": {"decode": {1: rounds(llama)}},
    }
    found = {"decode": {1: {"ms": 1.0}, 64: {"ms": 8.0}}}
    profiles = {"decode-1": kineto.Profile(1, busy, busy, {}, {})} if busy else {}
    return [line.split(":")[0] for line in benchmark.goals(results, found, profiles)]


def test_goals_are_met_or_missed() -> None:
    assert said(600, 6000, 599) == ["GOAL met"] * 3
    assert said(599, 5989, 600) == ["GOAL missed"] * 3
    assert said(100, 1001, 99, busy=1.2) == ["GOAL missed", "GOAL met", "GOAL met"]
    assert benchmark.goals({}, {}, {}) == []
    results = {"vllm": {"decode": {1: rounds(600)}}}
    profiles = {"decode-1": kineto.Profile(1, 0.0, 0.0, {}, {})}  # kernels without a duration
    (line,) = benchmark.goals(results, {"decode": {1: {"ms": 1.0}}}, profiles)
    assert line == "GOAL met: one stream: 60.0% of the bandwidth limit; wanted 60%"
    assert said(100, 1001, 0)[2] == "GOAL unknown"


def test_a_goal_tells_what_the_limits_would_allow() -> None:
    results = {"vllm": {"decode": {1: rounds(100), 64: rounds(900)}}}
    found = {"decode": {1: {"ms": 1.0}, 64: {"ms": 8.0}}}
    assert benchmark.goals(results, found, {})[1] == (
        "GOAL missed: 64 clients: 9.0 x one (limit against limit 8.0 x); wanted 10 x"
    )


def test_lines_show_shares() -> None:
    found = {"decode": {8: {"ms": 1.0}}, "prefill": {512: {"ms": 5.0, "bytes ms": 7.0}}}
    profiles = {"decode-8": kineto.Profile(1, 1.25, 2.0, {}, {})}
    (line,) = benchmark.decode_lines("vllm", {8: rounds(4000, 4000, 3000)}, found, profiles)
    assert line.split()[:3] == ["vllm", "8", "4000.0"]
    assert "50.0%" in line  # 2 ms a step
    assert "80.0%" in line  # 1.25 ms busy
    (line,) = benchmark.prefill_lines("vllm", {512: [10.0, 10.0, 20.0]}, found, {})
    assert "50.0%" in line
    (line,) = benchmark.decode_lines("vllm", {8: []}, found, {})
    assert "no round" in line


@pytest.mark.parametrize("form", ["8.3f", "9.2f"])
def test_columns_of_a_profile_are_as_wide_without_one(form: str) -> None:
    profile = kineto.Profile(1, 12.5, 2.0, {}, {})
    there, none = (benchmark.busy_columns(5.0, one, form) for one in (profile, None))
    assert there.split() == [f"{12.5:{form}}".strip(), "40.0%"]
    assert none.split() == ["-", "-"]
    assert len(there) == len(none) == int(form[0]) + 7


@pytest.mark.parametrize(
    ("prompts", "wanted"), [([512, 2048, 8192], [512, 8192]), ([512], [512]), ([], [])]
)
def test_the_first_and_the_last_prompt_are_profiled(
    prompts: list[int], wanted: list[int], tmp_path: Path, server: tuple[int, type[StandIn]]
) -> None:
    asked = []

    class Profiling(benchmark.Load):  # type: ignore[misc, name-defined]
        def profile(self, name: str, count: int, prompt: int) -> str:
            asked.append((name, count, prompt))
            return "not here"

    load_ = Profiling(server[0], False, 512)
    benchmark.profiled(load_, {}, tmp_path, [8], prompts, False)
    assert asked == [(f"prefill-{tokens}", 1, tokens) for tokens in wanted]


def test_a_round_in_which_clients_waited_for_each_other_has_no_rate() -> None:
    found = {"decode": {8: {"ms": 1.0}}}
    (line,) = benchmark.decode_lines("vllm", {8: rounds(0, 0, 0)}, found, {})
    assert line.split()[:4] == ["vllm", "8", "-", "-"]
    assert line.endswith("  -, -, -")
    (line,) = benchmark.decode_lines("vllm", {8: rounds(0, 0, 4000)}, found, {})
    assert line.split()[2] == "4000.0"


def test_the_server_is_started_as_the_stack_starts_it() -> None:
    command = benchmark.vllm_command(Path("/m.gguf"), 1, Path("/t"), False, 8256, {})
    text = " ".join(command)
    assert command[3:5] == ["serve", "/m.gguf"]
    for words in (
        "--dtype bfloat16",
        "--kv-cache-dtype fp8",
        "--no-enable-prefix-caching",
        "--max-num-seqs 256",
        '"cudagraph_capture_sizes":[1,2,4,8,16,32,64,128,256]',
        '"torch_profiler_dir":"/t"',
    ):
        assert words in text
    other = benchmark.vllm_command(Path("/m.gguf"), 1, None, False, 8256, {"kv_cache_dtype": None})
    assert "--kv-cache-dtype" not in other
    assert "--profiler-config" not in other


def test_every_stream_of_llama_cpp_has_room_for_its_tokens() -> None:
    command = benchmark.llama_command("s", Path("/m.gguf"), 1, 64, 384)
    assert command[command.index("-c") + 1] == str(64 * 512)
    assert command[command.index("-np") + 1] == "64"


def test_a_server_that_ends_is_told_with_its_first_error_and_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = "print('WARNING OSError: no'); print('ERROR x] ValueError: too small'); raise OSError"
    with (
        pytest.raises(RuntimeError, match="ended with 1: ValueError: too small"),
        benchmark.served([sys.executable, "-c", program], 1, log, {}, 20),
    ):
        pass
    seconds = f"300.{time.time_ns()}"  # that no other program sleeps
    sleeping = f"import subprocess, sys; subprocess.run(['sleep', '{seconds}'])"
    with (
        pytest.raises(RuntimeError, match="not ready after"),
        benchmark.served([sys.executable, "-c", sleeping], 1, log, {}, 1),
    ):
        pass
    assert not any(
        line.split(b"\0")[:2] == [b"sleep", seconds.encode()]
        for path in Path("/proc").glob("[0-9]*/cmdline")
        for line in [_cmdline(path)]
    )


def test_sums_belong_to_the_kernel_before_them_on_their_stream() -> None:
    work = [
        kineto.Work(10, 20, "linear_kernel [8, 1, 1]", 7),
        kineto.Work(15, 30, "gate_up_kernel", 20),
        kineto.Work(31, 50, "sum_kernel", 7),
    ]
    profile = kineto.summarize([kineto.Step(0, 0, 1, work)])
    assert profile.groups == {"linear": (0.07, 2), "experts": (0.03, 1)}


def test_nothing_to_measure_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", "--cpu", "--no-vllm"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "leaves nothing to measure" in capsys.readouterr().err


def test_a_signal_while_a_server_ends_does_not_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program} time.sleep(60)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as out:
        out.readline()
    wait = process.wait

    def interrupted(timeout: float | None = None) -> int:
        if timeout is not None:
            raise SystemExit(143)  # what a second SIGTERM does
        return wait()

    monkeypatch.setattr(process, "wait", interrupted)
    with pytest.raises(SystemExit):
        benchmark.end(process)
    assert process.returncode == -signal.SIGKILL


def _cmdline(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_layers_that_are_alike_differ_in_small_tensors_only(tmp_path: Path) -> None:
    import gguf

    dim = Dimensions(layers=3, nextn_layers=0, vocabulary=600, unused_tokens=88)
    write(tmp_path, 1, dim=dim, distinct=1 << 14, alike=True)
    reader = gguf.GGUFReader(tmp_path / f"{FILE_STEM}.gguf")
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    for name in ("ffn_down_exps", "ffn_gate_exps"):
        assert (found[f"blk.1.{name}.weight"] == found[f"blk.2.{name}.weight"]).all()
    assert (found["blk.1.attn_norm.weight"] != found["blk.2.attn_norm.weight"]).any()
    assert (found["blk.1.ffn_gate_exps.weight"] != found["blk.1.ffn_up_exps.weight"]).any()
    words = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert words["unused87"] == 600 - 12 - 1
    assert found["token_embd.weight"].shape[0] == 600


def test_without_a_gpu_it_is_said_that_nothing_was_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nowhere(type(Path())):  # type: ignore[misc]
        def exists(self, **_: Any) -> bool:
            return False

    monkeypatch.setattr(benchmark, "Path", Nowhere)
    monkeypatch.setattr("sys.argv", ["benchmark"])
    assert benchmark.main() == 0
    assert "nothing was checked" in capsys.readouterr().out


def test_what_cannot_be_written_ends_the_run_and_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], log: Path) -> Any:
        log.write_text("OSError: no space left\n")
        return subprocess.Popen(["false" if "rank-2" in command else "true"])

    monkeypatch.setattr(benchmark.serving, "run", run)
    argv = ["benchmark", "--cpu", "--model", "rank-2", "--work", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*argv, "--out", str(tmp_path)])
    assert benchmark.main() == 1
    assert capsys.readouterr().out == "FAIL rank-2 1: OSError: no space left\n"


def test_what_writes_the_models_ends_with_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Told to end, for one by a limit around it, it leaves nobody who writes on."""
    running = []

    def run(*_: Any) -> Any:
        running.append(subprocess.Popen(["sleep", "30"]))
        return running[-1]

    def told(*_: Any) -> Any:
        raise SystemExit(143)

    monkeypatch.setattr(benchmark.serving, "run", run)
    monkeypatch.setattr(benchmark.time, "monotonic", told)
    arguments = argparse.Namespace(model=["tiny"], until=0.0)
    with pytest.raises(SystemExit):
        benchmark.parts(arguments, tmp_path, tmp_path)
    left = [process.poll() is None for process in running]
    for process in running:
        process.kill()
    assert left == [False, False]


@pytest.mark.parametrize("option", ["--clients", "--prompts"])
def test_no_clients_and_no_tokens_are_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", "--cpu", option, "8", "0"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "invalid positive value: '0'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rank-1", "tp8-6", "tp1-80", "tp1-06"])
def test_models_that_nobody_wrote_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", "--cpu", "--model", name])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert f"--model {name}: wanted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "given", "wanted"),
    [
        ("--options", "max_num_seqs=64", "a JSON object"),
        ("--options", "[1]", "a JSON object"),
        ("--options", "", "a JSON object"),
        ("--environment", "VLLM_GGUF_EXPERT_DECODE", "KEY=VALUE"),
        ("--environment", "=0", "KEY=VALUE"),
        ("--environment", "A B=0", "KEY=VALUE"),
    ],
)
def test_what_vllm_could_not_get_is_refused_before_anything_is_written(
    option: str,
    given: str,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = tmp_path / "work"
    monkeypatch.setattr("sys.argv", ["benchmark", "--cpu", "--work", str(work), option, given])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"argument {option}: {given!r} is none; wanted {wanted}" in told
    assert not work.exists()


def test_an_option_that_is_none_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["benchmark", "--cpu", "--work", str(tmp_path / "work"), "--options", '{"--port": 1}']
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert '--options {"--port": 1}: ' in told
    assert "wanted: " in told
    assert not (tmp_path / "work").exists()


def test_what_vllm_gets_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[argparse.Namespace] = []

    def parts(arguments: argparse.Namespace, *_: Any) -> None:
        seen.append(arguments)

    monkeypatch.setattr(benchmark, "parts", parts)
    argv = ["benchmark", "--cpu", "--work", str(tmp_path), "--out", str(tmp_path)]
    argv += ["--options", '{"max_num_seqs": 64}', "--environment", "A=b=c", "B="]
    monkeypatch.setattr("sys.argv", argv)
    assert benchmark.main() == 1
    assert seen[0].options == {"max_num_seqs": 64}
    assert dict(seen[0].environment) == {"A": "b=c", "B": ""}


def test_limits_come_from_the_models_own_file(tiny: Path) -> None:
    arguments = argparse.Namespace(clients=[1, 8], prompts=[64], cpu=True)
    card = {"copy": 1e12, "product": 1e12}
    found = benchmark.limits_of(tiny, 656, arguments, card)
    assert found["decode"][8]["ms"] > found["decode"][1]["ms"] > 0
    assert found["prefill"][64]["ms"] > 0
    assert GPU.joinpath("benchmark.py").exists()
