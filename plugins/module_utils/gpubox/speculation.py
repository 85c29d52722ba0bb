# SPDX-License-Identifier: Apache-2.0
"""How many drafted tokens a server with speculative decoding has accepted.

Source of the names: vLLM 0.33.0, v1/spec_decode/metrics.py; of the format: Prometheus' text format,
version 0.0.4. The counters count from the start of the server, for all its clients.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PREFIX = "vllm:spec_decode_num_"
_SAMPLE = re.compile(
    re.escape(_PREFIX) + r"(?P<name>\w+?)_total\{(?P<labels>.*)\}\s+(?P<value>\S+)(?:\s+-?\d+)?"
)
_POSITION = re.compile(r'(?:^|,)\s*position="([0-9]{1,9})"')


@dataclass(frozen=True)
class Drafts:
    """Tokens that were drafted and accepted.

    ``by_position``: accepted tokens by their place in a draft; of a draft the first ones are
    accepted or none.
    """

    drafted: int
    accepted: int
    by_position: tuple[int, ...]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted tokens by drafted ones, 0 to 1; None before the first draft."""
        return self.accepted / self.drafted if self.drafted else None


def read_drafts(metrics: str) -> Drafts | None:
    """From what ``/metrics`` answers, over all engines; None without speculative decoding."""
    counts: dict[str, int] = {}
    by_position: dict[int, int] = {}
    for line in metrics.splitlines():
        sample = _SAMPLE.fullmatch(line.strip())
        if sample is None:
            continue
        try:
            value = int(float(sample["value"]))
        except (ValueError, OverflowError):  # NaN, Inf
            continue
        position = _POSITION.search(sample["labels"])
        if sample["name"] == "accepted_tokens_per_pos" and position is not None:
            place = int(position[1])
            by_position[place] = by_position.get(place, 0) + value
        else:
            counts[sample["name"]] = counts.get(sample["name"], 0) + value
    if "draft_tokens" not in counts or "accepted_tokens" not in counts:
        return None
    return Drafts(
        counts["draft_tokens"],
        counts["accepted_tokens"],
        tuple(by_position[place] for place in sorted(by_position)),
    )
