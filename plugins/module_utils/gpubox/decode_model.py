# SPDX-License-Identifier: Apache-2.0
"""What one stream can expect: tokens a second of eight PCIe cards, from bytes and latencies.

A step decodes one token, or verifies the drafts of MTP with it. Its time is the sum of the bytes
that a card reads at its memory's rate, the routed experts at the time of their kernels where that
is longer, and a rest (all-reduces, launches, small kernels) that nothing here divides further. The
rest is fitted on the historic 57 tokens/s; each constant says whether it is fitted or given.
``checks`` holds the model against measurements that it was not fitted on; docs/plan.md shows them.
Predicted, never measured: the plan shows it and decides nothing by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

# --- given ----------------------------------------------------------------------------------------

# Bytes a second of a card's memory, by a part of the name that nvidia-smi prints. NVIDIA's
# announcement of March 2025 gives all three RTX PRO 6000 1,792 GB/s (512 bits at 28 Gbit/s).
CARDS = {"RTX PRO 6000 Blackwell": 1_792_000_000_000}
RANKS = 8  # the fitted numbers are those of eight cards over PCIe
# Milliseconds of a layer's routed experts by tokens of a step, at the sizes of one rank of eight:
# docs/performance-gpu.md, one H200. Not measured on an RTX PRO 6000.
EXPERTS_PATCHED = {
    1: 0.0172,
    2: 0.0272,
    4: 0.0444,
    8: 0.0816,
    16: 0.1426,
    32: 0.2599,
    64: 0.3321,
}
# The same of the kernels that the historic box had (stock, one token), timed in the same run: the
# fit takes these. An earlier run gave 0.056, but none of the numbers above.
EXPERTS_HISTORIC = {1: 0.0466}
# Accepted drafts by position: GLM-5.1 in vLLM at TP8, reported with 59.0 and 95.6 tokens/s
# (shared/facts of this project, glm5-on-vllm: "Beyond 57 tokens/s").
ACCEPTANCE = (0.80, 0.55, 0.29)
# Bytes a second while every card reads from its peers: vllm issue 56128, 4 RTX PRO 6000 over PCIe
PEERS_AT_ONCE = 20_600_000_000
# and from one peer at a time, which a ring does: github.com/voipmonitor/rtx6kpro,
# hardware/pcie-bandwidth, eight of these cards on two sockets
ONE_PEER = 53_000_000_000
LL_FACTOR = 2  # NCCL's LL sends a flag of four bytes with four bytes of data
CONTEXT = 8192  # tokens, where nothing else is asked

# --- fitted ---------------------------------------------------------------------------------------

HISTORIC_DEFAULT, HISTORIC_LL = 43.0, 57.0  # tokens/s of this box, the GGUF and vLLM 0.16
# One-shot all-reduce, two sockets, TP8, no MTP: +7.2 % on 59.0 (glm5-on-vllm). It gives what a call
# saves against NCCL; FlashInfer's PCIe IPC is taken to save as much, and to grow as a ring does.
ONE_SHOT_GAIN = 0.072
# GLM-5.1, taken to be NVFP4 with NCCL (the report in glm5-on-vllm says neither): the first
# anchors the checks and ONE_SHOT_GAIN, the second is not fitted
REPORTED, REPORTED_MTP = 59.0, 95.6
# What a speculating step costs besides reading: 63.3 tokens/s without MTP, 96.1 with two drafts
# (59 % accepted) and 116.3 with four (42 %); vLLM 0.27.1, another model, one RTX PRO 6000
# (github.com/sudoingX/qwen38-mtp, pull request 11). A line through the two steps, at no drafts.
SPECULATION_BASE, SPECULATION = 63.3, ((2, 0.59, 96.1), (4, 0.42, 116.3))

NCCL_DEFAULT, NCCL_LL = "NCCL default", "NCCL LL"
ONE_SHOT, PCIE_IPC = "one-shot", "FlashInfer PCIe IPC"
# What vLLM 0.33 can be told to take on such a box (one-shot refuses more than two PCIe cards)
CHOICES = (NCCL_LL, PCIE_IPC)
MOST_DRAFTS = len(ACCEPTANCE)


@dataclass(frozen=True)
class Reads:
    """Bytes that one rank reads, for one token unless said otherwise.

    ``always``: attention, indexer, dense layers, shared experts, router and head; ``experts``: all
    routed experts of the rank, of which a step reads a part; ``draft_*``: the same of one draft;
    ``cache``: KV cache and keys of the indexer, of each token of a step.
    """

    always: float
    experts: float
    draft_always: float
    draft_experts: float
    cache: float
    expert_count: int
    experts_per_token: int
    expert_layers: int
    layers: int
    message: int  # of one all-reduce

    def experts_read(self, stored: float, tokens: int) -> float:
        """Bytes of the distinct experts that ``tokens`` choose, each its own at random."""
        return (
            stored
            * distinct_experts(self.expert_count, self.experts_per_token, tokens)
            / (self.expert_count)
        )


GLM5_LATENT = 656  # fp8_ds_mla
# GLM-5's config.json and round sums of its Q4_K_XL (402 GB), for the fit
GLM5: dict[str, Any] = {
    "layers": 78,
    "hidden_size": 6144,
    "experts": 256,
    "experts_per_token": 8,
    "expert_layers": 75,
    "index_topk": 2048,
    "index_head_dim": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "weights": {
        "divided": 395_200_000_000,
        "replicated": 2_100_000_000,
        "routed": 382_000_000_000,
        "embedding": 540_000_000,
        "head": 780_000_000,
        "mtp_divided": 5_300_000_000,
        "mtp_replicated": 180_000_000,
        "mtp_routed": 5_100_000_000,
        "mtp_embedding": 0,
    },
}


def bandwidth(name: object) -> int | None:
    """Bytes a second of a card's memory, None for a card that is not in the table."""
    return next((rate for part, rate in CARDS.items() if part in str(name)), None)


