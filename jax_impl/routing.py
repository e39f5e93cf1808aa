"""Roles: which parameters are orthogonalized as matrices or experts, and which go to AdamW."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jax_impl.tree import leaf_name, named_leaves

MATRIX, EXPERT, ADAMW, FROZEN = "matrix", "expert", "adamw", "frozen"


@dataclass(frozen=True, init=False)
class MatrixAxes:
    """Axes of a leaf that index outputs (its rows), inputs (its columns) and separate matrices.

    A Dense kernel (in, out) is ``MatrixAxes(fan_out=1, fan_in=0)``; a stack of experts (E, out, in) is
    ``MatrixAxes(fan_out=1, fan_in=2, batch=0)``. Several axes may form one side. Without outputs or without inputs
    it is no matrix; ``batch`` still says which axes are a stack of layers: the scales of two layers (2, width) are
    ``MatrixAxes(fan_out=1, fan_in=(), batch=0)``.
    """

    fan_out: tuple[int, ...]
    fan_in: tuple[int, ...]
    batch: tuple[int, ...]

    def __init__(
        self, fan_out: int | Sequence[int], fan_in: int | Sequence[int], batch: int | Sequence[int] = ()
    ) -> None:
        for side, axes in (("fan_out", fan_out), ("fan_in", fan_in), ("batch", batch)):
            object.__setattr__(self, side, (axes,) if isinstance(axes, int) else tuple(axes))

    @property
    def is_matrix(self) -> bool:
        return bool(self.fan_out and self.fan_in)


AxesSpec = Callable[[str, Any], MatrixAxes | None] | Any
"""A function of (name, leaf), a tree of MatrixAxes or None with the shape of the parameters or a prefix of it, or
None for the rule by name."""


class ParameterRoute(NamedTuple):
    """Where one parameter goes.

    Attributes:
        name, shape: of the parameter.
        role: "matrix", "expert", "adamw", "adam", "fusedadam" or "frozen".
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
    """One ParameterRoute a parameter, in the order of the tree; ``print`` it before training."""

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


def axes_by_name(params: Any, matrix_axes: AxesSpec) -> dict[str, MatrixAxes | None]:
    """Matrix axes of every leaf of ``params`` by name.

    Args:
        params: pytree of arrays.
        matrix_axes: see AxesSpec. The rule by name, which None stands for: a 2-D leaf ``kernel`` is (in, out), a
            2-D leaf ``weight`` is (out, in) unless its name contains "embed"; other leaves have none.

    Raises:
        ValueError: axes that do not name every axis of their leaf exactly once.
    """
    leaves = named_leaves(params)
    if matrix_axes is None:
        matrix_axes = _axes_from_name
    if callable(matrix_axes):
        axes = {name: matrix_axes(name, leaf) for name, leaf in leaves.items()}
    else:
        is_leaf = lambda x: x is None or isinstance(x, MatrixAxes)  # noqa: E731
        axes = {}
        treedef: Any
        specs, treedef = jax.tree_util.tree_flatten_with_path(matrix_axes, is_leaf=is_leaf)
        for (path, spec), subtree in zip(specs, treedef.flatten_up_to(params), strict=True):
            for below, _ in jax.tree_util.tree_flatten_with_path(subtree)[0]:
                axes[leaf_name((*path, *below))] = spec
    for name, spec in axes.items():
        if spec is not None and not isinstance(spec, MatrixAxes):
            raise TypeError(f"matrix_axes of {name!r} must be MatrixAxes or None, got {spec!r}")
        if spec is not None and sorted((*spec.fan_out, *spec.fan_in, *spec.batch)) != list(range(leaves[name].ndim)):
            raise ValueError(f"{spec} does not name every axis of {name!r} with shape {leaves[name].shape} once")
    return axes


def _axes_from_name(name: str, leaf: Any) -> MatrixAxes | None:
    kind = name.rpartition(".")[2]
    if leaf.ndim == 2 and kind == "kernel":
        return MatrixAxes(fan_out=(1,), fan_in=(0,))
    if leaf.ndim == 2 and kind == "weight" and "embed" not in name:
        return MatrixAxes(fan_out=(0,), fan_in=(1,))
    return None


def parameter_roles(
    leaves: Mapping[str, Any],
    axes: Mapping[str, MatrixAxes | None],
    *,
    expert_param_keywords: Sequence[str] = (),
    adamw_module_keywords: Sequence[str] = ("lm_head", "embed_out", "output_layer"),
    orthogonalize_skip_patterns: Sequence[str] = (),
) -> dict[str, tuple[str, MatrixAxes | None]]:
    """Role and final matrix axes of every leaf in ``leaves`` ({name: array}).

    A leaf with matrix axes is a matrix, unless its module (its name without the last part) contains an
    ``adamw_module_keywords`` entry or its name matches an ``orthogonalize_skip_patterns`` regex. A 3-D leaf whose
    name contains an ``expert_param_keywords`` entry is a stack of experts, (E, M, N) unless ``axes`` says otherwise.
    All else is AdamW's.

    Raises:
        ValueError: an expert leaf with four or more dimensions.
    """

    def role(name: str, leaf: Any) -> tuple[str, MatrixAxes | None]:
        if any(re.search(pattern, name) for pattern in orthogonalize_skip_patterns):
            return ADAMW, None
        if leaf.ndim >= 3 and any(keyword in name for keyword in expert_param_keywords):
            if leaf.ndim > 3:
                raise ValueError(f"expert parameter {name!r} must be (E, M, N), got shape {leaf.shape}")
            return EXPERT, axes[name] or MatrixAxes(fan_out=(1,), fan_in=(2,), batch=(0,))
        own = axes[name]
        if (
            own is None
            or not own.is_matrix
            or any(keyword in name.rpartition(".")[0] for keyword in adamw_module_keywords)
        ):
            return ADAMW, None
        return MATRIX, own

    return {name: role(name, leaf) for name, leaf in leaves.items()}
