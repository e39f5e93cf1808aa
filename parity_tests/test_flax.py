"""The transforms where Flax users put them: nnx.Optimizer, a linen TrainState, and optax's own tools around them."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState

import jax_impl
from parity_tests import reference

LR, DECAY = 0.02, 0.1
FLOAT32 = 2e-6  # absolute, three steps on values below 1
OPTIONS = {"lr": LR, "weight_decay": DECAY, "ns_dtype": "float32"}
SCHEDULE = dict(warm_up_steps=2, total_steps=9, decay_steps=2, f_start=0.5, f_max=1.0, f_min=0.0)
RATES = (0.5, 0.75, 1.0)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(7, 6, name="embed")(x)
        return nn.Dense(5, name="up")(nn.LayerNorm(name="norm")(x))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, rngs=rngs)
        self.up = nnx.Linear(6, 5, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(5, 5, rngs=rngs)])

    def __call__(self, x):
        return self.blocks[0](self.up(self.norm(self.embed(x))))


def loss_of(y):
    return jnp.mean(jnp.square(y - 1.0))


TOKENS = jnp.array([0, 3, 5])


class Oracle:
    """The rules of muonwithauxadamw by the NumPy oracle; names ending in "kernel" are (in, out) matrices."""

    def __init__(self, params):
        self.params = {name: np.asarray(p, np.float64) for name, p in params.items()}
        self.state = {name: [np.zeros(p.shape), np.zeros(p.shape)] for name, p in self.params.items()}
        self.t = 0

    def step(self, grads):
        lr = LR * RATES[self.t]
        self.t += 1
        for name, g in grads.items():
            p, (m, v), g = self.params[name], self.state[name], np.asarray(g, np.float64)
            if name.endswith("kernel"):
                m = reference.momentum(m, g, 0.95)
                update = reference.newton_schulz(reference.nesterov_direction(m, g, 0.95, True).T).T
                self.params[name] = reference.descend(p, update, lr, DECAY, reference.adjusted_lr(lr, p.shape, 0.2))
            else:
                m, v = reference.first_moment(m, g, 0.9), reference.second_moment(v, g, 0.95)
                direction = reference.adam_direction(m, v, self.t, (0.9, 0.95), 1e-8)
                self.params[name] = reference.descend(p, direction, lr, DECAY)
            self.state[name] = [m, v]


def flatten(tree):
    """{name: array} of a nested dict or an nnx state."""
    names = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", None)))) for k in path]
        names[".".join(parts).removesuffix(".value")] = leaf
    return names


def assert_close(found, oracle):
    assert found.keys() == oracle.params.keys()
    for name, value in oracle.params.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=FLOAT32, err_msg=name)


@pytest.mark.parametrize("jitted", [True, False])
def test_nnx_optimizer(jitted):
    model = Nnx(nnx.Rngs(0))
    schedule = jax_impl.build_lr_schedule("wsd", **SCHEDULE)
    transform = jax_impl.build_optimizer(
        nnx.state(model, nnx.Param), "muonwithauxadamw", lr_schedule=schedule, **OPTIONS
    )
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
    oracle = Oracle(flatten(nnx.state(model, nnx.Param)))

    def train_step(model, optimizer):
        grads = nnx.grad(lambda model: loss_of(model(TOKENS)))(model)
        optimizer.update(model, grads)
        return grads

    step = nnx.jit(train_step) if jitted else train_step
    for rate in RATES:
        assert {float(lr) for lr in jax_impl.learning_rates(optimizer.opt_state).values()} == {LR * rate}
        oracle.step(flatten(step(model, optimizer)))
    assert_close(flatten(nnx.state(model, nnx.Param)), oracle)
    assert {name for name in oracle.params if name.endswith("kernel")} == {"up.kernel", "blocks.0.kernel"}


@pytest.mark.parametrize("with_params", [True, False])
def test_linen_train_state(with_params):
    """Built for these parameters, or as a transform that finds the roles itself."""
    model = Linen()
    params = model.init(jax.random.key(0), TOKENS)["params"]
    schedule = jax_impl.build_lr_schedule("wsd", **SCHEDULE)
    if with_params:
        tx = jax_impl.build_optimizer(params, "muonwithauxadamw", lr_schedule=schedule, **OPTIONS)
    else:
        tx = jax_impl.muon_with_aux_adamw(
            OPTIONS["lr"], lr_schedule=schedule, **{k: v for k, v in OPTIONS.items() if k != "lr"}
        )
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    oracle = Oracle(flatten(params))

    @jax.jit
    def train_step(state):
        grads = jax.grad(lambda p: loss_of(state.apply_fn({"params": p}, TOKENS)))(state.params)
        return state.apply_gradients(grads=grads), grads

    for _ in RATES:
        state, grads = train_step(state)
        oracle.step(flatten(grads))
    assert_close(flatten(state.params), oracle)
    assert int(state.step) == len(RATES)


def small_params():
    return {"up": {"kernel": jnp.full((2, 3), 0.5, jnp.float32), "bias": jnp.full(3, 0.5, jnp.float32)}}


def test_nothing_is_traced_twice():
    params = small_params()
    schedule = jax_impl.build_lr_schedule("wsd", **SCHEDULE)
    tx = jax_impl.build_optimizer(params, "muonwithauxadamw", lr_schedule=schedule, **OPTIONS)
    traces = []

    @jax.jit
    def step(params, state):
        traces.append(1)
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(4):
        params, state = step(params, state)
    assert len(traces) == 1


def test_state_survives_donation_and_scan():
    """Masters and moments share no buffer with the parameters, and the state keeps its structure inside a scan."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), small_params())
    tx = jax_impl.build_optimizer(params, "muonwithauxadamw", **OPTIONS)
    grads = jax.tree.map(jnp.ones_like, params)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = (params, tx.init(params))
    expected = start
    for _ in range(3):
        expected, _ = step(expected, None)
    scanned, _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=3))(start)
    fresh = (jax.tree.map(jnp.array, params), tx.init(params))
    donated = jax.jit(lambda carry: step(carry, None)[0], donate_argnums=0)
    for _ in range(3):
        fresh = donated(fresh)
    for other in (scanned, fresh):
        assert jax.tree.structure(other) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-6)
    assert scanned[0]["up"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize("optimizer_type", ["adam", "adamw", "fusedadam", "muonwithauxadamw"])
def test_inside_optax_chains(optimizer_type):
    """Clipped in front: the same as on gradients clipped by hand, and another second update than unclipped.

    First updates do not depend on the size of a gradient; the second do, as the first was clipped and it was not.
    """
    params = small_params()
    sizes = (10.0, 0.1)  # nine entries: norms of 30 and 0.3
    options = OPTIONS if optimizer_type == "muonwithauxadamw" else {"lr": LR}
    tx = jax_impl.build_optimizer(params, optimizer_type, **options)

    def run(tx, scales):
        p, state = params, tx.init(params)
        for size, scale in zip(sizes, scales, strict=True):
            sign = {"up": {"kernel": jnp.array([[1.0, -1, 1], [1, 1, -1]]), "bias": jnp.ones(3)}}
            sign = sign if size > 1 else jax.tree.map(jnp.flip, sign)
            grads = jax.tree.map(lambda s, factor=size * scale: (factor * s).astype(jnp.float32), sign)
            updates, state = tx.update(grads, state, p)
            p = optax.apply_updates(p, updates)
        return updates, state

    found, state = run(optax.chain(optax.clip_by_global_norm(1.0), tx), (1.0, 1.0))
    expected, _ = run(tx, (1 / 30.0, 1.0))
    unclipped, _ = run(tx, (1.0, 1.0))
    for a, b, c in zip(*map(jax.tree.leaves, (found, expected, unclipped)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
        assert np.abs(a - c).max() > 1e-2 * np.abs(a).max()
    assert [float(lr) for lr in jax_impl.learning_rates(state).values()] == [np.float32(LR)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_x64_off(dtype):
    """What every Flax user has: the same trajectory as with x64 on, to float32 rounding."""

    def run(x64):
        with jax.enable_x64(x64):
            params = jax.tree.map(lambda p: jnp.asarray(np.asarray(p), dtype), start)
            schedule = jax_impl.build_lr_schedule("wsd", **SCHEDULE)
            tx = jax_impl.build_optimizer(params, "muonwithauxadamw", lr_schedule=schedule, **OPTIONS)
            state = tx.init(params)
            for g in gradients:
                grads = jax.tree.map(lambda x: jnp.asarray(x, dtype), g)
                updates, state = jax.jit(tx.update)(grads, state, params)
                params = optax.apply_updates(params, updates)
            return jax.tree.map(lambda p: np.asarray(p, np.float64), params), state

    rng = np.random.default_rng(0)
    start = {"up": {"kernel": rng.normal(size=(6, 5)), "bias": rng.normal(size=5)}}
    gradients = [jax.tree.map(lambda p: rng.normal(size=p.shape), start) for _ in range(5)]
    (on, _), (off, state) = run(True), run(False)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32", "uint32"}
    for a, b in zip(jax.tree.leaves(on), jax.tree.leaves(off), strict=True):
        np.testing.assert_allclose(a, b, atol=FLOAT32 if dtype == "float32" else 2.0**-7)


def test_parameters_that_are_none_are_no_parameters():
    """As partitioned trees and layers without a bias have them."""
    params = {"up": {"kernel": jnp.ones((2, 3)), "bias": None}, "rest": None}
    tx = jax_impl.build_optimizer(params, "muonwithauxadamw", **OPTIONS)
    updates, _ = tx.update(params, tx.init(params), params)
    moved = optax.apply_updates(params, updates)
    assert moved["rest"] is None
    assert moved["up"]["bias"] is None
    assert (moved["up"]["kernel"] != 1).all()
    plain = {"up": {"kernel": params["up"]["kernel"]}}
    same = jax_impl.build_optimizer(plain, "muonwithauxadamw", **OPTIONS)
    expected, _ = same.update(plain, same.init(plain), plain)
    assert (updates["up"]["kernel"] == expected["up"]["kernel"]).all()


def test_learning_rates_are_found_by_structure():
    """A parameter may be called learning_rate, states may be restored as dicts, and two optimizers are no one."""
    params = {"learning_rate": jnp.ones(5), "schedule_count": {"inner": jnp.ones(2)}}
    tx = jax_impl.build_optimizer(params, "adamw", lr=LR, lr_multipliers={"inner": 2.0})
    state = tx.init(params)
    expected = {0: np.float32(LR), 1: np.float32(2 * LR)}
    assert {g: float(lr) for g, lr in jax_impl.learning_rates(state).items()} == pytest.approx(expected)
    restored = serialization.to_state_dict(state)
    assert {g: float(lr) for g, lr in jax_impl.learning_rates(restored).items()} == pytest.approx(expected)
    with pytest.raises(ValueError, match="found 2"):
        jax_impl.learning_rates((state, state))


def test_no_gradient_leaf_updates_nothing():
    params = small_params()
    tx = jax_impl.build_optimizer(params, "muonwithauxadamw", **OPTIONS)
    grads = {"up": {"kernel": None, "bias": jnp.ones(3)}}
    updates, _ = tx.update(grads, tx.init(params), params)
    moved = optax.apply_updates(params, updates)
    assert (moved["up"]["kernel"] == params["up"]["kernel"]).all()
    assert (moved["up"]["bias"] != params["up"]["bias"]).all()
