# SPDX-License-Identifier: Apache-2.0
"""``python -m demo.tiny_glm5 OUT_DIR``: write the tiny GLM-5, or say that it is there already."""

from __future__ import annotations

import argparse
from pathlib import Path

from .writer import write


def main(arguments: list[str] | None = None) -> int:
    """Write the model named by ``arguments`` and print each file that changed, or ``unchanged``."""
    parser = argparse.ArgumentParser(prog="python -m demo.tiny_glm5", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="OUT_DIR")
    parser.add_argument("--shards", type=int, default=3, help="number of GGUF files (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default 0)")
    parser.add_argument(
        "--metadata-shard",
        action="store_true",
        help="the first shard holds metadata only, as in large real sets",
    )
    options = parser.parse_args(arguments)
    try:
        changed = write(
            options.directory, options.shards, options.seed, metadata_shard=options.metadata_shard
        )
    except ValueError as error:
        parser.error(str(error))
    for path in changed:
        print(f"{'written' if path.exists() else 'removed'} {path}")
    if not changed:
        print("unchanged")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
