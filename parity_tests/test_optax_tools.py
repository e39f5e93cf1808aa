"""optax's own tools around the transforms: each works, or raises with the reason."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_impl

LR = 0.02
SCHEDULE = dict(warm_up_steps=2, total_steps=9, decay_steps=2, f_start=0.5, f_max=1.0, f_min=0.0)


def small_params():
    return {"up": {"kernel": jnp.full((2, 3), 0.5, jnp.float32), "bias": jnp.full(3, 0.5, jnp.float32)}}


WHOLE_TREE = "missing.*inside optax.masked or optax.partition, build it from the parameters of that part alone"
OPTAX_TOOLS = {
    # tool: (what it makes of a transform for "up", or why it cannot)
    "inject_hyperparams": (
        lambda params: optax.inject_hyperparams(lambda lr: jax_impl.build_optimizer(params, "adamw", lr=lr))(lr=LR),
        TypeError,
        "lr must be a number, got an array: a schedule or set_hyperparameters changes lr",
    ),
    "masked": (
        lambda params: optax.masked(jax_impl.build_optimizer(params, "adamw", lr=LR), {"up": True, "rest": False}),
        ValueError,
        WHOLE_TREE,
    ),
    "partition": (
        lambda params: optax.partition(
            {"ours": jax_impl.build_optimizer(params, "adamw", lr=LR), "none": optax.set_to_zero()},
            {"up": "ours", "rest": "none"},
        ),
        ValueError,
        WHOLE_TREE,
    ),
    "flatten": (
        lambda params: optax.flatten(jax_impl.build_optimizer(params, "adamw", lr=LR)),
        ValueError,
        "missing",
    ),
}


@pytest.mark.parametrize("tool", OPTAX_TOOLS)
def test_optax_tools_that_cannot_work_say_why(tool):
    make, error, message = OPTAX_TOOLS[tool]
    params = {**small_params(), "rest": jnp.ones(2)}
    with pytest.raises(error, match=message):
        make(params).init(params)


@pytest.mark.parametrize("tool", ["masked", "partition"])
def test_a_part_of_a_tree(tool):
    """Built from the parameters of that part: AdamW's first update is lr (1 + decay p); the rest stays."""
    params = {**small_params(), "rest": jnp.ones(2)}
    ours = jax_impl.build_optimizer(small_params(), "adamw", lr=LR, weight_decay=0.5)
    if tool == "masked":
        tx = optax.chain(
            optax.masked(ours, {"up": True, "rest": False}),
            optax.masked(optax.set_to_zero(), {"up": False, "rest": True}),
        )
    else:
        tx = optax.partition({"ours": ours, "none": optax.set_to_zero()}, {"up": "ours", "rest": "none"})
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    for leaf in jax.tree.leaves(updates["up"]):
        np.testing.assert_allclose(leaf, -LR * 1.25, rtol=1e-5)
    assert (updates["rest"] == 0).all()


def test_steps_that_are_not_finite_change_nothing():
    """apply_if_finite: no decay, no step count and no schedule count on the bad step."""
    params = small_params()
    schedule = jax_impl.build_lr_schedule("wsd", **SCHEDULE)
    for optimizer_type in ("adam", "adamw", "fusedadam", "muonwithauxadamw"):
        ours = jax_impl.build_optimizer(params, optimizer_type, lr=LR, lr_schedule=schedule)
        tx = optax.apply_if_finite(ours, 3)
        grads = jax.tree.map(jnp.ones_like, params)
        _, state = tx.update(grads, tx.init(params), params)
        bad = {"up": {**grads["up"], "bias": grads["up"]["bias"].at[0].set(jnp.nan)}}
        updates, after = tx.update(bad, state, params)
        assert all((u == 0).all() for u in jax.tree.leaves(updates))
        for a, b in zip(jax.tree.leaves(after.inner_state), jax.tree.leaves(state.inner_state), strict=True):
            np.testing.assert_array_equal(a, b)
        assert int(after.total_notfinite) == 1


def test_not_finite_steps_of_bfloat16_parameters_need_float32_gradients():
    """optax's rejected step has the gradients' dtype, ours float32: the branches of its cond must agree."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), small_params())
    tx = optax.apply_if_finite(jax_impl.build_optimizer(params, "adamw", lr=LR, weight_decay=0.0), 3)
    grads = jax.tree.map(jnp.ones_like, params)
    with pytest.raises(TypeError, match="must have equal output types"):
        tx.update(grads, tx.init(params), params)
    updates, _ = tx.update(optax.tree_utils.tree_cast(grads, jnp.float32), tx.init(params), params)
    moved = optax.apply_updates(params, updates)["up"]
    assert moved["bias"].dtype == jnp.bfloat16
    assert (moved["bias"] == jnp.bfloat16(0.5 - LR)).all()  # the first update of Adam is lr


STATE_ALONG_PARAMETERS = {
    # field of the state, parameter it lies along
    "adamw": [(field, name) for field in ("count", "mu", "nu") for name in ("bias", "kernel")],
    "fusedadam": [(field, name) for field in ("mu", "nu") for name in ("bias", "kernel")],
    "muonwithauxadamw": [("mu", "bias"), ("mu", "kernel"), ("nu", "bias")],
}


@pytest.mark.parametrize("optimizer_type", STATE_ALONG_PARAMETERS)
def test_tree_map_params_finds_what_lies_along_parameters(optimizer_type):
    """As shardings are laid over a state: moments (and adam's counts) yes, group values no."""
    params = small_params()
    tx = jax_impl.build_optimizer(params, optimizer_type, lr=LR)
    marked = optax.tree_utils.tree_map_params(tx, lambda leaf: "along", tx.init(params))
    found = [
        (next(k.name for k in reversed(path) if isinstance(k, jax.tree_util.GetAttrKey)), path[-1].key)
        for path, leaf in jax.tree_util.tree_leaves_with_path(marked)
        if isinstance(leaf, str)
    ]
    assert sorted(found) == STATE_ALONG_PARAMETERS[optimizer_type]
