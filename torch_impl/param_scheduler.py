"""Learning rate and weight decay of every group of an optimizer, annealed together.

Source of names and rules: OptimizerParamScheduler of NVIDIA's Megatron-LM and NeMo AutoModel (0.7.0).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from torch_impl.annealing import Annealing, read_state
from torch_impl.config import check_bool, check_integer, check_real
from torch_impl.containers import OptimizersContainer
from torch_impl.param_groups import LR_BOUNDS, LR_RULE, WD_RULE, assign_


class OptimizerParamScheduler:
    """Anneals lr and weight decay of all groups of an optimizer; call ``step()`` after the optimizer's.

    Every group's lr and decay at construction become its ``lr_mult`` and ``wd_mult`` relative to the first group, or to
    the ``lr`` and ``weight_decay`` that an OptimizersContainer was built with (1 where that is zero or no number), so
    that ``lr_multipliers`` and parameters without decay keep their meaning. They live in the group, are saved with it,
    and multiply the scheduled values. A group that already has ``lr_mult``, ``max_lr`` or ``min_lr`` keeps its lr rule,
    one with ``wd_mult`` that; its ``max_lr`` and ``min_lr`` replace the annealer's. lr and decay that are tensors are
    filled in place.

    Args:
        optimizer: anything with ``param_groups``, or an OptimizersContainer: one annealer over all its optimizers.
        init_lr, max_lr, min_lr: lr where the warm-up starts, where it ends, and after the decay.
        lr_warmup_steps, lr_decay_steps: where the linear warm-up and the decay end, both counted from step 0.
        lr_decay_style: "constant", "linear", "cosine", "inverse-square-root" or "WSD".
        start_wd, end_wd, wd_incr_steps: weight decay at step 0, and from ``wd_incr_steps`` on.
        wd_incr_style: "constant", "linear" or "cosine".
        use_checkpoint_opt_param_scheduler: a load takes the saved values.
        override_opt_param_scheduler: a load takes the count only, and groups keep the bounds they had at construction
            (but for one equal to the saved annealer's, which is taken for a part of the checkpoint).
            With neither, saved values must equal these.
        wsd_decay_steps, lr_wsd_decay_style: length of the decay that ends at ``lr_decay_steps``, and "linear",
            "cosine", "exponential" or "minus_sqrt"; "WSD" needs both.
        allow_decreasing_wd: accept ``end_wd < start_wd``.

    These values and ``num_steps`` are attributes.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range, or an unknown style. Nothing has changed then.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: float,
        lr_decay_steps: float,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: float,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: float | None = None,
        lr_wsd_decay_style: str | None = None,
        *,
        allow_decreasing_wd: bool = False,
    ) -> None:
        annealing = Annealing(
            init_lr=init_lr,
            max_lr=max_lr,
            min_lr=min_lr,
            lr_warmup_steps=lr_warmup_steps,
            lr_decay_steps=lr_decay_steps,
            lr_decay_style=lr_decay_style,
            start_wd=start_wd,
            end_wd=end_wd,
            wd_incr_steps=wd_incr_steps,
            wd_incr_style=wd_incr_style,
            wsd_decay_steps=wsd_decay_steps,
            lr_wsd_decay_style=lr_wsd_decay_style,
        )
        check_bool("use_checkpoint_opt_param_scheduler", use_checkpoint_opt_param_scheduler)
        check_bool("override_opt_param_scheduler", override_opt_param_scheduler)
        check_bool("allow_decreasing_wd", allow_decreasing_wd)
        if use_checkpoint_opt_param_scheduler and override_opt_param_scheduler:
            raise ValueError(
                "use_checkpoint_opt_param_scheduler must be False under override_opt_param_scheduler=True, got True"
            )
        if annealing.end_wd < annealing.start_wd and not allow_decreasing_wd:
            raise ValueError(f"end_wd must be >= start_wd {start_wd!r} without allow_decreasing_wd, got {end_wd!r}")
        optimizers = list(optimizer) if isinstance(optimizer, OptimizersContainer) else [optimizer]
        _check_groups(optimizers)
        config = optimizer.effective_config() if isinstance(optimizer, OptimizersContainer) else {}
        self._exempts_by_zero = bool(config.get("disable_weight_decay_for_1d_params")) and config["weight_decay"] == 0
        self._check_exemptions(annealing)

        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self._annealing = annealing
        self._optimizers = optimizers
        self._base = {key: _base(optimizer, self._groups()[0], key) for key in ("lr", "weight_decay")}
        self._rules: list[list[dict[str, float]]] = [[] for _ in optimizers]
        self._set_step(annealing, 0)

    def __getattr__(self, name: str) -> Any:
        """The values of the annealing."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._annealing, name)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.state_dict().items())
        return f"{type(self).__name__}({values})"

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """lr of a group after ``num_steps`` steps, before its ``lr_mult``."""
        return _group_lr(self._annealing, self.num_steps, param_group)

    def get_wd(self) -> float:
        """Weight decay after ``num_steps`` steps, before any ``wd_mult``."""
        return self._annealing.weight_decay(self.num_steps)

    def step(self, increment: int = 1) -> None:
        """Count ``increment`` more steps (updates, samples) and set lr and decay of every group.

        Raises:
            TypeError: ``increment`` is no integer.
        """
        self._set_step(self._annealing, self.num_steps + check_integer("increment", increment))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings: the step count and everything that lr and decay depend on."""
        return {"num_steps": self.num_steps, **asdict(self._annealing)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the saved count; lr and decay are set at once. Loading again changes nothing.

        Args:
            state_dict: what ``state_dict()`` gave here, in jax_impl or in the reference systems, with its older keys
                too. What it does not have (decay, ``init_lr``, the arguments of "WSD") stays as it is.

        Raises:
            TypeError: no mapping, or a value of the wrong type.
            ValueError: keys missing or unknown, values out of range; values that differ from these, unless one of
                the two is to win. Nothing has changed then.
        """
        num_steps, saved = read_state(state_dict)
        annealing = self._annealing
        if self.override_opt_param_scheduler:
            for rules in itertools.chain(*self._rules):
                for key in LR_BOUNDS:  # one that repeats the saved annealer's is none of the group
                    if rules.get(key) == saved[key]:
                        del rules[key]
        else:
            different = [name for name in saved if saved[name] != getattr(annealing, name)]
            if different and not self.use_checkpoint_opt_param_scheduler:
                values = [
                    f"{name} is {saved[name]!r} there and {getattr(annealing, name)!r} here" for name in different
                ]
                raise ValueError(f"the state was saved by another annealer: {'; '.join(values)}")
            annealing = replace(annealing, **saved)
            self._check_exemptions(annealing)
        self._set_step(annealing, num_steps)

    def branch_from(self, step: float, *, decay_steps: float, decay_type: str | None = None) -> OptimizerParamScheduler:
        """The annealer that leaves this one's stable phase at ``step``: the same before, then a decay to ``min_lr``.

        It drives the same optimizer, is at the same count, and takes this one's place.

        Args:
            step: where the decay starts; "WSD" is stable from warm-up to decay, "constant" from the warm-up on.
            decay_steps: length of the decay, >= 1.
            decay_type: as ``lr_wsd_decay_style``; None keeps this annealer's.

        Raises:
            ValueError: ``step`` is outside the stable phase, or there is none.
        """
        annealing = self._annealing.branch_from(step, decay_steps=decay_steps, decay_type=decay_type)
        branch = copy.copy(self)
        branch._rules = copy.deepcopy(self._rules)
        branch._set_step(annealing, self.num_steps)
        return branch

    def _check_exemptions(self, annealing: Annealing) -> None:
        if self._exempts_by_zero and max(annealing.start_wd, annealing.end_wd) > 0:
            raise ValueError(
                "disable_weight_decay_for_1d_params needs an optimizer that is built with weight_decay > 0: with 0 "
                "nothing tells its groups apart, and the annealer's decay would reach all of them"
            )

    def _groups(self) -> list[dict[str, Any]]:
        """The live groups: loading an optimizer's state may replace them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _set_step(self, annealing: Annealing, num_steps: int) -> None:
        self._keep_rules()
        groups = self._groups()
        wd = annealing.weight_decay(num_steps)
        lrs = [_group_lr(annealing, num_steps, group) * float(group.get("lr_mult", 1.0)) for group in groups]
        wds = [wd * float(group[WD_RULE]) for group in groups]
        self._annealing, self.num_steps = annealing, num_steps
        _separate_(groups)
        for group, lr, wd in zip(groups, lrs, wds, strict=True):
            assign_(group, "lr", lr)
            assign_(group, "weight_decay", wd)

    def _keep_rules(self) -> None:
        """Put back what a loaded optimizer state lacks; a group that is new to the annealer gets its rules."""
        for optimizer, known in zip(self._optimizers, self._rules, strict=True):
            known += [self._rules_of(group) for group in optimizer.param_groups[len(known) :]]
        for group, rules in zip(self._groups(), itertools.chain(*self._rules), strict=True):
            if self.override_opt_param_scheduler:
                for key in LR_BOUNDS:
                    group.pop(key, None)
                group.update({key: rules[key] for key in LR_BOUNDS if key in rules})
            if not any(key in group for key in LR_RULE):
                group.update({key: rules[key] for key in LR_RULE if key in rules})
            group.setdefault(WD_RULE, rules[WD_RULE])

    def _rules_of(self, group: Mapping[str, Any]) -> dict[str, float]:
        rules = {WD_RULE: _ratio(_number(group.get("weight_decay")), self._base["weight_decay"])}
        if not any(key in group for key in LR_RULE):
            rules["lr_mult"] = _ratio(_number(group.get("lr")), self._base["lr"])
        return rules | {key: float(group[key]) for key in (*LR_RULE, WD_RULE) if key in group}


def _group_lr(annealing: Annealing, num_steps: int, group: Mapping[str, Any]) -> float:
    return annealing.learning_rate(num_steps, **{key: float(group[key]) for key in LR_BOUNDS if key in group})


def _base(optimizer: Any, first_group: Mapping[str, Any], key: str) -> float | None:
    """What factors are relative to, rounded as the groups hold it."""
    value = first_group.get(key)
    base = optimizer.effective_config().get(key, value) if isinstance(optimizer, OptimizersContainer) else value
    return _number(torch.as_tensor(base, dtype=value.dtype) if isinstance(value, Tensor) else base)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool) else None


