"""Muon: momentum, orthogonalized, for matrices; the rest of a model goes to AdamW (see build.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.config import MuonConfig
from jax_impl.master_weights import compute_dtype
from jax_impl.momentum import active_slices, descent_direction, update_momentum
from jax_impl.newton_schulz import Triple, newton_schulz
from jax_impl.routing import AxesSpec, MatrixAxes, axes_by_name
from jax_impl.tree import map_params


class ScaleByMuonState(NamedTuple):
    """``mu``: momentum of every matrix, float32 or wider, in the layout of the parameters."""

    mu: Any


def adjusted_lr_scale(shape: Sequence[int], axes: MatrixAxes, muon_lr_scale: float) -> float:
    """``muon_lr_scale * sqrt(max(fan_out, fan_in))`` of one whole matrix.

    Source: Liu et al. 2025, Muon is Scalable for LLM Training (the update RMS of AdamW for every shape).
    """
    fans = [math.prod(shape[axis] for axis in group) for group in (axes.fan_out, axes.fan_in)]
    return muon_lr_scale * math.sqrt(max(fans))


def orthogonalize(x: jax.Array, axes: MatrixAxes, **options: Any) -> jax.Array:
    """newton_schulz of every matrix of ``x``, whichever axes hold its rows and columns.

    Of fan_out and fan_in the one that is stored first becomes the rows. Newton-Schulz commutes with transposition,
    so an (in, out) kernel needs no copy.
    """
    sides = sorted((axes.fan_out, axes.fan_in))
    order = (*axes.batch, *sides[0], *sides[1])
    permuted = x.transpose(order)
    rows, columns = (math.prod(x.shape[axis] for axis in side) for side in sides)
    matrices = permuted.reshape(*(x.shape[axis] for axis in axes.batch), rows, columns)
    result = newton_schulz(matrices, **options).reshape(permuted.shape)
    return result.transpose([order.index(axis) for axis in range(x.ndim)])


def scale_by_muon(
    *,
    muon_momentum: float = 0.95,
    muon_lr_scale: float = 0.2,
    ns_steps: int = 5,
    ns_dtype: str = "bfloat16",
    ns_coefficients: str | Sequence[Triple] = "jordan",
    nesterov: bool = True,
    matrix_axes: AxesSpec = None,
    experts: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Muon's direction: muon_lr_scale sqrt(max(fan_out, fan_in)) NS(G).

        M = mu M + g;  G = g + mu M (nesterov) or M

    Args:
        muon_momentum: mu in [0, 1).
        muon_lr_scale: factor of the shape adjustment.
        ns_steps, ns_dtype, ns_coefficients: see newton_schulz.
        nesterov: orthogonalize g + mu M instead of M.
        matrix_axes: which axes of a leaf are outputs and inputs; see routing.axes_by_name.
        experts: leaves are stacks of experts, whose idle slices (gradient exactly zero) keep their momentum and
            get a zero direction.

    A leaf whose gradient is None keeps its momentum and gets a zero direction.

    Raises:
        TypeError, ValueError: a wrong value, see jax_impl.config; at init, if a leaf has no matrix axes.

    Source: Jordan et al. 2024; shape adjustment of Liu et al. 2025 (arXiv 2502.16982).
    """
    MuonConfig(
        lr=0.0,
        muon_momentum=muon_momentum,
        muon_lr_scale=muon_lr_scale,
        ns_steps=ns_steps,
        ns_dtype=ns_dtype,
        ns_coefficients=ns_coefficients,
        nesterov=nesterov,
    )

    def init(params: Any) -> ScaleByMuonState:
        axes = axes_by_name(params, matrix_axes)
        without = [name for name, own in axes.items() if own is None or not own.is_matrix]
        if without:
            raise ValueError(f"scale_by_muon takes matrices only; no matrix axes for {without}")
        return ScaleByMuonState(jax.tree.map(lambda p: jnp.zeros_like(p, compute_dtype(p)), params))

    def update(grads: Any, state: ScaleByMuonState, params: Any = None, **extra: Any) -> tuple[Any, ScaleByMuonState]:
        tree = state.mu if params is None else params
        axes = axes_by_name(tree, matrix_axes)

        def leaf(name: str, p: jax.Array, g: Any, mu: jax.Array) -> tuple[jax.Array, jax.Array]:
            if g is None:
                return jnp.zeros_like(mu), mu
            leaf_axes = axes[name]
            assert leaf_axes is not None
            g = g.astype(mu.dtype)
            active = active_slices(g, leaf_axes.batch) if experts else None
            mu = update_momentum(mu, g, muon_momentum, active)
            direction = descent_direction(mu, g, muon_momentum, nesterov)
            update = orthogonalize(
                direction, leaf_axes, ns_steps=ns_steps, ns_dtype=ns_dtype, ns_coefficients=ns_coefficients
            )
            update = update.astype(mu.dtype) * adjusted_lr_scale(p.shape, leaf_axes, muon_lr_scale)
            return (update if active is None else jnp.where(active, update, 0.0)), mu

        direction, mu = map_params(leaf, 2, tree, grads, state.mu)
        return direction, ScaleByMuonState(mu)

    return optax.GradientTransformationExtraArgs(init, update)
