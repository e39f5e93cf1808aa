"""What one group of parameters carries from update to update, and how to read and set it in any opt_state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.tree import leaf_name

# <anything around it> inner_states.<group>.<role>.inner_state.[inner. (masters)]<field>
_GROUP = re.compile(r"inner_states\.\d+\.")
_IN_GROUP = r"(?:.*\.)?inner_states\.\d+\.[a-z]+\.inner_state\."
_COUNT = re.compile(_IN_GROUP + r"(?:inner\.)+count(?:\..*)?")
_MASTER = re.compile(_IN_GROUP + r"master\..*")
_FIELD = re.compile(
    r"(?P<owner>.*?)inner_states\.(?P<group>\d+)\.[a-z]+\.inner_state\.(?:inner\.)?"
    r"(?P<field>schedule_count|base_lr|lr_factor|base_weight_decay|weight_decay_factor)"
)


def field_of(name: str) -> str | None:
    """The field of GroupState that a leaf of this name holds, if it is one."""
    match = _FIELD.fullmatch(name)
    return match["field"] if match else None


def is_count(name: str) -> bool:
    """Whether a leaf of this name counts updates: those of the schedules, or of a bias correction."""
    return field_of(name) == "schedule_count" or _COUNT.fullmatch(name) is not None


def is_master(name: str) -> bool:
    """Whether a leaf of this name is a float32 master."""
    return _MASTER.fullmatch(name) is not None


def without_group(name: str) -> str:
    """``name`` without the number of its group."""
    return _GROUP.sub("inner_states.", name)


def hashes_of(names: Iterable[str]) -> set[str]:
    """The names of the config hashes that stand beside the groups among ``names``."""
    owners = {match["owner"] for name in names if (match := _FIELD.fullmatch(name))}
    return {owner.removesuffix("inner.") + "config_hash" for owner in owners}


class GroupState(NamedTuple):
    """State of one group.

    Attributes:
        schedule_count: int32, updates done, the argument of the schedules.
        base_lr, base_weight_decay: what the schedules multiply.
        lr_factor, weight_decay_factor: the schedules at ``schedule_count``.
        inner: of the direction.
    """

    schedule_count: jax.Array
    base_lr: jax.Array
    lr_factor: jax.Array
    base_weight_decay: jax.Array
    weight_decay_factor: jax.Array
    inner: Any

    @property
    def learning_rate(self) -> jax.Array:
        """What the next update uses, before it is rounded to the dtype of the arithmetic."""
        return self.base_lr * self.lr_factor

    @property
    def weight_decay(self) -> jax.Array:
        """Likewise."""
        return self.base_weight_decay * self.weight_decay_factor


class Hyperparameters(NamedTuple):
    """A group: updates done, what the schedules multiply, and the lr and decay that the next update uses."""

    step: jax.Array
    base_lr: jax.Array
    learning_rate: jax.Array
    base_weight_decay: jax.Array
    weight_decay: jax.Array


def hyperparameters(opt_state: Any) -> dict[int, Hyperparameters]:
    """{group: Hyperparameters} of any tree that holds the state of one build_optimizer.

    Groups are numbered as in the routing table. Works on wrapped states (chain, MultiSteps, nnx.Optimizer) and on
    restored ones whose tuples have become dicts.

    Raises:
        ValueError: no group is found, or the states of several optimizers.
    """
    groups: dict[int, dict[str, Any]] = {}
    for match, leaf in _fields(opt_state):
        groups.setdefault(int(match["group"]), {})[match["field"]] = leaf
    states = {group: GroupState(**fields, inner=None) for group, fields in sorted(groups.items())}
    return {
        group: Hyperparameters(s.schedule_count, s.base_lr, s.learning_rate, s.base_weight_decay, s.weight_decay)
        for group, s in states.items()
    }


def learning_rates(opt_state: Any) -> dict[int, jax.Array]:
    """{group: lr that its next update uses}; see hyperparameters."""
    return {group: values.learning_rate for group, values in hyperparameters(opt_state).items()}


def set_fields(opt_state: Any, values: Mapping[str, Mapping[int, Any] | Any]) -> Any:
    """``opt_state`` with fields of its groups replaced; dtypes, shapes and devices stay, so nothing is traced anew.

    Args:
        opt_state: any tree that holds the state of one build_optimizer.
        values: {field of GroupState: a number for all groups, or {group: number}}.

    Raises:
        ValueError: a group that does not exist; no or several optimizers.
    """
    groups = {int(match["group"]) for match, _ in _fields(opt_state)}
    for field, value in values.items():
        unknown = set(value) - groups if isinstance(value, Mapping) else set()
        if unknown:
            raise ValueError(f"{field}: there is no group {sorted(unknown)}, only {sorted(groups)}")

    def replace(path: tuple[Any, ...], leaf: Any) -> Any:
        match = _FIELD.fullmatch(leaf_name(path))
        if match is None or match["field"] not in values:
            return leaf
        value = values[match["field"]]
        if isinstance(value, Mapping):
            if int(match["group"]) not in value:
                return leaf
            value = value[int(match["group"])]
        return like(leaf, value)

    return jax.tree_util.tree_map_with_path(replace, opt_state)


def like(leaf: Any, value: Any) -> Any:
    """``value`` as an array of its own, with the dtype and the device or sharding of ``leaf``."""
    array = np.array(np.broadcast_to(value, np.shape(leaf)), leaf.dtype)
    return jax.device_put(array, leaf.sharding) if isinstance(leaf, jax.Array) else jnp.asarray(array)


def _fields(opt_state: Any) -> Iterator[tuple[re.Match[str], Any]]:
    found = [
        (match, leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(opt_state)[0]
        if (match := _FIELD.fullmatch(leaf_name(path)))
    ]
    owners = {match["owner"] for match, _ in found}
    if len(owners) != 1:
        raise ValueError(f"expected the state of one jax_impl optimizer, found {len(owners)}")
    return iter(found)
