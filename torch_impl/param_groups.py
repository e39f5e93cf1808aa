"""Which parameters are optimized, and which of them share a group.

A name is the path of a parameter below the optimized module, ``layers.0.mlp.up.weight``. Keys are substrings of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# what a group may carry for OptimizerParamScheduler: factors, and bounds of its own
LR_BOUNDS = ("max_lr", "min_lr")
LR_RULE = ("lr_mult", *LR_BOUNDS)
WD_RULE = "wd_mult"


class ParameterGroup(NamedTuple):
    """Parameters with equal base lr and weight decay, in definition order."""

    lr: float
    weight_decay: float
    names: tuple[str, ...]


def optimized_module(model: nn.Module) -> nn.Module:
    """The child named ``net`` if there is one (a sibling ``net_ema`` is left alone), else the model."""
    net = getattr(model, "net", None)
    return net if isinstance(net, nn.Module) else model


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters of the optimized module by name, in definition order; a tied one under its first name."""
    return {name: p for name, p in optimized_module(model).named_parameters() if p.requires_grad}


def select_parameters(names: Iterable[str], keys_to_select: Sequence[str]) -> list[str]:
    """Names that contain any key; all of them if there are no keys.

    Raises:
        ValueError: nothing is selected.
    """
    names = list(names)
    selected = [name for name in names if not keys_to_select or any(key in name for key in keys_to_select)]
    if not selected:
        raise ValueError(
            f"keys_to_select={list(keys_to_select)} selects none of the {len(names)} trainable parameters"
            + (f", of which the first is {names[0]!r}" if names else "")
        )
    return selected


def lr_multiplier(name: str, lr_multipliers: Mapping[str, float]) -> float:
    """Value of the first entry, in insertion order, whose key is a substring of ``name``; else 1."""
    return next((multiplier for key, multiplier in lr_multipliers.items() if key in name), 1.0)


def group_parameters(
    dims: Mapping[str, int],
    *,
    lr: float,
    weight_decay: float,
    lr_multipliers: Mapping[str, float],
    disable_weight_decay_for_1d_params: bool,
) -> list[ParameterGroup]:
    """Groups of equal (lr, weight decay), ordered by them, for parameters given as {name: number of dimensions}."""
    members: dict[tuple[float, float], list[str]] = {}
    for name, ndim in dims.items():
        decay = 0.0 if disable_weight_decay_for_1d_params and ndim < 2 else weight_decay
        members.setdefault((lr * lr_multiplier(name, lr_multipliers), decay), []).append(name)
    return [ParameterGroup(*key, tuple(names)) for key, names in sorted(members.items())]


def assign_(group: dict[str, Any], key: str, value: Any) -> None:
    """Set ``group[key]``: a tensor is filled, so that whoever holds it sees the value; a number stays a number."""
    current = group.get(key)
    if isinstance(current, Tensor):
        current.copy_(torch.as_tensor(value, dtype=current.dtype).reshape(current.shape))
    elif isinstance(value, Tensor):
        group[key] = value.item() if isinstance(current, (int, float)) else value.clone()
    else:
        group[key] = copy.deepcopy(value)
