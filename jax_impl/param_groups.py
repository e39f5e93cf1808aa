"""Which parameters are optimized, and which of them share a group.

A name is the path of a leaf in the parameter tree joined by dots, ``layers.0.mlp.up.kernel``. Keys are substrings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class ParameterGroup(NamedTuple):
    """Parameters with equal base lr and weight decay, in the order of the tree."""

    lr: float
    weight_decay: float
    names: tuple[str, ...]


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
    """Groups of equal (lr, weight decay), ordered by them, for parameters given as {name: dimensions of one layer}."""
    members: dict[tuple[float, float], list[str]] = {}
    for name, ndim in dims.items():
        decay = 0.0 if disable_weight_decay_for_1d_params and ndim < 2 else weight_decay
        members.setdefault((lr * lr_multiplier(name, lr_multipliers), decay), []).append(name)
    return [ParameterGroup(*key, tuple(names)) for key, names in sorted(members.items())]
