"""Adam with a step count per parameter, the recurrence of ``torch.optim.Adam`` and ``AdamW``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.master_weights import compute_dtype
from jax_impl.tree import map_params


class ScaleByAdamState(NamedTuple):
    """``count``: int32 per parameter; ``mu`` and ``nu``: first and second moments in the parameter's dtype."""

    count: Any
    mu: Any
    nu: Any


def adam_moments(
    grad: jax.Array, mu: jax.Array, nu: jax.Array, betas: tuple[float, float]
) -> tuple[jax.Array, jax.Array]:
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2."""
    b1, b2 = betas
    return b1 * mu + (1 - b1) * grad, b2 * nu + (1 - b2) * jnp.square(grad)


def adam_direction(
    mu: jax.Array, nu: jax.Array, count: jax.Array | None, betas: tuple[float, float], eps: float
) -> jax.Array:
    """u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps), t = ``count`` (1-based), eps outside the root.

    Without a count nothing is corrected: u = m / (sqrt(v) + eps).
    """
    if count is not None:
        t = count.astype(mu.dtype)
        mu, nu = mu / _bias_correction(betas[0], t), nu / _bias_correction(betas[1], t)
    return mu / (jnp.sqrt(nu) + eps)


def _bias_correction(beta: float, t: jax.Array) -> jax.Array:
    """1 - beta^t; by expm1, as the difference itself loses four of float32's seven digits at beta = 0.999, t = 1."""
    return jnp.ones_like(t) if beta == 0 else -jnp.expm1(t * math.log(beta))


def scale_by_adam(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction u, with the bias correction of each parameter's own step count.

    Args:
        betas: decay rates of the moments.
        eps: added to the root of the corrected second moment.

    A parameter whose gradient is None keeps its state and gets a zero direction. Moments have the parameter's
    dtype, the arithmetic is float32 or wider.
    """

    def init(params: Any) -> ScaleByAdamState:
        count = jax.tree.map(lambda p: jnp.zeros((), jnp.int32), params)
        return ScaleByAdamState(count, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: ScaleByAdamState, params: Any = None, **extra: Any) -> tuple[Any, ScaleByAdamState]:
        def leaf(name: str, p: jax.Array, g: Any, count: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[Any, ...]:
            dtype = compute_dtype(p)
            if g is None:
                return jnp.zeros_like(p, dtype), count, mu, nu
            g = g.astype(dtype)
            count = optax.safe_increment(count)
            m, v = adam_moments(g, mu.astype(dtype), nu.astype(dtype), betas)
            return adam_direction(m, v, count, betas, eps), count, m.astype(mu.dtype), v.astype(nu.dtype)

        direction, count, mu, nu = map_params(leaf, 4, params, grads, state.count, state.mu, state.nu)
        return direction, ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)
