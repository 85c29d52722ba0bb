# SPDX-License-Identifier: Apache-2.0
"""Merges GGUF shards into one file, byte for byte what ``llama-gguf-split --merge`` writes.

`shards` checks the set, `plan` lays the result out as a list of segments (nothing is written),
`copy` moves the bytes, `journal` remembers how far they came, `merging` makes the result visible
with one rename. A `manifest` beside it lets a rerun know it again without reading it, also when
the shards are gone, and holds the digests to verify it with.
"""

from ..gguf import read_header
from .destination import reserve
from .journal import takes_from_shards
from .manifest import known_result
from .merging import Method, Options, Result, bytes_besides, bytes_held, merge
from .shards import combined, read_set, shard_paths

__all__ = [
    "Method",
    "Options",
    "Result",
    "bytes_besides",
    "bytes_held",
    "combined",
    "known_result",
    "merge",
    "read_header",
    "read_set",
    "reserve",
    "shard_paths",
    "takes_from_shards",
]