def distinct_experts(experts: int, chosen: int, tokens: int) -> float:
    """How many experts ``tokens`` choose together, ``chosen`` each, independently and evenly."""
    return experts * (1 - (1 - min(chosen, experts) / experts) ** tokens)


def reads(
    model: Mapping[str, Any] | None, latent: int, context: int = CONTEXT, ranks: int = RANKS
) -> Reads | None:
    """What a rank reads, from the facts of a model; None where one is unknown.

    Args:
        model: of ``model_facts``.
        latent: bytes of a token's KV cache in a layer, without the keys of the indexer.
        context: tokens that the indexer looks through.
        ranks: that share the weights.
    """
    facts = model or {}
    size = {name: _whole(facts.get(name), 10**9) for name in GLM5 if name != "weights"}
    given = facts.get("weights")
    weights = given if isinstance(given, Mapping) else {}
    part = {name: _whole(weights.get(name), 10**18) for name in GLM5["weights"]}
    needed = ("experts", "experts_per_token", "expert_layers", "layers", "hidden_size")
    if not part["routed"] or not all(size[name] for name in needed):
        return None

    def always(prefix: str) -> float:
        parts = part[f"{prefix}routed"] + part[f"{prefix}embedding"]
        divided = max(part[f"{prefix}divided"] - parts, 0)
        return divided / ranks + part[f"{prefix}replicated"]

    keys = size["index_head_dim"] + size["index_head_dim"] // 128 * 4
    return Reads(
        always=always(""),
        experts=part["routed"] / ranks,
        draft_always=always("mtp_") + part["head"] / ranks,
        draft_experts=part["mtp_routed"] / ranks,
        cache=size["layers"]
        * (min(context, size["index_topk"] or context) * latent + context * keys),
        expert_count=size["experts"],
        experts_per_token=size["experts_per_token"],
        expert_layers=size["expert_layers"],
        layers=size["layers"],
        message=size["hidden_size"] * 2,
    )


def _whole(value: object, below: int) -> int:
    """A whole number in its bounds, 0 for what is none."""
    sound = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below
    return int(str(value)) if sound else 0


def kernel_milliseconds(times: Mapping[int, float], tokens: int) -> float:
    """Between the measured numbers of tokens by a straight line, beyond the last in proportion."""
    counts = sorted(times)
    for low, high in pairwise(counts):
        if tokens <= high:
            share = max(tokens - low, 0) / (high - low)
            return times[low] + share * (times[high] - times[low])
    return times[counts[-1]] * tokens / counts[-1]


# --- the step -------------------------------------------------------------------------------------


def _reading(one: Reads, rate: float, tokens: int, kernels: Mapping[int, float] | None) -> float:
    """Milliseconds of the parts of a step that read: weights, experts, KV cache."""
    experts = one.experts_read(one.experts, tokens) / rate * 1e3
    if kernels:
        experts = max(experts, one.expert_layers * kernel_milliseconds(kernels, tokens))
    return (one.always + one.cache * tokens) / rate * 1e3 + experts


def _draft(one: Reads, rate: float, rest: float) -> float:
    """Milliseconds of one draft: a layer and the head; its share of the rest is a layer's."""
    experts = one.experts_read(one.draft_experts, 1)
    cache = one.cache / one.layers
    return (one.draft_always + experts + cache) / rate * 1e3 + rest / one.layers


