"""Fused Adam of jax_impl against optax.adamw, jitted and with donated buffers.

Run ``python -m parity_tests.benchmarks.adam_jax``. Each row compares two steps that do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_impl
from jax_impl.master_weights import keep_master_weights
from parity_tests.benchmarks.rounds import Shapes, arguments, compare, gpt2_small, report

LR, WEIGHT_DECAY = 1e-3, 0.1

Step = Callable[[Any, Any], Any]
"""(what is carried from step to step, gradients) -> the next; the parameters are carried first."""


def random_tree(shapes: Shapes, dtype: Any, seed: int, scale: float = 1.0) -> dict[str, jax.Array]:
    """Normal values times ``scale``."""
    rng = np.random.default_rng(seed)
    return {n: jnp.asarray(scale * rng.standard_normal(s, np.float32), dtype) for n, s in shapes.items()}


def _as_transform(tx: optax.GradientTransformation, params: Any) -> tuple[Any, Step]:
    def step(carry: Any, grads: Any) -> Any:
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return (params, tx.init(params)), step


def ours(shapes: Shapes, dtype: Any) -> tuple[Any, Step]:
    """build_optimizer's fusedadam, with masters below float32."""
    params = random_tree(shapes, dtype, 0)
    return _as_transform(jax_impl.build_optimizer(params, "fusedadam", lr=LR, weight_decay=WEIGHT_DECAY), params)


def adamw(shapes: Shapes, dtype: Any) -> tuple[Any, Step]:
    """optax.adamw on the parameters."""
    return _as_transform(optax.adamw(LR, weight_decay=WEIGHT_DECAY), random_tree(shapes, dtype, 0))


def adamw_on_masters(shapes: Shapes, dtype: Any) -> tuple[Any, Step]:
    """optax.adamw on float32 masters, with casts of the gradients and to the parameters.

    Fewer bytes than ours: it does not look whether a parameter has been changed from outside, and it overwrites the
    parameters where ours returns an update for apply_updates: 42 bytes an element instead of 46.
    """
    tx = optax.adamw(LR, weight_decay=WEIGHT_DECAY)
    params = random_tree(shapes, dtype, 0)
    masters = optax.tree_utils.tree_cast(params, jnp.float32)

    def step(carry: Any, grads: Any) -> Any:
        _, masters, state = carry
        updates, state = tx.update(optax.tree_utils.tree_cast(grads, jnp.float32), state, masters)
        masters = optax.apply_updates(masters, updates)
        return optax.tree_utils.tree_cast(masters, dtype), masters, state

    return (params, masters, tx.init(masters)), step


def adamw_in_our_masters(shapes: Shapes, dtype: Any) -> tuple[Any, Step]:
    """optax.adamw inside keep_master_weights: the same bytes as ours."""
    tx = optax.with_extra_args_support(optax.adamw(LR, weight_decay=WEIGHT_DECAY))
    cast = optax.stateless(lambda grads, params: optax.tree_utils.tree_cast(grads, jnp.float32))
    return _as_transform(keep_master_weights(optax.chain(cast, tx)), random_tree(shapes, dtype, 0))


class Row(NamedTuple):
    """One comparison: dtype of parameters and gradients, and the other side."""

    name: str
    dtype: Any
    other: Callable[[Shapes, Any], tuple[Any, Step]]


ROWS = (
    Row("float32: optax.adamw", jnp.float32, adamw),
    Row("bfloat16: optax.adamw on masters, and casts", jnp.bfloat16, adamw_on_masters),
    Row("bfloat16: optax.adamw in our masters", jnp.bfloat16, adamw_in_our_masters),
)


class Timed:
    """A jitted step and what it carries, all of it donated."""

    def __init__(self, carry: Any, step: Step) -> None:
        self.carry = carry
        # keep_unused: a parameter that the step only overwrites would be dropped from its arguments, and its buffer
        # be allocated anew in every step
        self.step = jax.jit(step, donate_argnums=0, keep_unused=True)

    def run(self, grads: Any) -> None:
        """One step, finished."""
        self.carry = jax.block_until_ready(self.step(self.carry, grads))


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=60)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of GPT-2 small (default: 12)")
    args = parser.parse_args(argv)
    shapes = gpt2_small(args.blocks)
    results = []
    for row in ROWS:
        grads = random_tree(shapes, row.dtype, 1, scale=0.01)
        mine, other = (partial(Timed(*make(shapes, row.dtype)).run, grads) for make in (ours, row.other))
        results.append(compare(row.name, mine, other, args.rounds))
    size = sum(math.prod(shape) for shape in shapes.values())
    title = f"{size / 1e6:.0f} M parameters on {jax.devices()[0].device_kind}, {args.rounds} rounds"
    report(title, results, args.json)


if __name__ == "__main__":
    main()
