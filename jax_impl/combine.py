"""Several rules as one transform: each group applies its lr and decay, multi_transform routes by label."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_impl.master_weights import compute_dtype
from jax_impl.tree import leaf_name, map_params, named_leaves

LABEL = re.compile(r"(\d+)\.[a-z]+")  # <group>.<role>


class GroupState(NamedTuple):
    """State of one group.

    Attributes:
        schedule_count: int32, updates done, the argument of the schedule.
        learning_rate: what the next update uses.
        inner: of the direction.
    """

    schedule_count: jax.Array
    learning_rate: jax.Array
    inner: Any


def descend(
    direction: optax.GradientTransformationExtraArgs,
    *,
    lr: float,
    weight_decay: float,
    lr_schedule: optax.Schedule | None = None,
    active: Callable[[str, jax.Array], jax.Array] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Updates of one group: -lr f(count) (direction + weight_decay p).

    Args:
        direction: scales gradients, knows neither lr nor decay.
        lr: base learning rate.
        weight_decay: decoupled decay.
        lr_schedule: f, multiplier of the base lr after ``count`` updates; 1 if None.
        active: None, or a function of (name, gradient) that masks what must neither move nor decay.

    A parameter whose gradient is None gets a zero update. Updates are float32, float64 for float64 parameters.
    """

    def learning_rate(count: jax.Array, dtype: Any) -> jax.Array:
        f = 1.0 if lr_schedule is None else lr_schedule(count)
        return jnp.asarray(lr * f, dtype)

    def init(params: Any) -> GroupState:
        dtypes = [compute_dtype(p) for p in jax.tree.leaves(params)]
        count = jnp.zeros((), jnp.int32)
        return GroupState(count, learning_rate(count, jnp.result_type(jnp.float32, *dtypes)), direction.init(params))

    def update(grads: Any, state: GroupState, params: Any = None, **extra: Any) -> tuple[Any, GroupState]:
        directions, inner = direction.update(grads, state.inner, params, **extra)
        dtype = state.learning_rate.dtype
        lr_now = learning_rate(state.schedule_count, dtype)

        def leaf(name: str, p: jax.Array, g: Any, d: jax.Array) -> tuple[jax.Array]:
            if g is None:
                return (jnp.zeros_like(p, compute_dtype(p)),)
            descent = d + weight_decay * p.astype(d.dtype) if weight_decay else d
            if active is not None:
                descent = jnp.where(active(name, g), descent, 0.0)
            return (-lr_now.astype(d.dtype) * descent,)

        (updates,) = map_params(leaf, 1, params, grads, directions)
        count = optax.safe_increment(state.schedule_count)
        return updates, GroupState(count, learning_rate(count, dtype), inner)

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
        if missing:
            raise ValueError(f"the optimizer was built with parameters that are missing: {sorted(missing)}")
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


def learning_rates(opt_state: Any) -> dict[int, jax.Array]:
    """{group: lr that its next update uses} of any tree that holds the state of one build_optimizer.

    Groups are numbered as in the routing table. Works on wrapped states (chain, nnx.Optimizer) and on restored ones
    whose tuples have become dicts.

    Raises:
        ValueError: no group is found, or the states of several optimizers.
    """
    fields = set(GroupState._fields)

    def is_group(x: Any) -> bool:
        return isinstance(x, GroupState) or (isinstance(x, Mapping) and set(x) == fields)

    rates: dict[int, jax.Array] = {}
    owners: set[str] = set()
    for path, x in jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=is_group)[0]:
        if not is_group(x):
            continue
        owner, _, label = leaf_name(path).rpartition("inner_states.")
        match = LABEL.match(label)
        if match:
            owners.add(owner)
            rate = x.learning_rate if isinstance(x, GroupState) else x["learning_rate"]
            (rates[int(match.group(1))],) = jax.tree.leaves(rate)  # nnx keeps it in a variable
    if len(owners) != 1:
        raise ValueError(f"expected the state of one jax_impl optimizer, found {len(owners)}")
    return dict(sorted(rates.items()))