def _ratio(value: float | None, base: float | None) -> float:
    return value / base if value is not None and base else 1.0


def _separate_(groups: list[dict[str, Any]]) -> None:
    """Give every lr and decay tensor memory of its own: groups that share one would all get the last value."""
    seen = set()
    for group in groups:
        for key in ("lr", "weight_decay"):
            if isinstance(group.get(key), Tensor):
                if group[key].data_ptr() in seen:
                    group[key] = group[key].clone()
                seen.add(group[key].data_ptr())


def _check_groups(optimizers: list[Any]) -> None:
    if not all(isinstance(getattr(optimizer, "param_groups", None), list) for optimizer in optimizers):
        raise TypeError(f"optimizer must have param_groups, got {type(optimizers[0]).__name__}")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if not groups:
        raise ValueError("optimizer must have at least one group, got none")
    for i, group in enumerate(groups):
        for key in (*LR_RULE, WD_RULE):
            if key in group:
                value = group[key]
                check_real(f"{key} of group {i}", value.item() if isinstance(value, Tensor) else value)
        for key in ("lr", "weight_decay"):
            value = group.get(key)
            if isinstance(value, Tensor) and not (value.numel() == 1 and value.is_floating_point()):
                raise TypeError(f"{key} of group {i} must be a number or a floating-point tensor of one, got {value!r}")
