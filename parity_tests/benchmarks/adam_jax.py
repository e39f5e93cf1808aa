"""Fused Adam of jax_impl against optax.adamw, jitted and with donated buffers.

Run ``python -m parity_tests.benchmarks.adam_jax``. Each row compares two steps that do the same. They take turns, so
that a machine that slows down slows both; what counts is the median of the ratios of the rounds. torch is never
imported: its thread pool would be in the way.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_impl
from jax_impl.master_weights import keep_master_weights

LR, WEIGHT_DECAY = 1e-3, 0.1
STEPS_A_ROUND = 2

Shapes = Mapping[str, tuple[int, ...]]
Step = Callable[[Any, Any], Any]
"""(what is carried from step to step, gradients) -> the next; the parameters are carried first."""


def gpt2_small(blocks: int = 12) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters: 124 million in 12 blocks."""
    block = {"qkv": (768, 2304), "out": (768, 768), "up": (768, 3072), "down": (3072, 768)}
    vectors = {name: (768,) for name in ("scale1", "bias1", "scale2", "bias2")}
    layers = {f"{b}.{name}": shape for b in range(blocks) for name, shape in {**block, **vectors}.items()}
    return {"embed": (50304, 768), **layers}


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


class Result(NamedTuple):
    """Medians of a row; ``ratio`` is ours over the other, with its quartiles over the rounds."""

    name: str
    ours_ms: float
    other_ms: float
    ratio: float
    quartiles: tuple[float, float]


class Timed:
    """A jitted step and what it carries, all of it donated."""

    def __init__(self, carry: Any, step: Step) -> None:
        self.carry = carry
        # keep_unused: a parameter that the step only overwrites would be dropped from its arguments, and its buffer
        # be allocated anew in every step
        self.step = jax.jit(step, donate_argnums=0, keep_unused=True)

    def run(self, grads: Any, steps: int) -> float:
        """Milliseconds a step."""
        started = time.perf_counter()
        for _ in range(steps):
            self.carry = self.step(self.carry, grads)
        jax.block_until_ready(self.carry)
        return (time.perf_counter() - started) / steps * 1e3


def measure(row: Row, shapes: Shapes, rounds: int) -> Result:
    """Both sides in turn, ``rounds`` times; who begins changes from round to round."""
    grads = random_tree(shapes, row.dtype, 1, scale=0.01)
    sides = [Timed(*make(shapes, row.dtype)) for make in (ours, row.other)]
    for side in sides:
        side.run(grads, 2)  # compiles
    times = np.empty((rounds, 2))
    for r in range(rounds):
        for k in (0, 1) if r % 2 else (1, 0):
            times[r, k] = sides[k].run(grads, STEPS_A_ROUND)
    first, ratio, third = np.percentile(times[:, 0] / times[:, 1], [25, 50, 75])
    ours_ms, other_ms = np.median(times, axis=0)
    return Result(row.name, float(ours_ms), float(other_ms), float(ratio), (float(first), float(third)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=60, help="rounds a row (default: 60)")
    parser.add_argument(
        "--blocks", type=int, default=12, help="blocks of GPT-2 small beside its embedding (default: 12)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    shapes = gpt2_small(args.blocks)
    results = [measure(row, shapes, args.rounds) for row in ROWS]
    if args.json:
        print(json.dumps([result._asdict() for result in results], indent=1))
        return
    size = sum(math.prod(shape) for shape in shapes.values())
    print(f"{size / 1e6:.0f} M parameters on {jax.devices()[0].device_kind}, {args.rounds} rounds")
    print(f"{'fusedadam against':46}{'ms':>8}{'other':>8}{'ratio':>8}  quartiles")
    for result in results:
        low, high = result.quartiles
        print(
            f"{result.name:46}{result.ours_ms:8.1f}{result.other_ms:8.1f}{result.ratio:8.3f}  {low:.3f} to {high:.3f}"
        )


if __name__ == "__main__":
    main()
