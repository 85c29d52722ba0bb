# SPDX-License-Identifier: Apache-2.0
"""How tests speak about time: a busy machine makes everything late, and nothing early.

A test may ask that something took at least the time it slept, and that something which would
otherwise last minutes ended soon. How fast it is, is measured elsewhere.
"""

from __future__ import annotations

AT_ONCE = 60.0
"""Seconds: far above what any prompt end takes on a busy machine, far below `FOREVER`."""

FOREVER = 600.0
"""Seconds that something lasts which a test expects to be cut short."""
