# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.boxes NAME DIRECTORY``: unpack a recorded box."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import names, unpack

parser = argparse.ArgumentParser(prog="python -m tests.boxes", description=__doc__)
parser.add_argument("name", choices=names())
parser.add_argument("directory", type=Path)
parser.add_argument(
    "--real-behind", action="store_true", help="ask the real tool what the box does not answer"
)
given = parser.parse_args()
unpack(given.name, given.directory.resolve(), given.real_behind)
