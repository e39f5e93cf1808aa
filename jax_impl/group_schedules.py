"""Which schedules move the lr and the decay of which group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

Schedule = Callable[[Any], Any]
GroupSchedules = Schedule | Mapping[int, Schedule] | None


class Schedules(NamedTuple):
    """The lr and decay schedules of a transform: a function for all groups, or {group: function}; else constant."""

    lr: GroupSchedules
    weight_decay: GroupSchedules

    @classmethod
    def check(cls, lr_schedule: Any, weight_decay_schedule: Any) -> Schedules:
        """Raise TypeError for what is neither a function nor a mapping of group numbers to functions."""
        schedules = {"lr_schedule": lr_schedule, "weight_decay_schedule": weight_decay_schedule}
        for argument, given in schedules.items():
            for group, schedule in given.items() if isinstance(given, Mapping) else [(0, given)]:
                if isinstance(group, bool) or not isinstance(group, int):
                    raise TypeError(f"{argument} must name groups by their numbers, got {group!r}")
                if given is not None and not callable(schedule):
                    raise TypeError(f"{argument} must be a function of the step, got {schedule!r}")
        return cls(lr_schedule, weight_decay_schedule)

    def check_groups(self, groups: int) -> None:
        """Raise ValueError for a schedule of a group that does not exist."""
        for field, given in zip(self._fields, self, strict=True):
            unknown = [group for group in given if group not in range(groups)] if isinstance(given, Mapping) else []
            if unknown:
                raise ValueError(f"{field}_schedule: there is no group {unknown}, only {list(range(groups))}")

    def factors(self, group: int, count: jax.Array) -> tuple[Any, Any]:
        """What multiplies the base lr and the base decay of one group after ``count`` updates."""
        own = [given.get(group) if isinstance(given, Mapping) else given for given in self]
        lr, weight_decay = (1.0 if schedule is None else schedule(count) for schedule in own)
        return lr, weight_decay
