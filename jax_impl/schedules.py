"""Learning-rate multipliers as optax schedules: ``f(count)`` multiplies the base lr of update count + 1.

``count >= 0`` is the number of updates already done: a Python number, a traced scalar or an array of any shape
(the result has its shape). Works under ``jit``, ``vmap`` and ``grad`` with x64 on and off.
Source of the formulas: the lambda schedulers of NVIDIA's cosmos-framework (lr_scheduler.py, July 2026).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

DECAY_TYPES = ("cosine", "linear")


def elapsed(count: Any, start: float, step_size: int = 1) -> jax.Array:
    """``count * step_size - start`` as a float, exact wherever the result is (up to the product).

    Horizons exceed 32 bits and float32 counts only to 2^24. Host numbers are therefore subtracted in float64, and
    traced integers as integers when ``start`` fits their type; when it does not, a count of that type never
    reaches it and rounding is harmless.
    """
    if step_size != 1:
        whole, rest = divmod(start, step_size)
        return elapsed(count, whole) * float(step_size) - float(rest)
    real = jnp.result_type(float)
    if not isinstance(count, jax.Array):
        return jnp.asarray(np.asarray(count, np.float64) - start, real)
    bits = 8 * count.dtype.itemsize
    if jnp.issubdtype(count.dtype, jnp.unsignedinteger) and float(start).is_integer() and 0 <= start < 2.0**bits:
        unsigned = jnp.asarray(int(start), count.dtype)
        return jnp.where(count >= unsigned, (count - unsigned).astype(real), -(unsigned - count).astype(real))
    if jnp.issubdtype(count.dtype, jnp.signedinteger) and float(start).is_integer() and abs(start) < 2.0 ** (bits - 1):
        return (count - int(start)).astype(real)
    return count.astype(real) - float(start)


def _anneal(x: jax.Array, f_from: float, f_to: float, decay_type: str) -> jax.Array:
    """From ``f_from`` at x = 0 to ``f_to`` at x = 1, along half a cosine or a line."""
    x = jnp.minimum(x, 1.0)  # a compiler that multiplies by a reciprocal may end above one
    if decay_type == "cosine":
        return f_to + (f_from - f_to) * (1.0 + jnp.cos(jnp.pi * x)) / 2.0
    return f_to + (f_from - f_to) * (1.0 - x)


def _ramp(m: jax.Array, warm_up: float, f_start: float, f_max: float) -> jax.Array:
    """Linear warm-up; one of zero length is already over."""
    if warm_up == 0:
        return jnp.full_like(m, f_max)
    return f_start + (f_max - f_start) * (m / float(warm_up))


def _check_number(argument: str, value: Any, *, at_least: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be a number, got {value!r}")
    if not math.isfinite(value) or (at_least is not None and value < at_least):
        bound = "finite" if at_least is None else f"finite and >= {at_least:g}"
        raise ValueError(f"{argument} must be {bound}, got {value!r}")
    return value


def _check_decay_type(decay_type: str) -> None:
    if decay_type not in DECAY_TYPES:
        raise ValueError(f"decay_type must be one of {DECAY_TYPES}, got {decay_type!r}")


def _cyclic_schedule(decay_type: str, **lists: Sequence[float]) -> optax.Schedule:
    for argument, values in lists.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError(f"{argument} must be a list with one entry a cycle, got {values!r}")
        at_least = 0.0 if argument in ("warm_up_steps", "cycle_lengths") else None
        for value in values:
            _check_number(argument, value, at_least=at_least)
    sizes = {argument: len(values) for argument, values in lists.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise ValueError(f"all lists need the same number of entries, at least one; got {sizes}")

    lengths = lists["cycle_lengths"]
    ends = [sum(lengths[: c + 1]) for c in range(len(lengths))]
    # the end belongs to the earlier of two cycles, so cycles of zero length behind it are never entered
    last = ends.index(ends[-1])

    def cycle_value(count: Any, c: int) -> jax.Array:
        warm_up, length = lists["warm_up_steps"][c], lengths[c]
        f_start, f_max, f_min = (lists[name][c] for name in ("f_start", "f_max", "f_min"))
        m = jnp.minimum(elapsed(count, ends[c] - length), float(length))
        ramp = _ramp(m, warm_up, f_start, f_max)
        if length <= warm_up:  # decided here, so that no traced branch divides by zero
            return ramp
        x = (m - float(warm_up)) / float(length - warm_up)
        return jnp.where(m < float(warm_up), ramp, _anneal(x, f_max, f_min, decay_type))

    def schedule(count: Any) -> jax.Array:
        value = cycle_value(count, last)
        for c in reversed(range(last)):
            value = jnp.where(elapsed(count, ends[c]) <= 0, cycle_value(count, c), value)
        return value

    return schedule


def lambda_warmup_cosine_schedule(
    *,
    warm_up_steps: Sequence[float],
    f_start: Sequence[float],
    f_max: Sequence[float],
    f_min: Sequence[float],
    cycle_lengths: Sequence[float],
) -> optax.Schedule:
    """Linear warm-up, then half a cosine, in every cycle; the last value is held for ever.

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
    return _cyclic_schedule(
        "cosine",
        warm_up_steps=warm_up_steps,
        f_start=f_start,
        f_max=f_max,
        f_min=f_min,
        cycle_lengths=cycle_lengths,
    )


