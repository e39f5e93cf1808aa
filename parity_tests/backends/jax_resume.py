"""Trainings of jax_impl that are saved and loaded in every format and order; see parity_tests.resume."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx, serialization
from flax.training.train_state import TrainState

import jax_impl
from jax_impl.config import CONFIGS
from jax_impl.tree import leaf_name, named_leaves
from parity_tests.resume import SCHEDULE, K, keywords

SHAPES = {
    "embed": {"embedding": (5, 4)},
    "fc": {"kernel": (4, 6), "bias": (6,), "experts": (2, 4, 3)},
    "head": {"kernel": (6, 4), "bias": (4,)},
}
WITHOUT_GRADIENT = "head.bias"  # at every step, so that the structure of the gradients stays
Trees = dict[str, Any]


def build(optimizer_type: str, params: Any) -> jax_impl.OptimizerTransform:
    schedule = jax_impl.build_lr_schedule("wsd", **SCHEDULE)
    return jax_impl.build_optimizer(params, optimizer_type, lr_schedule=schedule, **keywords(optimizer_type))


def random_params(seed: int, dtype: str) -> Any:
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), dtype), SHAPES, is_leaf=is_shape)


def gradients(step: int, dtype: str) -> Any:
    def without(path: tuple[Any, ...], g: Any) -> Any:
        return None if leaf_name(path) == WITHOUT_GRADIENT else g

    return jax.tree_util.tree_map_with_path(without, random_params(100 + step, dtype))


class Dict:
    """Parameters and state side by side."""

    ORDERS = (
        "transform, params, opt_state",
        "transform, opt_state, params",
        "params, transform, opt_state",
        "shapes, transform, opt_state, params",
    )
    NO_FORMATS = ()

    @staticmethod
    def trees(transform: Any, params: Any) -> Trees:
        return {"params": params, "opt_state": transform.init(params)}

    @staticmethod
    def update(transform: Any, trees: Trees, grads: Any) -> Trees:
        updates, opt_state = transform.update(grads, trees["opt_state"], trees["params"])
        return {"params": optax.apply_updates(trees["params"], updates), "opt_state": opt_state}


class Linen:
    """A TrainState; its transform is part of its structure, so a program has one."""

    ORDERS = ("train_state", "shapes, train_state")
    NO_FORMATS = ()

    @staticmethod
    def trees(transform: Any, params: Any) -> Trees:
        state = TrainState.create(apply_fn=None, params=params, tx=transform)
        return {"train_state": state.replace(step=jnp.zeros((), jnp.int32))}

    @staticmethod
    def update(transform: Any, trees: Trees, grads: Any) -> Trees:
        return {"train_state": trees["train_state"].apply_gradients(grads=grads)}


class Model(nnx.Module):
    """The parameters as an nnx module of the same names."""

    def __init__(self, params: Any) -> None:
        for name, leaves in params.items():
            module = nnx.Module()
            for leaf, value in leaves.items():
                setattr(module, leaf, nnx.Param(value))
            setattr(self, name, module)


class Nnx:
    """The state of a module and its nnx.Optimizer; likewise."""

    ORDERS = ("state", "shapes, state")
    NO_FORMATS = ("flax bytes",)  # from_bytes fills no nnx.State

    @staticmethod
    def _split(transform: Any, params: Any) -> Any:
        model = Model(params)
        return nnx.split((model, nnx.Optimizer(model, transform, wrt=nnx.Param)))

    @staticmethod
    def trees(transform: Any, params: Any) -> Trees:
        return {"state": Nnx._split(transform, params)[1]}

    @staticmethod
    def update(transform: Any, trees: Trees, grads: Any) -> Trees:
        graphdef, _ = Nnx._split(transform, random_params(0, "float32"))
        model, optimizer = nnx.merge(graphdef, trees["state"])
        optimizer.update(model, nnx.state(Model(grads), nnx.Param))
        return {"state": nnx.state((model, optimizer))}


DTYPES = ("float32", "bfloat16")
ROWS: dict[str, tuple[str, str, Any]] = {f"{t} {dtype}": (t, dtype, Dict) for t in CONFIGS for dtype in DTYPES}
ROWS |= {f"muonwithauxadamw bfloat16 {c.__name__}": ("muonwithauxadamw", "bfloat16", c) for c in (Linen, Nnx)}


def _save_orbax(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def _load_orbax(path: Path, *target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, *target)


def _pure(tree: Any) -> Any:
    """flax.serialization knows no nnx.State, only what nnx makes of it."""
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def _save_checkpoint(path: Path, tree: Any) -> Path:
    jax_impl.save_checkpoint(path, tree)
    return path


Restore = Callable[[Any, Any], Any]
Save = Callable[[Path, Any], Any]
"""Gives what Load takes: the state itself, or where it is."""
Load = Callable[[Any, Any, Restore], Any]
FORMATS: Mapping[str, tuple[Save, Load]] = {
    "tree": (
        lambda path, tree: jax.tree.map(jnp.copy, tree),
        lambda saved, target, restore: jax.tree.map(jnp.copy, saved),
    ),
    "orbax": (_save_orbax, lambda path, target, restore: _load_orbax(path, target)),
    "orbax, restore": (_save_orbax, lambda path, target, restore: restore(target, _load_orbax(path))),
    "flax bytes": (
        lambda path, tree: serialization.to_bytes(tree),
        lambda saved, target, restore: serialization.from_bytes(target, saved),
    ),
    "flax msgpack, restore": (
        lambda path, tree: serialization.msgpack_serialize(serialization.to_state_dict(_pure(tree))),
        lambda saved, target, restore: restore(target, serialization.msgpack_restore(saved)),
    ),
    "save_checkpoint, restore": (
        _save_checkpoint,
        lambda path, target, restore: restore(target, jax_impl.load_checkpoint(path)),
    ),
}


class Cells:
    """See parity_tests.resume.Cells.

    An order names what is built or restored, one after the other; "shapes" begins with jax.eval_shape instead of
    arrays. The resumed steps go through the program that was compiled for the first ones.
    """

    def __init__(self, optimizer_type: str, dtype: str, container: Any, device: str, folder: Path) -> None:
        self.FORMATS = {fmt: x for fmt, x in FORMATS.items() if fmt not in container.NO_FORMATS}
        self.ORDERS = container.ORDERS
        self._type, self._dtype, self._container = optimizer_type, dtype, container
        self._traces = 0
        self._device = jax.devices(device)[0]
        with jax.default_device(self._device):
            params = random_params(0, dtype)
            self._transform = build(optimizer_type, params)
            self._grads = [gradients(t, dtype) for t in range(2 * K)]
            self._programs = {"": self._program(self._transform)}
            self._step = jax.jit(self._update)
            half = self._run(container.trees(self._transform, params), 0, K)
            self._whole = self._run(half, K, 2 * K)
        self._saved: dict[str, Trees] = {}
        for fmt, (save, _) in self.FORMATS.items():
            (folder / fmt).mkdir(parents=True)
            self._saved[fmt] = {part: save(folder / fmt / part, tree) for part, tree in half.items()}

    def difference(self, fmt: str, order: str) -> str | None:
        with jax.default_device(self._device):
            return self._difference(fmt, order)

    def _difference(self, fmt: str, order: str) -> str | None:
        params, transform = random_params(1, self._dtype), self._transform
        words = order.split(", ")
        if "shapes" in words:
            params = jax.eval_shape(lambda: params)
        trees: Trees = {}
        for word in words:
            if word == "transform":
                transform = build(self._type, params)
                if order not in self._programs:
                    self._programs[order] = self._program(transform)
                if self._programs[order] != self._programs[""]:
                    return "the program of the transform"
            elif word != "shapes":
                start = functools.partial(self._container.trees, transform)
                fresh = jax.eval_shape(start, params) if "shapes" in words else start(params)
                trees[word] = self.FORMATS[fmt][1](self._saved[fmt][word], fresh[word], transform.restore)
                if not _same_structure(trees[word], fresh[word]):
                    return f"the structure of {word}"
                params = trees.get("params", params)
        found = self._run(trees, K, 2 * K)
        if self._traces != 1:
            return f"the number of traces, which is {self._traces}"
        return first_difference(named_leaves(self._whole), named_leaves(found))

    def _update(self, trees: Trees, grads: Any) -> Trees:
        self._traces += 1
        return self._container.update(self._transform, trees, grads)

    def _run(self, trees: Trees, start: int, stop: int) -> Trees:
        for t in range(start, stop):
            trees = self._step(trees, self._grads[t])
        return trees

    def _program(self, transform: Any) -> str:
        """All that ``update`` does, with its constants."""
        params = random_params(0, self._dtype)
        return str(jax.make_jaxpr(transform.update)(self._grads[0], jax.eval_shape(transform.init, params), params))


def _same_structure(a: Any, b: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(a), jax.tree.structure(b)]
    return bool(structures[0] == structures[1])


def first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Name of the first leaf of ``a`` that is another one in ``b``: other names, dtype, shape or bits."""
    if a.keys() != b.keys():
        return f"the names {sorted(a.keys() ^ b.keys())}"

    def same(x: Any, y: Any) -> bool:
        return x.dtype == y.dtype and x.shape == y.shape and np.asarray(x).tobytes() == np.asarray(y).tobytes()

    return next((name for name in a if not same(a[name], b[name])), None)
