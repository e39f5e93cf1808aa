"""float32 masters of low-precision parameters: updates accumulate there, the parameter is the rounded master."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.tree import map_params

LOW_PRECISION = (jnp.bfloat16, jnp.float16)


def compute_dtype(param: jax.Array) -> Any:
    """Dtype of moments, masters and arithmetic: float64 for float64 parameters, float32 for all others."""
    return jnp.promote_types(param.dtype, jnp.float32)


class MasterWeightsState(NamedTuple):
    """``master``: float32 for low-precision parameters, None for others (it would be the same bits)."""

    master: Any
    inner: Any


def keep_master_weights(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Let ``inner`` work on float32 masters instead of low-precision parameters.

    The update that is returned is the float32 difference for which ``optax.apply_updates`` lands on the rounded
    master. Elements of a parameter that are no longer the rounded master were changed from outside (weights
    loaded, an average swapped in): they win.
    """

    def init(params: Any) -> MasterWeightsState:
        def start(name: str, p: jax.Array) -> tuple[Any, jax.Array]:
            # a copy: donated buffers must not be shared with the parameters
            return (jnp.array(p, jnp.float32) if p.dtype in LOW_PRECISION else None, p.astype(compute_dtype(p)))

        master, working = map_params(start, 2, params)
        return MasterWeightsState(master, inner.init(working))

    def update(
        grads: Any, state: MasterWeightsState, params: Any = None, **extra: Any
    ) -> tuple[Any, MasterWeightsState]:
        def current(name: str, p: jax.Array, master: jax.Array | None) -> tuple[jax.Array]:
            if master is None:
                return (p,)
            return (jnp.where(master.astype(p.dtype) == p, master, p.astype(jnp.float32)),)

        (working,) = map_params(current, 1, params, state.master)
        updates, inner_state = inner.update(grads, state.inner, working, **extra)

        def land(name: str, p: jax.Array, g: Any, w: jax.Array, u: jax.Array, master: Any) -> tuple[Any, Any]:
            if master is None:
                return u, None
            if g is None:
                return u, w
            updated = w + u
            return updated.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32), updated

        updates, master = map_params(land, 2, params, grads, working, updates, state.master)
        return updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