def lambda_linear_schedule(
    *,
    warm_up_steps: Sequence[float],
    f_start: Sequence[float],
    f_max: Sequence[float],
    f_min: Sequence[float],
    cycle_lengths: Sequence[float],
) -> optax.Schedule:
    """Linear warm-up, then a line, in every cycle; arguments and errors as lambda_warmup_cosine_schedule."""
    return _cyclic_schedule(
        "linear",
        warm_up_steps=warm_up_steps,
        f_start=f_start,
        f_max=f_max,
        f_min=f_min,
        cycle_lengths=cycle_lengths,
    )


@dataclass(frozen=True, kw_only=True)
class _PhasedSchedule:
    """What wsd_schedule and wsfd_schedule return: a function of the count with ``branch_from``."""

    warm_up_steps: float
    total_steps: float
    decay_steps: float
    f_start: float
    f_max: float
    f_cooldown_start: float
    f_min: float
    decay_type: str
    slow_steps: float = math.nan
    """From the warm-up to where the line from ``f_max`` has come to ``f_cooldown_start``."""

    def __post_init__(self) -> None:
        for argument in ("warm_up_steps", "total_steps", "decay_steps"):
            _check_number(argument, getattr(self, argument), at_least=0.0)
        for argument in ("f_start", "f_max", "f_cooldown_start", "f_min"):
            _check_number(argument, getattr(self, argument))
        _check_decay_type(self.decay_type)
        if math.isnan(self.slow_steps):
            object.__setattr__(self, "slow_steps", self.total_steps - self.decay_steps - self.warm_up_steps)

    def __call__(self, count: Any) -> jax.Array:
        """Multiplier for update count + 1."""
        decay_start = self.total_steps - self.decay_steps
        value = jnp.full_like(elapsed(count, 0), self.f_min)
        if self.decay_steps > 0:
            x = elapsed(count, decay_start) / float(self.decay_steps)
            decay = _anneal(x, self._at_decay_start(), self.f_min, self.decay_type)
            value = jnp.where(elapsed(count, self.total_steps) < 0, decay, value)
        if decay_start > self.warm_up_steps:
            stable: Any = self.f_max
            if self.f_cooldown_start != self.f_max:
                x = elapsed(count, self.warm_up_steps) / float(self.slow_steps)
                stable = _anneal(x, self.f_max, self.f_cooldown_start, "linear")
            value = jnp.where(elapsed(count, decay_start) < 0, stable, value)
        if self.warm_up_steps > 0:
            ramp = _ramp(elapsed(count, 0), self.warm_up_steps, self.f_start, self.f_max)
            value = jnp.where(elapsed(count, self.warm_up_steps) < 0, ramp, value)
        return value

    def branch_from(self, step: float, *, decay_steps: float, decay_type: str | None = None) -> _PhasedSchedule:
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
        return replace(
            self,
            total_steps=step + _check_number("decay_steps", decay_steps, at_least=1.0),
            decay_steps=decay_steps,
            decay_type=self.decay_type if decay_type is None else decay_type,
        )

    def _at_decay_start(self) -> float:
        if self.f_cooldown_start == self.f_max:
            return self.f_max
        x = (self.total_steps - self.decay_steps - self.warm_up_steps) / self.slow_steps
        return self.f_cooldown_start + (self.f_max - self.f_cooldown_start) * (1.0 - x)


def wsd_schedule(
    *,
    warm_up_steps: float,
    total_steps: float,
    decay_steps: float,
    f_start: float,
    f_max: float,
    f_min: float,
    decay_type: str = "cosine",
) -> _PhasedSchedule:
    """Warm-up, stable, decay. The schedule has ``branch_from(step, decay_steps=...)``.

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
    return _PhasedSchedule(
        warm_up_steps=warm_up_steps,
        total_steps=total_steps,
        decay_steps=decay_steps,
        f_start=f_start,
        f_max=f_max,
        f_cooldown_start=f_max,
        f_min=f_min,
        decay_type=decay_type,
    )


def wsfd_schedule(
    *,
    warm_up_steps: float,
    total_steps: float,
    decay_steps: float,
    f_start: float,
    f_max: float,
    f_cooldown_start: float,
    f_min: float,
    decay_type: str = "cosine",
) -> _PhasedSchedule:
    """Warm-up, slow decay, fast decay: the stable phase falls linearly from ``f_max`` to ``f_cooldown_start``.

    Args:
        f_cooldown_start: multiplier where the fast decay of ``decay_steps`` begins; the rest as in wsd_schedule.

    Raises:
        ValueError: as wsd_schedule; also unless warm_up_steps >= 1, decay_steps >= 1 and their sum is below
            ``total_steps``.
    """
    schedule = _PhasedSchedule(
        warm_up_steps=warm_up_steps,
        total_steps=total_steps,
        decay_steps=decay_steps,
        f_start=f_start,
        f_max=f_max,
        f_cooldown_start=f_cooldown_start,
        f_min=f_min,
        decay_type=decay_type,
    )
    if warm_up_steps < 1 or decay_steps < 1 or warm_up_steps + decay_steps >= total_steps:
        raise ValueError(
            "wsfd needs warm_up_steps >= 1, decay_steps >= 1 and warm_up_steps + decay_steps < total_steps; "
            f"got {warm_up_steps!r}, {decay_steps!r} and total_steps={total_steps!r}"
        )
    return schedule


SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    "lambdalinear": lambda_linear_schedule,
    "lambdacosine": lambda_warmup_cosine_schedule,
    "wsd": wsd_schedule,
    "wsfd": wsfd_schedule,
}
