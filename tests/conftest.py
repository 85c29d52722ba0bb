# SPDX-License-Identifier: Apache-2.0
"""Makes the modules importable in-process the way Ansible ships them to a box."""

from __future__ import annotations

import signal
from pathlib import Path

import ansible.module_utils
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))

# no test may depend on how fast the machine is
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that. Tests that
# interrupt a child must find it as a terminal would have started it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
