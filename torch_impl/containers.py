"""Several optimizers, or several schedulers, as one object with one checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.lr_scheduler import LambdaLR

from torch_impl.adam import check_adam_group, initial_adam_state
from torch_impl.config import config_hash
from torch_impl.flat_state import (
    IMPLEMENTATION,
    check_config,
    check_count,
    check_group,
    check_separate,
    check_state,
    common_values,
    counted_per_group,
    scheduler_state,
    unflatten,
)
from torch_impl.group_step import GroupStepOptimizer, loaded_copy
from torch_impl.param_groups import assign_
from torch_impl.routing import RoutingTable

CONFIG_KEYS = ("config", "config_hash")


class OptimizersContainer(Stateful):
    """Optimizers of one model, stepped, saved and loaded together.

    ``state_dict`` is flat, ``state.<name>.<key>`` and ``param_groups.<name>.<key>``, with the model's own parameter
    names, so that it can be matched by name and resharded, and ``config`` with its hash.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        routes: RoutingTable,
        config: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.optimizers = optimizers
        self.routes = routes
        self._config = config

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def __len__(self) -> int:
        return len(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The live groups of all optimizers, as for one: for torch.amp.GradScaler, logging, gradient clipping."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every optimizer. A closure is evaluated once, before the first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def describe(self) -> RoutingTable:
        """Role, group, base lr and decay of every parameter; print it before training."""
        return self.routes

    def effective_config(self) -> dict[str, Any]:
        """Every keyword in force, defaults included, as JSON holds it; equal to that of jax_impl."""
        return copy.deepcopy(dict(self._config))

    def state_dict(self) -> dict[str, Any]:
        """Flat state without side effects; tensors are the live ones, as in torch.

        Parameters that have no state yet are given the equivalent zeros, which are not kept: a checkpoint reader that
        fills the tensors of a fresh ``state_dict()`` finds them all.
        """
        flat: dict[str, Any] = {"config": json.dumps(self._config), "config_hash": config_hash(self._config)}
        for name, p, optimizer, group in self._members():
            for key, value in (optimizer.state.get(p) or _initial_state(optimizer, p, group)).items():
                flat[f"state.{name}.{key}"] = value
            for key, value in group.items():
                if key != "params":
                    flat[f"param_groups.{name}.{key}"] = value
        return flat

    def load_state_dict(self, state_dict: Mapping[str, Any], *, override: bool = False) -> None:
        """Load a flat state; everything is checked before anything changes, tensors are copied bit for bit.

        A parameter may have no state at all (it never had a gradient), and a low-precision one no master (it is
        rebuilt). Hyperparameters that the state does not have stay as they are.

        Args:
            state_dict: what ``state_dict()`` gave, here or in the reference system.
            override: keep this container's hyperparameters, lr and decay included, where the saved ones differ.

        Raises:
            ValueError: other parameter names, shapes, groups, or config; the state of another kind of optimizer; a
                hyperparameter out of range (TypeError if it is of the wrong type).
        """
        saved_config = {key: state_dict[key] for key in CONFIG_KEYS if key in state_dict}
        states, groups = unflatten({key: value for key, value in state_dict.items() if key not in CONFIG_KEYS})
        members = list(self._members())
        ours = {name for name, *_ in members}
        if set(groups) != ours or not set(states) <= ours:
            raise ValueError(
                f"the state belongs to other parameters; missing from it: {sorted(ours - set(groups))}, "
                f"unknown here: {sorted((set(groups) | set(states)) - ours)}"
            )
        groups = {name: {k: v for k, v in own.items() if k not in IMPLEMENTATION} for name, own in groups.items()}
        names = {p: name for name, p, *_ in members}
        for optimizer in self.optimizers:
            if isinstance(optimizer, GroupStepOptimizer):
                for group in optimizer.param_groups:
                    own = [(name, states.get(name, {}), groups[name]) for name in (names[p] for p in group["params"])]
                    for name, state, values in counted_per_group(own, adam_w_mode=group.get("adam_w_mode", True)):
                        groups[name] = values
                        if state:
                            states[name] = state
        for name, p, optimizer, group in members:
            check_state(name, p, states.get(name, {}), _initial_state(optimizer, p, group))
        lost = sorted(ours - set(states)) if saved_config else []
        if lost:  # state_dict() writes zeros for what has no state yet, other systems write nothing
            raise ValueError(f"the state of {lost} is missing from a checkpoint that was written here")
        if override:
            groups = {name: {k: v for k, v in values.items() if k == "step"} for name, values in groups.items()}
        loaded = []
        for optimizer in self.optimizers:
            own = []
            for group in optimizer.param_groups:
                inside = [names[p] for p in group["params"]]
                values = common_values([(name, groups[name]) for name in inside])
                if "step" in values:
                    check_count(f"param_groups.{inside[0]}.step", values["step"])
                if not override:
                    check_group(inside[0], values, group)
                if isinstance(optimizer, GroupStepOptimizer):
                    optimizer.check_hyperparameters({**group, **values})
                    if "step" not in values and any("exp_avg" in states.get(name, {}) for name in inside):
                        raise ValueError(f"the group of {inside[0]!r} has moments but no step in the state")
                else:
                    check_adam_group({**group, **values})
                own.append((inside[0], group, values))
            if not override:
                check_separate(own)
            loaded += own
        check_config(saved_config, self._config, override=override)
        for name, p, optimizer, _ in members:
            state = {key: loaded_copy(torch.as_tensor(value), p) for key, value in states.get(name, {}).items()}
            optimizer.state.pop(p, None)
            if state:
                optimizer.state[p] = state
        for _, group, values in loaded:
            for key, value in values.items():
                assign_(group, key, value)

    def _members(self) -> Iterator[tuple[str, Tensor, torch.optim.Optimizer, dict[str, Any]]]:
        names = {p: name for name, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p not in names:
                        raise ValueError(f"a parameter of shape {tuple(p.shape)} is optimized but not in the model")
                    yield names[p], p, optimizer, group


def _initial_state(optimizer: torch.optim.Optimizer, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    if isinstance(optimizer, GroupStepOptimizer):
        return optimizer.initial_state(p, group)
    return initial_adam_state(p)


class LRSchedulersContainer(Stateful):
    """One LambdaLR an optimizer, all following one schedule.

    Args:
        optimizers: the container whose groups are driven.
        schedule: multiplier of the base lr as a function of the number of updates done.
        start_step: number of updates done already.
    """

    def __init__(
        self, optimizers: OptimizersContainer, schedule: Callable[[float], float], start_step: int = 0
    ) -> None:
        self.schedulers = [LambdaLR(optimizer, schedule) for optimizer in optimizers]
        for scheduler in self.schedulers:
            scheduler.last_epoch = start_step
            scheduler._step_count = start_step + 1
            _set_lr(scheduler)

    def __iter__(self) -> Iterator[LambdaLR]:
        return iter(self.schedulers)

    def __len__(self) -> int:
        return len(self.schedulers)

    def step(self) -> None:
        """Advance by one update; call it after the optimizers' step."""
        for scheduler in self.schedulers:
            scheduler.step()

    def get_last_lr(self) -> list[float | Tensor]:
        """lr of every group, in the order of optimizers and groups, that the next update uses."""
        return [lr for scheduler in self.schedulers for lr in scheduler.get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """The state of a single LambdaLR, or of the first with all of them under "schedulers"."""
        states = [scheduler.state_dict() for scheduler in self.schedulers]
        return states[0] if len(states) == 1 else {**states[0], "schedulers": states}

    def load_state_dict(self, state_dict: dict[str, Any], *, override: bool = False) -> None:
        """Continue at the saved count; lr is set at once, whether the optimizers are loaded before or after.

        Args:
            state_dict: what ``state_dict()`` gave, or that of a plain LambdaLR.
            override: keep this container's base lrs.

        Raises:
            ValueError: the state was saved with another number of optimizers or of groups, or holds counts or lrs that
                no run has. Nothing has changed then.
        """
        states = state_dict.get("schedulers", [state_dict])
        if len(states) != len(self.schedulers):
            raise ValueError(
                f"the state has {len(states)} schedulers, this container {len(self.schedulers)}; "
                "build the optimizers over the same device meshes as when it was saved"
            )
        loaded = [scheduler_state(state) for state in states]
        if len({count for count, _ in loaded}) != 1:
            raise ValueError(f"the schedulers of the state are at different counts: {[count for count, _ in loaded]}")
        for scheduler, (_, base_lrs) in zip(self.schedulers, loaded, strict=True):
            if len(base_lrs) != len(scheduler.base_lrs):
                raise ValueError(
                    f"the state has {len(base_lrs)} parameter groups, the optimizer {len(scheduler.base_lrs)}; "
                    "build it with the same lr_multipliers and decay as when it was saved"
                )
        for scheduler, (count, base_lrs) in zip(self.schedulers, loaded, strict=True):
            scheduler.last_epoch, scheduler._step_count = count, count + 1
            if not override:
                scheduler.base_lrs = copy.deepcopy(base_lrs)
            _set_lr(scheduler)


def _set_lr(scheduler: LambdaLR) -> None:
    """Base lr and lr of every group at the scheduler's count."""
    factors = [schedule(scheduler.last_epoch) for schedule in scheduler.lr_lambdas]
    for group, base_lr, f in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, factors, strict=True):
        assign_(group, "initial_lr", base_lr)
        assign_(group, "lr", base_lr * f)
    scheduler._last_lr = copy.deepcopy([group["lr"] for group in scheduler.optimizer.param_groups])
