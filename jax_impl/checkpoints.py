"""Trees of arrays in files that are whole or absent, and back into the structure that a run expects."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from jax_impl.config import check_real
from jax_impl.group_state import field_of, hashes_of, is_count, is_master, without_group
from jax_impl.tree import named_leaves

_FORMAT = "jax_impl checkpoint 1"
_HYPERPARAMETERS = ("base_lr", "base_weight_decay", "lr_factor", "weight_decay_factor")


def save_checkpoint(path: str | os.PathLike[str], tree: Any) -> None:
    """Write the leaves of ``tree`` (parameters, optimizer state, counters) under their names, in msgpack.

    Whoever is killed while writing leaves the file at ``path`` as it was: the bytes go to a file beside it, which
    takes its place when they are on the disk.

    Raises:
        TypeError: a leaf that is neither an array nor a number.
    """
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}
    for name, leaf in leaves.items():
        if leaf.dtype.kind in "OSU" or leaf.dtype.names is not None:
            raise TypeError(f"{name!r} must be an array or a number, got dtype {leaf.dtype}")
        if not leaf.dtype.isnative:  # the format has no byte order
            leaves[name] = leaf.astype(leaf.dtype.newbyteorder("="))
    data = serialization.msgpack_serialize({"format": _FORMAT, "leaves": leaves})
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """{name: array} of a file that save_checkpoint wrote; ``OptimizerTransform.restore`` gives them their structure.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, or another kind of file.
    """
    data = Path(path).read_bytes()
    try:
        content = serialization.msgpack_restore(data)
    except Exception as error:  # msgpack raises what its C code happens to meet
        raise ValueError(f"{os.fspath(path)!r} is truncated or no checkpoint: {error}") from error
    if not isinstance(content, dict) or content.keys() != {"format", "leaves"} or content["format"] != _FORMAT:
        raise ValueError(f"{os.fspath(path)!r} was not written by save_checkpoint")
    return content["leaves"]


def match(target: Any, saved: Any, *, config_hash: np.ndarray, override: bool) -> Any:
    """The leaves of ``saved`` in the structure of ``target``; see OptimizerTransform.restore.

    Args:
        target: arrays, numbers or ``jax.ShapeDtypeStruct``s.
        saved: leaves of the same names, in any containers.
        config_hash: what the hash must be where ``target`` has no values.
        override: keep hash, lr and decay of ``target``; parameters may have moved to groups of other numbers.
    """
    wanted = named_leaves(target)
    given = _without_value(named_leaves(saved), wanted)
    hashes = hashes_of(wanted)
    kept = {name for name in wanted if override and (name in hashes or field_of(name) in _HYPERPARAMETERS)}
    if override:
        given = _regrouped(given, wanted, kept)
    absent = [name for name in wanted if name not in given]
    rebuilt = {name for name in absent if is_master(name) and not _is_abstract(wanted[name])}
    missing, unknown = [name for name in absent if name not in rebuilt], [name for name in given if name not in wanted]
    if missing or unknown:
        raise ValueError(f"the state belongs to another tree; missing from it: {missing}, unknown here: {unknown}")
    kept |= rebuilt
    if any(_is_abstract(wanted[name]) for name in kept):
        raise ValueError("override=True takes values from the target: it must come from init, not from eval_shape")
    for name, leaf in wanted.items():
        if name in kept:
            continue
        value = given[name]
        if _kind(value, leaf) != _kind(leaf, leaf):
            raise ValueError(f"{name} has {_kind(value, leaf)}, it must have {_kind(leaf, leaf)}")
        _check_range(name, value)
        if name in hashes:
            expected = np.broadcast_to(config_hash, np.shape(leaf)) if _is_abstract(leaf) else leaf
            if not np.array_equal(np.asarray(expected), np.asarray(value)):
                raise ValueError(
                    "the state was saved under another config: compare effective_config() of both runs, or go on with "
                    "the values of this one by override=True"
                )
    leaves = [_copy(leaf, leaf if name in kept else given[name]) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _regrouped(given: Mapping[str, Any], wanted: Collection[str], kept: Collection[str]) -> dict[str, Any]:
    """``given`` under the names that its parameters have among ``wanted``, whatever the numbers of their groups.

    Raises:
        ValueError: a value that groups share, such as a count, differs between the groups that were saved.
    """
    by_role: dict[str, list[Any]] = {}
    for name, leaf in given.items():
        by_role.setdefault(without_group(name), []).append(leaf)
    found = {}
    for name in wanted:
        leaves = by_role.get(without_group(name), [])
        if name not in kept and any(not np.array_equal(leaves[0], leaf) for leaf in leaves[1:]):
            raise ValueError(f"{name}: the groups of the state have different values, {[str(leaf) for leaf in leaves]}")
        if leaves:
            found[name] = leaves[0]
    roles = {without_group(name) for name in wanted}
    return found | {name: leaf for name, leaf in given.items() if without_group(name) not in roles}


def _check_range(name: str, value: Any) -> None:
    """Raise ValueError for a count, lr or decay that no run has."""
    field = field_of(name)
    if field in ("base_lr", "base_weight_decay"):
        for number in np.ravel(value):
            check_real(name, number)
    elif field in ("lr_factor", "weight_decay_factor") and not np.all(np.isfinite(value)):
        raise ValueError(f"{name} must be finite, got {value}")
    elif is_count(name) and np.any(np.asarray(value) < 0):
        raise ValueError(f"{name} must be >= 0, got {value}")


def _without_value(given: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """Orbax without a target gives back an nnx variable as ``{"value": array}``; leaf_name leaves that part out."""

    def rename(name: str) -> str:
        short = name.removesuffix(".value")
        return name if name in wanted or short in given else short

    return {rename(name): leaf for name, leaf in given.items()}


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _kind(value: Any, leaf: Any) -> str:
    """dtype and shape as text; where ``leaf`` is a Python number, which takes any width, the kind of number."""
    dtype = np.dtype(getattr(value, "dtype", type(value)))
    width = {"b": "bool", "i": "int", "u": "int", "f": "float"}.get(dtype.kind, str(dtype))
    return f"{width if isinstance(leaf, (bool, int, float)) else dtype} {np.shape(value)}"


def _copy(leaf: Any, value: Any) -> Any:
    """``value`` with buffers of its own, placed as ``leaf`` is; a Python number stays one."""
    if isinstance(leaf, (bool, int, float)):
        return type(leaf)(value)
    array = jnp.array(value, leaf.dtype, copy=True)
    sharding = getattr(leaf, "sharding", None)
    return array if sharding is None else jax.device_put(array, sharding)
