"""Flat optimizer states: taking them apart, and every check that must pass before one is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_impl.config import check_real, config_hash
from torch_impl.master_weights import LOW_PRECISION
from torch_impl.param_groups import LR_RULE, WD_RULE

# how a step is computed, not what; a container goes on with its own
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
# another value makes another rule
_RULES = ("decoupled_weight_decay", "maximize", "amsgrad", "master_weights", "adam_w_mode", "bias_correction")


def unflatten(flat: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for path, value in flat.items():
        head, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        if head not in parts or not name:
            raise ValueError(f"{path!r} is neither state.<name>.<key> nor param_groups.<name>.<key>")
        parts[head].setdefault(name, {})[key] = value
    return parts["state"], parts["param_groups"]


def check_config(saved: Mapping[str, Any], config: Mapping[str, Any], *, override: bool) -> None:
    """Compare the config that a state was saved under, if it says so, with the one in force.

    Args:
        saved: "config" (JSON) and "config_hash" of the state; none in states of other systems.
        config: the effective config.
        override: differences are wanted, but for the type of the optimizer.
    """
    if not saved:
        return
    try:
        values = json.loads(saved["config"])
        intact = config_hash(values) == saved["config_hash"]
    except (KeyError, TypeError, ValueError):
        intact = False
    if not intact:
        raise ValueError("config and config_hash of the state do not belong together: it is damaged")
    names = ["optimizer_type"] if override else [name for name in values if name in config]
    different = [
        f"{name} is {values[name]!r} there and {config[name]!r} here" for name in names if values[name] != config[name]
    ]
    unknown = sorted(set(values) - set(config))
    if unknown:
        different.append(f"{unknown} unknown here")
    if different:
        raise ValueError(
            f"the state was saved under another config: {'; '.join(different)}; "
            "override=True goes on with the values of this one"
        )


def check_state(name: str, p: Tensor, saved: dict[str, Any], expected: dict[str, Tensor]) -> None:
    """``saved`` is empty, or has what ``expected`` has; the master may be missing."""
    if saved and set(saved) not in (set(expected), set(expected) - {"master_param"}):
        raise ValueError(
            f"{name!r} needs the state {sorted(expected)}, got {sorted(saved)}: another kind of optimizer?"
        )
    for key, value in saved.items():
        found = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (type(value).__name__, ())
        wanted = (expected[key].dtype, tuple(expected[key].shape))
        if found != wanted:
            raise ValueError(f"state.{name}.{key} has {found[0]} {found[1]}, it must have {wanted[0]} {wanted[1]}")
        if key == "step":
            check_count(f"state.{name}.step", value)


def counted_per_group(
    members: list[tuple[str, dict[str, Any], dict[str, Any]]], *, adam_w_mode: bool
) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """One group's states of torch.optim.Adam or AdamW, which count steps per parameter, as counted per group.

    Args:
        members: (name, state, group values) of each parameter; states that count per group come back as they are.
        adam_w_mode: whether decay is decoupled here.

    Raises:
        ValueError: the parameters are at different steps, or the rule was another one.
    """
    steps = {name: state["step"] for name, state, _ in members if "step" in state}
    if not steps:
        return members
    for name, step in steps.items():
        check_count(f"state.{name}.step", step)
    if len({float(step) for step in steps.values()}) > 1:
        counts = {name: int(step) for name, step in steps.items()}
        raise ValueError(f"a group counts its steps once here, its parameters are at different ones there: {counts}")
    step = float(next(iter(steps.values())))
    taken = []
    for name, state, values in members:
        rule = {"decoupled_weight_decay": adam_w_mode, "amsgrad": False, "maximize": False}
        for key, value in rule.items():
            if values.get(key, value) != value:
                raise ValueError(f"the group of {name!r} has {key}={values[key]} in the state, here it is {value}")
        # torch keeps moments in the parameter's dtype: bfloat16 ones become float32 exactly
        state = {key: x.float() if x.dtype in LOW_PRECISION else x for key, x in state.items() if key != "step"}
        taken.append((name, state, {"step": step, **{key: x for key, x in values.items() if key not in rule}}))
    return taken


def check_count(what: str, value: Any) -> None:
    """``value`` is one number that counts steps."""
    if isinstance(value, bool) or not _is_number(value):
        raise ValueError(f"{what} must be one number, got {value!r}")
    if not float(value) >= 0 or not float(value).is_integer():
        raise ValueError(f"{what} must be a whole number >= 0, got {value!r}")


def scheduler_state(state: Any) -> tuple[int, list[Any]]:
    """Count and base lrs of one LambdaLR's state.

    Raises:
        ValueError: it has none, or they are no count and no lrs.
    """
    if not isinstance(state, Mapping) or not {"base_lrs", "last_epoch"} <= set(state):
        raise ValueError(f"no scheduler state, which has base_lrs and last_epoch: {state!r}")
    count, base_lrs = state["last_epoch"], state["base_lrs"]
    check_count("last_epoch", count)
    if not isinstance(base_lrs, (list, tuple)):
        raise ValueError(f"base_lrs must be a list, got {base_lrs!r}")
    for lr in base_lrs:
        if isinstance(lr, bool) or not _is_number(lr) or not 0 <= lr < math.inf:
            raise ValueError(f"base_lrs must be finite and >= 0, got {base_lrs!r}")
    return int(count), list(base_lrs)


def check_group(name: str, saved: dict[str, Any], group: dict[str, Any]) -> None:
    """Hyperparameters that are known here, each of the kind that it has here."""
    unknown = set(saved) - set(group) - {"initial_lr", *LR_RULE, WD_RULE}
    if unknown or "lr" not in saved:
        problem = f"unknown {sorted(unknown)}" if unknown else "no lr"
        raise ValueError(f"the group of {name!r} has {problem} in the state: another kind of optimizer?")
    for key, value in saved.items():
        current = group.get(key, group["lr"])
        if isinstance(current, (Tensor, int, float)) and not isinstance(current, bool):
            if not _is_number(value):
                raise ValueError(f"param_groups.{name}.{key} must be one number, got {value!r}")
        elif isinstance(current, (tuple, list)) != isinstance(value, (tuple, list)):
            raise ValueError(f"param_groups.{name}.{key} must be like {current!r}, got {value!r}")
        if key in ("initial_lr", *LR_RULE, WD_RULE):
            check_real(f"param_groups.{name}.{key}", float(value))
    for rule in _RULES:
        if rule in group and saved.get(rule, group[rule]) != group[rule]:
            raise ValueError(f"the group of {name!r} has {rule}={saved[rule]} in the state, here it is {group[rule]}")


def common_values(members: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The values that all members of a group agree on; they must agree on all."""
    first_name, values = members[0]
    for name, others in members[1:]:
        for key in values.keys() | others.keys():
            if key not in values or key not in others or not _equal(values[key], others[key]):
                raise ValueError(
                    f"{first_name!r} and {name!r} share a group here but not in the state: {key} is "
                    f"{values.get(key)!r} and {others.get(key)!r}; was it saved with other lr_multipliers or decay?"
                )
    return values


def check_separate(loaded: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    """No two groups of one optimizer that differ here, in base lr or decay, are one group in the state."""

    def key(group: dict[str, Any]) -> tuple[float, ...]:
        base = float(group.get("initial_lr", group["lr"])), float(group.get("weight_decay", 0.0))
        # an annealer may have brought all groups to zero
        return *base, *(float(group.get(rule, -1.0)) for rule in (*LR_RULE, WD_RULE))

    for i, (name, group, values) in enumerate(loaded):
        for other, other_group, other_values in loaded[:i]:
            if key(group) != key(other_group) and key(values) == key(other_values):
                raise ValueError(
                    f"{other!r} and {name!r} share a group in the state but not here, with base lr and decay "
                    f"{key(values)[:2]}; was it saved with other lr_multipliers or decay?"
                )


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.numel() == 1)


def _equal(a: Any, b: Any) -> bool:
    """Also NaN and NaN: what is wrong with them is not that they differ."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype
        return alike and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return bool(a == b or (a != a and b != b))