def calls(one: Reads) -> int:
    """All-reduces of a step: two a layer, and those of the embedding and the head."""
    return 2 * one.layers + 2


def _growth(kind: str, one: Reads, tokens: int) -> float:
    """Milliseconds that a call takes longer than with one token, because its message is."""
    more = one.message * (tokens - 1)
    if kind == ONE_SHOT:  # every rank reads the others' whole messages, all at once
        return more * (RANKS - 1) / PEERS_AT_ONCE * 1e3
    return more * 2 * (RANKS - 1) / RANKS * LL_FACTOR / ONE_PEER * 1e3


def speculation_milliseconds() -> float:
    """What a step that verifies drafts costs besides reading (fitted, see ``SPECULATION``)."""
    (few, few_rate, few_speed), (many, many_rate, many_speed) = SPECULATION
    base = 1e3 / SPECULATION_BASE
    first = (1 + few * few_rate) * 1e3 / few_speed - base
    second = (1 + many * many_rate) * 1e3 / many_speed - base
    return first - few * (second - first) / (many - few)


def _saving(kind: str, one: Reads) -> float:
    """Milliseconds that a call of one token takes less than with NCCL LL (fitted)."""
    if kind == NCCL_DEFAULT:
        return -(1e3 / HISTORIC_DEFAULT - 1e3 / HISTORIC_LL) / calls(one)
    if kind in (ONE_SHOT, PCIE_IPC):
        step = 1e3 / REPORTED
        return (step - step / (1 + ONE_SHOT_GAIN)) / calls(one)
    return 0.0


def step_milliseconds(
    one: Reads,
    rate: float,
    rest: float,
    *,
    kind: str = NCCL_LL,
    drafts: int = 0,
    kernels: Mapping[int, float] | None = EXPERTS_PATCHED,
) -> float:
    """Time of a step.

    Args:
        one: of ``reads``.
        rate: bytes a second of a card.
        rest: milliseconds of a step without MTP that are not reading, with NCCL LL.
        kind: of all-reduce.
        drafts: tokens drafted by MTP; a step then verifies one more.
        kernels: measured milliseconds of a layer's experts; None reckons them by bytes only.
    """
    tokens = drafts + 1
    saving, more = _saving(kind, one), _growth(kind, one, tokens)
    time = _reading(one, rate, tokens, kernels) + rest - calls(one) * (saving - more)
    if drafts:
        one_draft = _draft(one, rate, rest) - calls(one) / one.layers * saving
        time += drafts * max(one_draft, 0.0) + speculation_milliseconds()
    return max(time, _reading(one, rate, tokens, kernels))


def tokens_a_step(acceptance: Sequence[float], drafts: int) -> float:
    """The step's own token, and each draft as often as it is accepted."""
    return 1 + sum(acceptance[:drafts])


def fitted_rest(
    speed: float, one: Reads, rate: float, kernels: Mapping[int, float] | None
) -> float:
    """Milliseconds of a step of ``speed`` tokens/s without MTP that are not reading."""
    return 1e3 / speed - _reading(one, rate, 1, kernels)


def _reference() -> tuple[Reads, float]:
    one = reads(GLM5, GLM5_LATENT)
    if one is None:
        raise AssertionError("the facts of GLM-5 above are incomplete")
    return one, float(CARDS["RTX PRO 6000 Blackwell"])


def rest_milliseconds() -> float:
    """The rest of a step of GLM-5 on the reference box, from its 57 tokens/s (fitted)."""
    one, rate = _reference()
    return fitted_rest(HISTORIC_LL, one, rate, EXPERTS_HISTORIC)


def predict(one: Reads, rate: float, kind: str, drafts: int) -> float:
    """Tokens a second of one stream on eight cards over PCIe.

    The rest is that of GLM-5's 78 layers, taken in proportion to the layers.
    """
    rest = rest_milliseconds() * one.layers / GLM5["layers"]
    time = step_milliseconds(one, rate, rest, kind=kind, drafts=drafts)
    return tokens_a_step(ACCEPTANCE, drafts) / time * 1e3


@dataclass(frozen=True)
class Check:
    """A measurement that the fit did not see: predicted, and the measured range."""

    about: str
    predicted: float
    low: float
    high: float
    unit: str

    @property
    def error(self) -> float:
        """Predicted less the nearer end of the range (0 within it), in the unit."""
        return self.predicted - min(max(self.predicted, self.low), self.high)


