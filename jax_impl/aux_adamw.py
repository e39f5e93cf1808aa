"""The AdamW side of Muon and its relatives: Adam with one step count for the whole group."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.adam import adam_direction, adam_moments
from jax_impl.master_weights import compute_dtype
from jax_impl.tree import map_params


class ScaleByGroupAdamState(NamedTuple):
    """``count``: int32, updates of the group; ``mu`` and ``nu``: moments, float32 or wider."""

    count: jax.Array  # type: ignore[assignment]  # optax's name for it, which hides tuple.count
    mu: Any
    nu: Any


def scale_by_group_adam(
    *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction with the bias correction of the group's step count, as fused implementations have it.

    The count advances with every update, whether or not a parameter has a gradient. One whose gradient is None
    keeps its moments and gets a zero direction.
    """

    def init(params: Any) -> ScaleByGroupAdamState:
        def zeros(name: str, p: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.zeros_like(p, compute_dtype(p)), jnp.zeros_like(p, compute_dtype(p))

        mu, nu = map_params(zeros, 2, params)
        return ScaleByGroupAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        grads: Any, state: ScaleByGroupAdamState, params: Any = None, **extra: Any
    ) -> tuple[Any, ScaleByGroupAdamState]:
        count = optax.safe_increment(state.count)

        def leaf(name: str, p: jax.Array, g: Any, mu: jax.Array, nu: jax.Array) -> tuple[Any, ...]:
            if g is None:
                return jnp.zeros_like(mu), mu, nu
            mu, nu = adam_moments(g.astype(mu.dtype), mu, nu, betas)
            return adam_direction(mu, nu, count, betas, eps), mu, nu

        direction, mu, nu = map_params(leaf, 3, params, grads, state.mu, state.nu)
        return direction, ScaleByGroupAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)
