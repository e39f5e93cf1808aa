"""Which schedules move the lr and the decay of which group, and what they multiply."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax

from jax_impl.config import OptimizerConfig
from jax_impl.param_groups import ParameterGroup
from jax_impl.param_scheduler import OptimizerParamScheduler

Schedule = Callable[[Any], Any] | OptimizerParamScheduler
GroupSchedules = Schedule | Mapping[int, Schedule] | None
"""A multiplier of the base value as a function of the updates done, or an annealer, whose values are absolute; for all
groups, or {group: its own}. Without one the value is constant."""


class Schedules(NamedTuple):
    """The lr and decay schedules of a transform."""

    lr: GroupSchedules
    weight_decay: GroupSchedules

    @classmethod
    def check(cls, lr_schedule: Any, weight_decay_schedule: Any) -> Schedules:
        """Raise TypeError for anything but a schedule or {group number: schedule}."""
        schedules = cls(lr_schedule, weight_decay_schedule)
        for field, given in zip(cls._fields, schedules, strict=True):
            argument = f"{field}_schedule"
            for group in given if isinstance(given, Mapping) else ():
                if isinstance(group, bool) or not isinstance(group, int):
                    raise TypeError(f"{argument} must name groups by their numbers, got {group!r}")
            for schedule in _each(given):
                if isinstance(getattr(schedule, "__self__", None), OptimizerParamScheduler):
                    raise TypeError(f"{argument} must be the annealer, not its method: its values are no multipliers")
                if not callable(schedule) and not isinstance(schedule, OptimizerParamScheduler):
                    raise TypeError(f"{argument} must be a function of the step or an annealer, got {schedule!r}")
        return schedules

    def take(self) -> None:
        """A transform is built: its annealers keep their values from now on."""
        for given in self:
            for schedule in _each(given):
                if isinstance(schedule, OptimizerParamScheduler):
                    schedule.in_use = True

    def check_groups(self, groups: int, config: OptimizerConfig) -> None:
        """Raise ValueError for a schedule of a group that does not exist, or groups that it cannot tell apart."""
        for field, given in zip(self._fields, self, strict=True):
            unknown = [group for group in given if group not in range(groups)] if isinstance(given, Mapping) else []
            if unknown:
                raise ValueError(f"{field}_schedule: there is no group {unknown}, only {list(range(groups))}")
        decay = self.weight_decay
        decays = isinstance(decay, OptimizerParamScheduler) and max(decay.start_wd, decay.end_wd) > 0
        if decays and config.disable_weight_decay_for_1d_params and config.weight_decay == 0:
            raise ValueError(
                "disable_weight_decay_for_1d_params needs an optimizer that is built with weight_decay > 0: with 0 "
                "nothing tells its groups apart, and the annealer's decay would reach all of them"
            )

    def bases(self, number: int, group: ParameterGroup, config: OptimizerConfig) -> tuple[float, float]:
        """What the schedules of a group multiply: its lr and decay, or its factors where an annealer moves them."""
        lr = _base(self.lr, number, group.lr, config.lr)
        return lr, _base(self.weight_decay, number, group.weight_decay, config.weight_decay)

    def factors(self, group: int, count: jax.Array) -> tuple[Any, Any]:
        """What multiplies the bases of a group after ``count`` updates."""
        lr, weight_decay = _of(self.lr, group), _of(self.weight_decay, group)
        if isinstance(lr, OptimizerParamScheduler):
            lr = lr.learning_rate
        if isinstance(weight_decay, OptimizerParamScheduler):
            weight_decay = weight_decay.weight_decay
        return (1.0 if lr is None else lr(count)), (1.0 if weight_decay is None else weight_decay(count))


def _each(given: GroupSchedules) -> Collection[Schedule]:
    if isinstance(given, Mapping):
        return given.values()
    return () if given is None else (given,)


def _of(given: GroupSchedules, group: int) -> Schedule | None:
    return given.get(group) if isinstance(given, Mapping) else given


def _base(given: GroupSchedules, number: int, value: float, of_config: float) -> float:
    if not isinstance(_of(given, number), OptimizerParamScheduler):
        return value
    # an annealer for all groups is multiplied by lr_multipliers; one of a single group is meant as it is
    return value / of_config if of_config and not isinstance(given, Mapping) else 1.0