def checks() -> list[Check]:
    """The model against what it was not fitted on."""
    one, rate = _reference()
    # other quantisation, other kernels: experts by bytes only
    rest = fitted_rest(REPORTED, one, rate, None)

    def reported(kind: str, drafts: int) -> float:
        return step_milliseconds(one, rate, rest, kind=kind, drafts=drafts, kernels=None)

    historic = 1e3 / (rest + _reading(one, rate, 1, EXPERTS_HISTORIC))
    mtp = tokens_a_step(ACCEPTANCE, 3) / reported(NCCL_LL, 3) * 1e3
    one_shot = reported(NCCL_LL, 3) / reported(ONE_SHOT, 3)
    ipc = reported(PCIE_IPC, 0) / reported(NCCL_LL, 0)
    return [
        Check("the historic box, from 59.0 of GLM-5.1 in NVFP4", historic, 57, 57, "tokens/s"),
        Check("GLM-5.1 with MTP 3, from 59.0 without", mtp, REPORTED_MTP, REPORTED_MTP, "tokens/s"),
        Check("one-shot with MTP 3, tokens/s", (one_shot - 1) * 100, -16, -4, "%"),
        Check("FlashInfer PCIe IPC, time a token", (ipc - 1) * 100, -14, -9, "%"),
    ]


# --- for the plan ---------------------------------------------------------------------------------


def expected(
    model: Mapping[str, Any] | None,
    cards: Sequence[object],
    *,
    ranks: tuple[int, int, int],
    pcie: bool,
    latent: int,
    kind: str,
    drafts: int,
) -> dict[str, Any]:
    """What the plan says of one stream.

    Args:
        model: facts of the model.
        cards: names of the cards that are used.
        ranks: tensor, pipeline and data parallel size.
        pcie: all links between the cards are PCIe.
        latent: bytes of a token's KV cache in a layer.
        kind: of all-reduce that the server is started with.
        drafts: tokens that it drafts.

    Returns:
        ``unknown`` with the reason, or ``tokens_per_second`` as configured, ``best`` (the fastest
        all-reduce and drafts by the model) and ``table`` (all-reduce to tokens/s by drafts).
    """
    rates = [bandwidth(name) for name in cards]
    known = [rate for rate in rates if rate]
    # before the model is there: GLM-5's own sizes, and said so
    absent = not model or (model.get("weights") is None and model.get("architecture") is None)
    one = reads(GLM5, GLM5_LATENT) if absent else reads(model, latent)
    if ranks != (RANKS, 1, 1) or not pcie:
        return {"unknown": f"the model is fitted on {RANKS} ranks over PCIe only"}
    if len(known) < len(rates) or not known:
        names = sorted({str(name) for name, rate in zip(cards, rates, strict=True) if not rate})
        return {"unknown": f"the memory's rate of {', '.join(names) or 'the cards'} is not listed"}
    if one is None:
        return {"unknown": "config.json and the GGUF's headers do not give the model's sizes"}
    rate = float(min(known))
    table = {
        choice: [round(predict(one, rate, choice, count), 1) for count in range(MOST_DRAFTS + 1)]
        for choice in CHOICES
    }
    speed, best, count = max(
        (speed, choice, -number)
        for choice, speeds in table.items()
        for number, speed in enumerate(speeds)
    )
    now = round(predict(one, rate, kind, drafts), 1) if drafts <= MOST_DRAFTS else None
    return {
        "sizes": "those of GLM-5 at Q4_K_XL, for want of a model" if absent else "the model's",
        "tokens_per_second": now,
        "all_reduce": kind,
        "speculative_tokens": drafts,
        "best": {"all_reduce": best, "speculative_tokens": -count, "tokens_per_second": speed},
        "table": table,
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The same for people."""
    title = "one stream, predicted, not measured"
    if "unknown" in result:
        return [f"{title}: unknown: {result['unknown']}"]
    now, best = result["tokens_per_second"], result["best"]
    shown = "unknown" if now is None else f"{now:.0f} tokens/s"
    configured = f"{result['all_reduce']}, MTP {result['speculative_tokens']}"
    fastest = f"{best['all_reduce']}, MTP {best['speculative_tokens']}"
    found = [
        f"{title}: {shown} as configured ({configured}; sizes: {result['sizes']})",
        f"  best by this reckoning: {best['tokens_per_second']:.0f} tokens/s ({fastest})",
    ]
    for kind, speeds in result["table"].items():
        row = ", ".join(f"MTP {count} {speed:.0f}" for count, speed in enumerate(speeds))
        found.append(f"  {kind}: {row}")
    return found
