"""Schedules of both sides and of the oracle, step by step, in float64 and in float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parity_tests import reference
from parity_tests.cases import ScheduleCase
from parity_tests.tolerances import LR_FLOAT32, LR_FLOAT64, Tolerance


@dataclass(frozen=True)
class ScheduleResult:
    """Multipliers of one schedule on all sides.

    Attributes:
        steps: updates done, [K].
        values: {"reference", "torch", "jax", "jax32"}: [K]; jax32 was computed with x64 off.
        errors: {"torch", "jax", "jax32"}: largest distance from the reference, relative to the peak.
    """

    case: ScheduleCase
    steps: np.ndarray
    values: dict[str, np.ndarray]
    errors: dict[str, float]

    @staticmethod
    def tolerance(side: str) -> Tolerance:
        return LR_FLOAT32 if side == "jax32" else LR_FLOAT64

    @property
    def passed(self) -> bool:
        return all(error <= self.tolerance(side).value for side, error in self.errors.items())

    def failure(self) -> str:
        """Which side departs, where first, and by how much."""
        for side, error in self.errors.items():
            tolerance = self.tolerance(side)
            if not error <= tolerance.value:
                found, expected = self.values[side], self.values["reference"]
                off = ~(np.abs(found - expected) <= tolerance.value * np.abs(expected).max())
                k = int(np.argmax(off))
                return (
                    f"schedule {self.case.id} ({self.case.lr_scheduler_type}): {side} and reference part\n"
                    f"  first at     step {self.steps[k]}: {side} {found[k]:.12g}, reference {expected[k]:.12g}\n"
                    f"  error        {error:.3g} of the peak, allowed {tolerance.value:.3g}\n"
                    f"  tolerance    {tolerance.name}: {tolerance.reason}\n"
                    f"  run it alone python -m parity_tests -k {self.case.id}"
                )
        return ""


def compare_schedule(case: ScheduleCase) -> ScheduleResult:
    """Evaluate ``case`` on all sides."""
    from parity_tests.backends import jax_backend, torch_backend

    arguments = case.lr_scheduler_type, case.kwargs, case.steps
    values = {
        "reference": np.array([reference.multiplier(n, case.lr_scheduler_type, case.kwargs) for n in case.steps]),
        "torch": torch_backend.schedule_values(*arguments),
        "jax": jax_backend.schedule_values(*arguments, "float64"),
        "jax32": jax_backend.schedule_values(*arguments, "float32"),
    }
    expected = values["reference"]
    peak = float(np.abs(expected).max())
    errors = {
        side: float(np.abs(found - expected).max()) / peak for side, found in values.items() if side != "reference"
    }
    return ScheduleResult(case, np.array(case.steps), values, errors)
