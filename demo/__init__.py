# SPDX-License-Identifier: Apache-2.0
"""One command from nothing to a served GLM-5 in a system container: ``python -m demo up``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The error type lives where Ansible can ship it to a box; `python -m demo` must find it there too.
_MODULE_UTILS = str(ROOT / "plugins" / "module_utils")
if _MODULE_UTILS not in sys.path:
    sys.path.insert(0, _MODULE_UTILS)
