"""Trees of arrays in files that are whole or absent, and back into the structure that a run expects."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from jax_impl.config import check_real
from jax_impl.tree import named_leaves

_FORMAT = "jax_impl checkpoint 1"
_MASTER = re.compile(r"(?:.*\.)?inner_states\.\d+\.[a-z]+\.inner_state\.master\..*")


def save_checkpoint(path: str | os.PathLike[str], tree: Any) -> None:
    """Write the leaves of ``tree`` (parameters, optimizer state, counters) under their names, in msgpack.

    Whoever is killed while writing leaves the file at ``path`` as it was: the bytes go to a file beside it, which
    takes its place when they are on the disk.

    Raises:
        TypeError: a leaf that is neither an array nor a number.
    """
    leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(tree).items()}
    for name, leaf in leaves.items():
        if leaf.dtype.kind in "OSU":
            raise TypeError(f"{name!r} must be an array or a number, got dtype {leaf.dtype}")
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


def match(target: Any, saved: Any, *, config_hash: np.ndarray, keep: Collection[str] = ()) -> Any:
    """The leaves of ``saved`` in the structure of ``target``; see OptimizerTransform.restore.

    Args:
        target: arrays, numbers or ``jax.ShapeDtypeStruct``s.
        saved: leaves of the same names, in any containers.
        config_hash: what a leaf of this name must hold where ``target`` has no values.
        keep: last parts of the names of leaves that are taken from ``target``.
    """
    wanted = named_leaves(target)
    given = _without_value(named_leaves(saved), wanted)
    absent = [name for name in wanted if name not in given]
    rebuilt = {name for name in absent if _MASTER.fullmatch(name) and not _is_abstract(wanted[name])}
    missing, unknown = [name for name in absent if name not in rebuilt], [name for name in given if name not in wanted]
    if missing or unknown:
        raise ValueError(f"the state belongs to another tree; missing from it: {missing}, unknown here: {unknown}")
    kept = rebuilt | {name for name in wanted if _last(name) in keep}
    if any(_is_abstract(wanted[name]) for name in kept):
        raise ValueError("override=True takes values from the target: it must come from init, not from eval_shape")
    for name, leaf in wanted.items():
        if name in kept:
            continue
        if _kind(leaf) != _kind(given[name]):
            raise ValueError(f"{name} has {_kind(given[name])}, it must have {_kind(leaf)}")
        if _last(name) in ("base_lr", "base_weight_decay"):
            check_real(name, np.asarray(given[name]).item())
        if _last(name) == "config_hash":
            expected = config_hash if _is_abstract(leaf) else leaf
            if not np.array_equal(np.asarray(expected), np.asarray(given[name])):
                raise ValueError(
                    "the state was saved under another config: compare effective_config() of both runs, or go on with "
                    "the values of this one by override=True"
                )
    leaves = [_copy(leaf, leaf if name in kept else given[name]) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _without_value(given: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """Orbax without a target gives back an nnx variable as ``{"value": array}``; leaf_name leaves that part out."""

    def rename(name: str) -> str:
        short = name.removesuffix(".value")
        return name if name in wanted or short in given else short

    return {rename(name): leaf for name, leaf in given.items()}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _kind(leaf: Any) -> str:
    """dtype and shape as text."""
    dtype = np.dtype(getattr(leaf, "dtype", type(leaf)))
    return f"{dtype} {np.shape(leaf)}"


def _copy(leaf: Any, value: Any) -> Any:
    """``value`` with buffers of its own, placed as ``leaf`` is; a Python number stays one."""
    if isinstance(leaf, (bool, int, float)):
        return type(leaf)(value)
    array = jnp.array(value, leaf.dtype, copy=True)
    sharding = getattr(leaf, "sharding", None)
    return array if sharding is None else jax.device_put(array, sharding)
