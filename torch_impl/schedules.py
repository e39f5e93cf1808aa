"""Learning-rate multipliers as plain functions of the step: ``f(n)`` multiplies the base lr of update n + 1.

``n >= 0`` counts the updates already done, so the first update uses ``f(0)``. All schedules return Python
floats: they survive ``torch.load(weights_only=True)`` inside a scheduler state.
Source of the formulas: the lambda schedulers of NVIDIA's cosmos-framework (lr_scheduler.py, July 2026).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

DECAY_TYPES = ("cosine", "linear")


def _anneal(x: float, f_from: float, f_to: float, decay_type: str) -> float:
    """From ``f_from`` at x = 0 to ``f_to`` at x = 1, along half a cosine or a line."""
    if decay_type == "cosine":
        return f_to + (f_from - f_to) * (1.0 + math.cos(math.pi * x)) / 2.0
    return f_to + (f_from - f_to) * (1.0 - x)


def _ramp(m: float, warm_up: float, f_start: float, f_max: float) -> float:
    """Linear warm-up; one of zero length is already over."""
    if warm_up == 0:
        return f_max
    return f_start + (f_max - f_start) * m / warm_up


def _check_number(argument: str, value: Any, *, at_least: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be a number, got {value!r}")
    if not math.isfinite(value) or (at_least is not None and value < at_least):
        bound = "finite" if at_least is None else f"finite and >= {at_least:g}"
        raise ValueError(f"{argument} must be {bound}, got {value!r}")
    return value


def _check_decay_type(decay_type: str) -> str:
    if decay_type not in DECAY_TYPES:
        raise ValueError(f"decay_type must be one of {DECAY_TYPES}, got {decay_type!r}")
    return decay_type


class _Cycle(NamedTuple):
    warm_up: float
    f_start: float
    f_max: float
    f_min: float
    length: float


class _CyclicScheduler:
    """Warm-up and decay, once a cycle; the value at the end of the last cycle is held for ever.

    Args (keyword only; each list has one entry a cycle):
        warm_up_steps: length of the linear ramp, in updates.
        f_start, f_max, f_min: multiplier where the ramp starts, where it ends, and at the end of the cycle.
        cycle_lengths: length of each cycle in updates, its warm-up included.

    A boundary step belongs to the earlier cycle. ``warm_up == length`` ends on the ramp's last value, and a
    longer warm-up is cut off where its cycle ends.

    Raises:
        TypeError: an argument is not a list of numbers.
        ValueError: lists that are empty or differ in length, negative lengths, numbers that are not finite.
    """

    _decay_type: str

    def __init__(
        self,
        *,
        warm_up_steps: Sequence[float],
        f_start: Sequence[float],
        f_max: Sequence[float],
        f_min: Sequence[float],
        cycle_lengths: Sequence[float],
    ) -> None:
        lists = {
            "warm_up_steps": warm_up_steps,
            "f_start": f_start,
            "f_max": f_max,
            "f_min": f_min,
            "cycle_lengths": cycle_lengths,
        }
        for argument, values in lists.items():
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise TypeError(f"{argument} must be a list with one entry a cycle, got {values!r}")
            at_least = 0.0 if argument in ("warm_up_steps", "cycle_lengths") else None
            for value in values:
                _check_number(argument, value, at_least=at_least)
        lengths = {argument: len(values) for argument, values in lists.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ValueError(f"all lists need the same number of entries, at least one; got {lengths}")
        self._cycles = tuple(_Cycle(*entry) for entry in zip(*lists.values(), strict=True))

    def schedule(self, n: float) -> float:
        """Multiplier for update n + 1."""
        n = min(n, sum(cycle.length for cycle in self._cycles))
        start = 0.0
        for cycle in self._cycles:
            if n <= start + cycle.length:
                break
            start += cycle.length
        m = n - start
        if m < cycle.warm_up or cycle.length <= cycle.warm_up:
            return float(_ramp(m, cycle.warm_up, cycle.f_start, cycle.f_max))
        x = (m - cycle.warm_up) / (cycle.length - cycle.warm_up)
        return float(_anneal(x, cycle.f_max, cycle.f_min, self._decay_type))

    __call__ = schedule


class LambdaWarmUpCosineScheduler(_CyclicScheduler):
    __doc__ = f"Linear warm-up, then half a cosine, in every cycle.\n\n{_CyclicScheduler.__doc__}"
    _decay_type = "cosine"


class LambdaLinearScheduler(_CyclicScheduler):
    __doc__ = f"Linear warm-up, then a line, in every cycle.\n\n{_CyclicScheduler.__doc__}"
    _decay_type = "linear"


class WSDScheduler:
    """Warm-up, stable, decay.

    Args (keyword only; lengths in updates):
        warm_up_steps: the ramp from ``f_start`` to ``f_max``; it wins where it overlaps the decay.
        total_steps: from here on the multiplier is ``f_min``.
        decay_steps: length of the decay from ``f_max`` to ``f_min`` that ends at ``total_steps``.
        f_start, f_max, f_min: multipliers.
        decay_type: "cosine" or "linear".

    Raises:
        TypeError: an argument is not a number.
        ValueError: a negative length, a number that is not finite, an unknown ``decay_type``.
    """

    def __init__(
        self,
        *,
        warm_up_steps: float,
        total_steps: float,
        decay_steps: float,
        f_start: float,
        f_max: float,
        f_min: float,
        decay_type: str = "cosine",
    ) -> None:
        self.warm_up_steps = _check_number("warm_up_steps", warm_up_steps, at_least=0.0)
        self.total_steps = _check_number("total_steps", total_steps, at_least=0.0)
        self.decay_steps = _check_number("decay_steps", decay_steps, at_least=0.0)
        self.f_start = _check_number("f_start", f_start)
        self.f_max = _check_number("f_max", f_max)
        self.f_min = _check_number("f_min", f_min)
        self.decay_type = _check_decay_type(decay_type)

    def branch_from(self, step: float, *, decay_steps: float, decay_type: str | None = None) -> Self:
        """The schedule that leaves this one's stable phase at ``step``: the same before, then a decay to ``f_min``.

        Args:
            step: where the decay starts, between the warm-up and this schedule's own decay.
            decay_steps: length of the decay, >= 1.
            decay_type: None keeps this schedule's.

        Raises:
            ValueError: ``step`` is outside the stable phase.
        """
        first, last = self.warm_up_steps, self.total_steps - self.decay_steps
        if not first <= _check_number("step", step, at_least=0.0) <= last:
            raise ValueError(f"step must be in the stable phase, {first} to {last}, got {step!r}")
        branch = copy.copy(self)
        branch.decay_steps = _check_number("decay_steps", decay_steps, at_least=1.0)
        branch.total_steps = step + decay_steps
        branch.decay_type = self.decay_type if decay_type is None else _check_decay_type(decay_type)
        return branch

    def _before_decay(self, n: float) -> float:
        return self.f_max

    def schedule(self, n: float) -> float:
        """Multiplier for update n + 1."""
        decay_start = self.total_steps - self.decay_steps
        if n < self.warm_up_steps:
            return float(_ramp(n, self.warm_up_steps, self.f_start, self.f_max))
        if n < decay_start:
            return float(self._before_decay(n))
        if n < self.total_steps:
            x = (n - decay_start) / self.decay_steps
            return float(_anneal(x, self._before_decay(decay_start), self.f_min, self.decay_type))
        return float(self.f_min)

    __call__ = schedule


class WSFDScheduler(WSDScheduler):
    """Warm-up, slow decay, fast decay: the stable phase falls linearly from ``f_max`` to ``f_cooldown_start``.

    Args:
        f_cooldown_start: multiplier where the fast decay of ``decay_steps`` begins; the rest as in WSDScheduler.

    Raises:
        ValueError: as WSDScheduler; also unless warm_up_steps >= 1, decay_steps >= 1 and their sum is below
            ``total_steps``.
    """

    def __init__(
        self,
        *,
        warm_up_steps: float,
        total_steps: float,
        decay_steps: float,
        f_start: float,
        f_max: float,
        f_cooldown_start: float,
        f_min: float,
        decay_type: str = "cosine",
    ) -> None:
        super().__init__(
            warm_up_steps=warm_up_steps,
            total_steps=total_steps,
            decay_steps=decay_steps,
            f_start=f_start,
            f_max=f_max,
            f_min=f_min,
            decay_type=decay_type,
        )
        self.f_cooldown_start = _check_number("f_cooldown_start", f_cooldown_start)
        if warm_up_steps < 1 or decay_steps < 1 or warm_up_steps + decay_steps >= total_steps:
            raise ValueError(
                "wsfd needs warm_up_steps >= 1, decay_steps >= 1 and warm_up_steps + decay_steps < total_steps; "
                f"got {warm_up_steps!r}, {decay_steps!r} and total_steps={total_steps!r}"
            )
        self._slow_steps = total_steps - decay_steps - warm_up_steps  # a branch leaves this line, it does not move it

    def _before_decay(self, n: float) -> float:
        x = (n - self.warm_up_steps) / self._slow_steps
        return _anneal(x, self.f_max, self.f_cooldown_start, "linear")


SCHEDULERS: dict[str, Callable[..., _CyclicScheduler | WSDScheduler]] = {
    "lambdalinear": LambdaLinearScheduler,
    "lambdacosine": LambdaWarmUpCosineScheduler,
    "wsd": WSDScheduler,
    "wsfd": WSFDScheduler,
}
