# SPDX-License-Identifier: Apache-2.0
"""Merges GGUF shards into one file, byte for byte what ``llama-gguf-split --merge`` writes.

Each step knows nothing of the others' insides: `shards` checks the set, `plan` lays the result out
as a list of segments (nothing is written), `merging` fills a temporary file in the target folder
and makes it visible with one rename. A manifest beside the result lets a rerun know it again
without reading it, also when the shards are gone.
"""

from ..gguf import read_header
from .merging import Result, known_result, merge
from .shards import combined, read_set, shard_paths

__all__ = [
    "Result",
    "combined",
    "known_result",
    "merge",
    "read_header",
    "read_set",
    "shard_paths",
]
