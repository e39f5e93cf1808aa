"""Several rules as one transform: each group applies its lr and decay, multi_transform routes by label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_impl.group_state import GroupState
from jax_impl.master_weights import compute_dtype
from jax_impl.tree import leaf_name, map_params, named_leaves


def descend(
    direction: optax.GradientTransformationExtraArgs,
    *,
    lr: float,
    weight_decay: float,
    factors: Callable[[jax.Array], tuple[Any, Any]] = lambda count: (1.0, 1.0),
    decoupled: bool = True,
    active: Callable[[str, jax.Array], jax.Array] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Updates of one group: -lr f(count) (direction + weight_decay h(count) p), (f, h) = factors.

    Args:
        direction: scales gradients, knows neither lr nor decay.
        lr, weight_decay: base values.
        factors: what multiplies them after ``count`` updates.
        decoupled: False adds the decay to the gradient instead (L2).
        active: None, or a function of (name, gradient) that masks what must neither move nor decay.

    A parameter whose gradient is None gets a zero update. Updates are float32, float64 for float64 parameters.
    lr and decay are part of the state, where they can be read and set.
    """

    def at(count: jax.Array) -> dict[str, jax.Array]:
        values = zip(("lr_factor", "weight_decay_factor"), factors(count), strict=True)
        return {name: jnp.asarray(value, jnp.result_type(float)) for name, value in values}

    def init(params: Any) -> GroupState:
        count = jnp.zeros((), jnp.int32)
        base_lr, base_weight_decay = (jnp.asarray(x, jnp.result_type(float)) for x in (lr, weight_decay))
        inner = direction.init(params)
        return GroupState(count, base_lr=base_lr, base_weight_decay=base_weight_decay, **at(count), inner=inner)

    def update(grads: Any, state: GroupState, params: Any = None, **extra: Any) -> tuple[Any, GroupState]:
        # computed anew, so that a count or a schedule that was changed from outside is in force at once
        now = state._replace(**at(state.schedule_count))

        def penalized(name: str, p: jax.Array, g: Any) -> tuple[Any]:
            dtype = compute_dtype(p)
            return (None if g is None else g.astype(dtype) + now.weight_decay.astype(dtype) * p.astype(dtype),)

        def leaf(name: str, p: jax.Array, g: Any, d: jax.Array) -> tuple[jax.Array]:
            if g is None:
                return (jnp.zeros_like(p, compute_dtype(p)),)
            descent = d + now.weight_decay.astype(d.dtype) * p.astype(d.dtype) if decoupled else d
            if active is not None:
                descent = jnp.where(active(name, g), descent, 0.0)
            return (-now.learning_rate.astype(d.dtype) * descent,)

        if not decoupled:
            (grads,) = map_params(penalized, 1, params, grads)
        directions, inner = direction.update(grads, state.inner, params, **extra)
        (updates,) = map_params(leaf, 1, params, grads, directions)
        count = optax.safe_increment(state.schedule_count)
        return updates, state._replace(schedule_count=count, **at(count), inner=inner)

    return optax.GradientTransformationExtraArgs(init, update)


def freeze() -> optax.GradientTransformationExtraArgs:
    """Exact zero updates, also where the gradient is None; no state."""

    def init(params: Any) -> optax.EmptyState:
        return optax.EmptyState()

    def update(grads: Any, state: optax.EmptyState, params: Any = None, **extra: Any) -> tuple[Any, optax.EmptyState]:
        return jax.tree.map(jnp.zeros_like, params), state

    return optax.GradientTransformationExtraArgs(init, update)


def combine(
    transforms: Mapping[str, optax.GradientTransformationExtraArgs], labels: Mapping[str, str]
) -> optax.GradientTransformationExtraArgs:
    """``optax.multi_transform`` over parameters labelled by name.

    Args:
        transforms: {label: transform}.
        labels: {name of a leaf: label}. Trees given to ``init`` and ``update`` may be of any container types (dicts,
            nnx states, ...) as long as their leaves have these names. A None where a parameter would be is no
            parameter and stays None.

    Raises:
        ValueError: at init and update, if the tree has other leaves, a gradient has another shape than its
            parameter, or ``params`` is missing.
    """
    some_label = next(iter(transforms))

    def label_tree(tree: Any) -> Any:
        def label(path: tuple[Any, ...], leaf: Any) -> str:
            name = leaf_name(path)
            if name not in labels and leaf is not None:
                raise ValueError(f"the optimizer was built without a parameter {name!r}; it has {sorted(labels)}")
            return labels.get(name, some_label)

        return jax.tree_util.tree_map_with_path(label, tree, is_leaf=lambda x: x is None)

    inner = optax.multi_transform(transforms, label_tree)

    def init(params: Any) -> Any:
        missing = set(labels) - set(named_leaves(params))
        # tree_map_params of optax asks for the state of a node that stands for all parameters and has no leaves
        if missing and not type(params).__module__.startswith("optax."):
            raise ValueError(
                f"the optimizer was built with parameters that are missing: {sorted(missing)}; inside optax.masked or "
                "optax.partition, build it from the parameters of that part alone"
            )
        return inner.init(params)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("this optimizer needs the parameters: call update(grads, state, params)")
        shapes = {name: jnp.shape(p) for name, p in named_leaves(params).items()}
        for name, g in named_leaves(grads).items():
            if name in shapes and jnp.shape(g) != shapes[name]:
                raise ValueError(f"the gradient of {name!r} has shape {jnp.shape(g)}, the parameter {shapes[name]}")
        return inner.update(grads, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)
