"""Fused Adam over a long run, and the transforms of jax_impl: what XLA makes of them, and optax's ways to use them."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_impl
from parity_tests import reference
from parity_tests.problems import to_bfloat16

DRIFT = 2e-5  # relative: 10,000 roundings of 6e-8 that add up at random are 6e-6
STEPS, WIDTH, LR, DECAY = 10_000, 61, 1e-3, 0.05


def long_run(options, dtype):
    """float64 copies of the parameters (or their masters) after STEPS updates, and of the gradients of each."""
    rng = np.random.default_rng(5)
    start = to_bfloat16(rng.normal(size=WIDTH))
    sizes = 10.0 ** rng.uniform(-3, 1, WIDTH)
    grads = to_bfloat16(sizes * (0.3 + rng.normal(size=(STEPS, WIDTH))))
    params = {"a": jnp.asarray(start, dtype)}
    tx = jax_impl.build_optimizer(params, "fusedadam", lr=LR, weight_decay=DECAY, **options)

    def step(carry, g):
        params, state = carry
        updates, state = tx.update({"a": g.astype(dtype)}, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.jit(partial(jax.lax.scan, step))((params, tx.init(params)), jnp.asarray(grads, jnp.float32))
    masters = named(state, "master")
    return start, grads, np.asarray(masters[0] if masters else params["a"], np.float64), params["a"]


def named(state, field):
    """Leaves of the state that lie under a field of this name."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return [leaf for path, leaf in leaves if any(getattr(key, "name", None) == field for key in path)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"adam_w_mode": False}, {"bias_correction": False}], ids=str)
def test_ten_thousand_steps(options, dtype):
    """Against the oracle in float64; a bfloat16 parameter is its rounded master."""
    p, grads, found, param = long_run(options, dtype)
    m, v = np.zeros(WIDTH), np.zeros(WIDTH)
    decoupled, corrected = options.get("adam_w_mode", True), options.get("bias_correction", True)
    for t, g in enumerate(grads, 1):
        g = g if decoupled else g + DECAY * p
        m, v = reference.first_moment(m, g, 0.9), reference.second_moment(v, g, 0.999)
        direction = reference.adam_direction(m, v, t if corrected else np.inf, (0.9, 0.999), 1e-8)
        p = reference.descend(p, direction, LR, DECAY if decoupled else 0.0)
    error = np.linalg.norm(found - p) / np.linalg.norm(p)
    print(options, dtype, f"{error:.2e}")
    assert error < DRIFT
    assert param.dtype == dtype
    if dtype == "bfloat16":
        np.testing.assert_array_equal(np.asarray(param, np.float64), to_bfloat16(found))
