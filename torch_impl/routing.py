"""Roles: which parameters are orthogonalized as matrices or experts, and which go to AdamW."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

MATRIX, EXPERT, ADAMW, FROZEN = "matrix", "expert", "adamw", "frozen"


class MatrixAxes(NamedTuple):
    """Axes of a parameter that index outputs, inputs and separate matrices; torch always stores (out, in)."""

    fan_out: tuple[int, ...]
    fan_in: tuple[int, ...]
    batch: tuple[int, ...] = ()


class ParameterRoute(NamedTuple):
    """Where one parameter goes.

    Attributes:
        name, shape: of the parameter.
        role: "matrix", "expert", "adamw", "adam" or "frozen".
        group: index of its group, None if frozen.
        lr, weight_decay: base values of the group, before any schedule.
        matrix_axes: for matrices and experts.
        adjusted_lr: lr times the shape adjustment of the matrix rule; equal to lr elsewhere.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    group: int | None
    lr: float | None
    weight_decay: float | None
    matrix_axes: MatrixAxes | None
    adjusted_lr: float | None


class RoutingTable(tuple[ParameterRoute, ...]):
    """One ParameterRoute a parameter, in definition order; ``print`` it before training."""

    def __str__(self) -> str:
        header = ("name", "shape", "role", "group", "lr", "decay", "out x in axes", "adjusted lr")
        rows = [header] + [_cells(route) for route in self]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _cells(route: ParameterRoute) -> tuple[str, ...]:
    axes = route.matrix_axes
    numbers = ["-" if x is None else f"{x:.6g}" for x in (route.lr, route.weight_decay, route.adjusted_lr)]
    return (
        route.name,
        "x".join(map(str, route.shape)) or "scalar",
        route.role,
        "-" if route.group is None else str(route.group),
        numbers[0],
        numbers[1],
        "-" if axes is None else f"{','.join(map(str, axes.fan_out))} x {','.join(map(str, axes.fan_in))}",
        numbers[2],
    )


def parameter_roles(
    module: nn.Module,
    names: Iterable[str],
    *,
    expert_param_keywords: Sequence[str] = (),
    adamw_module_keywords: Sequence[str] = ("lm_head", "embed_out", "output_layer"),
    orthogonalize_skip_patterns: Sequence[str] = (),
) -> dict[str, str]:
    """Role of every parameter in ``names``.

    The weight of an ``nn.Linear`` is a matrix, unless one of the modules that own it has a name that contains an
    ``adamw_module_keywords`` entry, its own name matches an ``orthogonalize_skip_patterns`` regex, or it is also the
    weight of an ``nn.Embedding``. A raw 3-D parameter (E, M, N) whose name contains an ``expert_param_keywords``
    entry is an expert stack. All else is AdamW's.

    Raises:
        ValueError: an expert parameter with four or more dimensions.
    """
    linear_owners: dict[int, list[str]] = {}
    not_raw: set[int] = set()
    embeddings: set[int] = set()
    for module_name, child in module.named_modules():
        weight = child._parameters.get("weight")
        if weight is None:
            continue
        if isinstance(child, nn.Linear):
            linear_owners.setdefault(id(weight), []).append(module_name)
        elif isinstance(child, nn.Embedding):
            embeddings.add(id(weight))
        elif isinstance(child, _ConvNd):
            not_raw.add(id(weight))

    def role(name: str) -> str:
        param = module.get_parameter(name)
        if any(re.search(pattern, name) for pattern in orthogonalize_skip_patterns):
            return ADAMW
        owners = linear_owners.get(id(param))
        if owners is not None:
            is_head = any(keyword in owner for owner in owners for keyword in adamw_module_keywords)
            return ADAMW if is_head or id(param) in embeddings else MATRIX
        if id(param) not in not_raw and any(keyword in name for keyword in expert_param_keywords):
            if param.ndim > 3:
                raise ValueError(f"expert parameter {name!r} must be (E, M, N), got shape {tuple(param.shape)}")
            return EXPERT if param.ndim == 3 else ADAMW
        return ADAMW

    return {name: role(name) for name in names}
