"""The momentum recurrence of Muon, on whole matrices and on stacks of experts.

M = mu M + g            (a sum, not an average; no bias correction)
G = g + mu M  if nesterov else  M
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def active_slices(grad: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Which experts of ``grad`` saw a token: False where a whole slice is zero.

    Args:
        grad: any shape; ``batch`` are the axes that number its matrices.

    Returns:
        bool, the shape of ``grad`` with every axis outside ``batch`` reduced to 1.
    """
    inner = tuple(axis for axis in range(grad.ndim) if axis not in batch)
    return jnp.any(grad != 0, axis=inner, keepdims=True)


def update_momentum(mu: jax.Array, grad: jax.Array, muon_momentum: float, active: jax.Array | None) -> jax.Array:
    """M = mu M + g; with ``active`` (see active_slices) idle slices keep their momentum."""
    updated = muon_momentum * mu + grad
    return updated if active is None else jnp.where(active, updated, mu)


def descent_direction(mu: jax.Array, grad: jax.Array, muon_momentum: float, nesterov: bool) -> jax.Array:
    """G, the matrix that is orthogonalized."""
    return grad + muon_momentum * mu if nesterov else mu
