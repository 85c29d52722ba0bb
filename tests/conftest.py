# SPDX-License-Identifier: Apache-2.0
"""Makes the modules importable in-process the way Ansible ships them to a box."""

from __future__ import annotations

from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).resolve().parent.parent
ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))
