"""Adam as fused kernels have it: one step count for a whole group, moments in float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.adam import adam_direction, adam_moments
from jax_impl.config import FusedAdamConfig
from jax_impl.master_weights import compute_dtype
from jax_impl.tree import map_params


class ScaleByFusedAdamState(NamedTuple):
    """``count``: int32, updates of the group; ``mu`` and ``nu``: moments, float32 or wider."""

    count: jax.Array  # type: ignore[assignment]  # optax's name for it, which hides tuple.count
    mu: Any
    nu: Any


def scale_by_fused_adam(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, bias_correction: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction u with one step count t for all parameters: lr, decay and masters are others' business.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        betas: decay rates b1, b2 of the moments, each in [0, 1).
        eps: added to the root of the second moment.
        bias_correction: False: u = m / (sqrt(v) + eps).

    The count advances with every update, whether or not a parameter has a gradient. One whose gradient is None
    keeps its moments and gets a zero direction. Directions and moments are float32, float64 for float64 parameters.
    Under jit with the state donated a leaf is updated in place.

    Raises:
        TypeError, ValueError: a wrong value, see jax_impl.config.

    Source: Kingma and Ba 2015 (arXiv 1412.6980); the count of a group as in the FusedAdam of apex.
    """
    FusedAdamConfig(lr=0.0, betas=betas, eps=eps, bias_correction=bias_correction)

    def init(params: Any) -> ScaleByFusedAdamState:
        def zeros(name: str, p: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.zeros_like(p, compute_dtype(p)), jnp.zeros_like(p, compute_dtype(p))

        mu, nu = map_params(zeros, 2, params)
        return ScaleByFusedAdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        grads: Any, state: ScaleByFusedAdamState, params: Any = None, **extra: Any
    ) -> tuple[Any, ScaleByFusedAdamState]:
        count = optax.safe_increment(state.count)

        def leaf(name: str, mu: jax.Array, g: Any, nu: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            if g is None:
                return jnp.zeros_like(mu), mu, nu
            mu, nu = adam_moments(g.astype(mu.dtype), mu, nu, betas)
            return adam_direction(mu, nu, count if bias_correction else None, betas, eps), mu, nu

        direction, mu, nu = map_params(leaf, 3, state.mu, grads, state.nu)
        return direction, ScaleByFusedAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)
