# SPDX-License-Identifier: Apache-2.0
"""The one error type that every gpubox function raises for a person to read."""

from __future__ import annotations


class GpuboxError(Exception):
    """A refusal that says what was measured, what was wanted and what to do about it.

    Args:
        measured: the state that was found, with its numbers and units.
        wanted: the state that the caller needs.
        remedy: the next step for the operator, as an imperative sentence.
    """

    def __init__(self, measured: str, wanted: str, remedy: str) -> None:
        self.measured = measured
        self.wanted = wanted
        self.remedy = remedy
        super().__init__(f"measured: {measured}\nwanted: {wanted}\ndo: {remedy}")
