"""Names of pytree leaves, and maps over parameters whose gradients may be None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def leaf_name(path: tuple[Any, ...]) -> str:
    """A key path joined by dots, ``layers.0.mlp.kernel``; the ``.value`` of an nnx variable is not part of it."""
    if path and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return ".".join(_key(key) for key in path)


def _key(key: Any) -> str:
    match key:
        case DictKey(key=name) | FlattenedIndexKey(key=name) | GetAttrKey(name=name) | SequenceKey(idx=name):
            return str(name)
    return str(key)


def named_leaves(tree: Any) -> dict[str, Any]:
    """{name: leaf} in the order in which JAX flattens ``tree``; a None is no leaf.

    Raises:
        ValueError: two leaves have one name, such as ``{"a.b": x, "a": {"b": y}}``.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = leaf_name(path)
        if name in leaves:
            raise ValueError(f"two parameters are called {name!r}")
        leaves[name] = leaf
    return leaves


def map_params(fn: Callable[..., tuple[Any, ...]], outputs: int, params: Any, *trees: Any) -> tuple[Any, ...]:
    """``fn(name, param, *leaves)`` for every parameter; its results as ``outputs`` trees of the shape of ``params``.

    Where a parameter has no gradient its leaf in a gradient tree is None, and ``fn`` is given that None.
    """
    treedef: Any
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    columns = [treedef.flatten_up_to(tree) for tree in trees]
    rows = [fn(leaf_name(path), leaf, *(column[i] for column in columns)) for i, (path, leaf) in enumerate(paths)]
    return tuple(treedef.unflatten([row[k] for row in rows]) for k in range(outputs))
