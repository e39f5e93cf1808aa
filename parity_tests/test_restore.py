"""A run that goes on otherwise: other hyperparameters, values read and set in any state, trees of other readers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_impl
import torch_impl
from parity_tests.test_effective_config import jax_side, ones_step, torch_side

DECAY = dict(warm_up_steps=0, total_steps=10, decay_steps=10, f_start=1.0, f_max=1.0, f_min=0.0)  # f(n) = 1 - n/10


def test_a_run_goes_on_with_another_lr():
    """lr 0.1 for four updates, then base lr 0.3 on the same schedule: 0.3 (1 - 4/10) for the fifth."""
    schedule = {**DECAY, "decay_type": "linear"}
    model, optimizer = torch_side(lr=0.1, weight_decay=0.0)
    scheduler = torch_impl.build_lr_scheduler(optimizer, "wsd", **schedule)
    for _ in range(4):
        ones_step(model, optimizer)
        scheduler.step()
    resumed_model, resumed = torch_side(lr=0.3, weight_decay=0.0)
    resumed_scheduler = torch_impl.build_lr_scheduler(resumed, "wsd", **schedule)
    resumed_model.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict(), override=True)
    resumed_scheduler.load_state_dict(scheduler.state_dict(), override=True)
    assert resumed_scheduler.get_last_lr() == pytest.approx([0.18])
    assert ones_step(resumed_model, resumed) == pytest.approx(0.18, abs=1e-6)

    f = jax_impl.build_lr_schedule("wsd", **schedule)
    params, transform = jax_side(lr_schedule=f, lr=0.1, weight_decay=0.0)
    state = transform.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    step = jax.jit(transform.update)
    for _ in range(4):
        _, state = step(grads, state, params)
    _, new = jax_side(lr_schedule=f, lr=0.3, weight_decay=0.0)
    restored = new.restore(new.init(params), state, override=True)
    assert float(jax_impl.learning_rates(restored)[0]) == pytest.approx(0.18)
    updates, _ = new.update(grads, restored, params)
    np.testing.assert_allclose(updates["fc"]["bias"], -0.18, rtol=1e-5)


@pytest.mark.parametrize("start_step", [0, 5])
def test_a_scheduler_that_starts_later(start_step):
    """f(n) = 1 - n/10 after n updates: 1 and 0.5; the JAX state is set to that step."""
    schedule = {**DECAY, "decay_type": "linear"}
    model, optimizer = torch_side(lr=1.0)
    scheduler = torch_impl.build_lr_scheduler(optimizer, "wsd", start_step=start_step, **schedule)
    assert scheduler.get_last_lr() == [optimizer.optimizers[0].param_groups[0]["lr"]] == [1 - start_step / 10]
    ones_step(model, optimizer)
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([1 - (start_step + 1) / 10])
    params, transform = jax_side(lr_schedule=jax_impl.build_lr_schedule("wsd", **schedule), lr=1.0)
    state = transform.set_hyperparameters(transform.init(params), step=start_step)
    assert float(jax_impl.learning_rates(state)[0]) == pytest.approx(1 - start_step / 10)


WRAPPED = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(10.0), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_hyperparameters_are_read_and_set_without_a_retrace(wrapper):
    """AdamW under gradients of one moves by lr + lr decay p, p = 1; two groups, one lr set for one of them."""
    params, transform = jax_side(lr=0.1, weight_decay=0.5, lr_multipliers={"head": 2.0})
    tx = WRAPPED[wrapper](transform)
    grads = jax.tree.map(jnp.ones_like, params)
    traces = []

    @jax.jit
    def step(state):
        traces.append(1)
        return tx.update(grads, state, params)

    state = tx.init(params)
    updates, state = step(state)
    np.testing.assert_allclose(updates["head"]["bias"], -0.2 * 1.5, rtol=1e-5)
    untouched = jax.tree.leaves(state)
    changed = transform.set_hyperparameters(state, base_lr={0: 0.01}, base_weight_decay=0.25, step=7)
    assert all(a is b for a, b in zip(untouched, jax.tree.leaves(state), strict=True))
    values = jax_impl.hyperparameters(changed)
    assert [[float(x) for x in v] for v in values.values()] == [[7, 0.01, 0.01, 0.25, 0.25], [7, 0.2, 0.2, 0.25, 0.25]]
    updates, _ = step(changed)
    np.testing.assert_allclose(updates["fc"]["bias"], -0.01 * 1.25, rtol=1e-5)
    np.testing.assert_allclose(updates["head"]["bias"], -0.2 * 1.25, rtol=1e-5)
    assert traces == [1]
    restored = transform.restore(tx.init(params), changed)
    assert jax.tree.structure(restored) == jax.tree.structure(changed)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(changed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_hyperparameters_inside_an_nnx_optimizer():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    transform = jax_impl.build_optimizer(nnx.state(model, nnx.Param), "adamw", lr=0.1, weight_decay=0.0)
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
    optimizer.opt_state = transform.set_hyperparameters(optimizer.opt_state, base_lr=0.5)
    before = np.asarray(model.bias[...])
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    np.testing.assert_allclose(before - np.asarray(model.bias[...]), 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"base_lr": -1.0}, ValueError, "base_lr must be finite and >= 0, got -1.0"),
        ({"base_weight_decay": {0: float("nan")}}, ValueError, "base_weight_decay must be finite"),
        ({"base_lr": {3: 0.1}}, ValueError, r"base_lr: there is no group \[3\], only \[0\]"),
        ({"step": 1.5}, TypeError, "step must be an integer, got 1.5"),
        ({"step": -1}, ValueError, "step must be finite and >= 0, got -1"),
        ({"base_lr": "1"}, TypeError, "base_lr must be a number"),
    ],
)
def test_wrong_hyperparameters(change, error, message):
    params, transform = jax_side(lr=0.1)
    with pytest.raises(error, match=message):
        transform.set_hyperparameters(transform.init(params), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaves: leaves.pop("fc.bias"), r"missing from it: \['fc.bias'\]"),
        (lambda leaves: leaves.update({"tail": np.ones(2)}), r"unknown here: \['tail'\]"),
        (
            lambda leaves: leaves.update({"fc.bias": np.ones(4, np.float32)}),
            r"fc.bias has float32 \(4,\), it must have",
        ),
        (lambda leaves: leaves.update({"fc.bias": np.ones(3)}), r"fc.bias has float64 \(3,\), it must have float32"),
        (lambda leaves: leaves.update({"fc.bias.value": np.ones(3)}), r"unknown here: \['fc.bias.value'\]"),
    ],
)
def test_foreign_trees_are_refused(change, message):
    """Parameters and states go through the same checks."""
    params, transform = jax_side(lr=0.1)
    leaves = {f"{m}.{n}": np.asarray(x) for m, module in params.items() for n, x in module.items()}
    assert jax.tree.structure(transform.restore(params, leaves)) == jax.tree.structure(params)
    change(leaves)
    with pytest.raises(ValueError, match=message):
        transform.restore(params, leaves)


def test_nnx_variables_that_a_reader_gives_back_as_dicts():
    """Orbax without a target has {"value": array} where the nnx state has a variable."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    transform = jax_impl.build_optimizer(state, "adamw", lr=0.1)
    saved = {"kernel": {"value": np.full((2, 3), 2, np.float32)}, "bias": {"value": np.full(3, 3, np.float32)}}
    restored = transform.restore(state, saved)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert {float(x) for x in restored["kernel"][...].ravel()} == {2.0}
    assert {float(x) for x in restored["bias"][...].ravel()} == {3.0}


def test_masters_that_were_not_saved_are_rebuilt():
    params, _ = jax_side(lr=0.1)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    transform = jax_impl.build_optimizer(params, "muonwithauxadamw", lr=0.1)
    state = transform.init(params)
    without = {
        name: leaf for name, leaf in jax_impl.tree.named_leaves(state).items() if ".inner_state.master." not in name
    }
    assert len(without) == len(jax.tree.leaves(state)) - 4
    moved = jax.tree.map(lambda p: p + 1, params)
    restored = transform.restore(transform.init(moved), without)
    (master,) = {
        float(x)
        for name, leaf in jax_impl.tree.named_leaves(restored).items()
        if ".master." in name
        for x in leaf.ravel()
    }
    assert master == 2.0
    with pytest.raises(ValueError, match="missing from it"):
        transform.restore(jax.eval_shape(transform.init, moved), without)
