"""Around the update: clipping, accumulation, skipped steps. Each framework's own tools, with our optimizers inside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import torch_impl
from parity_tests import reference
from parity_tests.test_update_rules import ADAM, ADAMW, FLOAT32, FUSED, LIKE_ADAMW, SIDES, Jax, Torch

NORM = 1e-7  # absolute, of clipped gradients of norm .01 and 1: rounding of float32
START = {"a.bias": np.zeros(1), "b.weight": np.zeros((1, 1))}
TYPES = {"adam": ADAM, "adamw": ADAMW, "fusedadam": FUSED, "hybrid": LIKE_ADAMW}
EVERY_TYPE = pytest.mark.parametrize("options", TYPES.values(), ids=TYPES)
RISING = ("wsd", dict(warm_up_steps=8, total_steps=9, decay_steps=0, f_start=1.0, f_max=9.0, f_min=0.0))  # f(n) = 1 + n


class ClippedTorch(Torch):
    """torch's clip_grad_norm_ between the backward pass and the step."""

    def step(self, grads, max_norm):
        for name, p in self.named.items():
            p.grad = torch.tensor(grads[name], dtype=p.dtype) if p.requires_grad else None
        torch.nn.utils.clip_grad_norm_(self.named.values(), max_norm)
        self.optimizer.step()


class ClippedJax(Jax):
    """optax's clip_by_global_norm in front; gradients of frozen parameters may be there, zero, or None."""

    def step(self, grads, max_norm, frozen="dense"):
        tx = optax.chain(optax.clip_by_global_norm(max_norm), self.tx)
        without = {"dense": lambda g: g, "zero": jnp.zeros_like, "none": lambda g: None}[frozen]
        trained = {route.name for route in self.routes() if route.group is not None}
        grads = {name: jnp.asarray(g, self.dtype) for name, g in grads.items()}
        grads = {name: g if name in trained else without(g) for name, g in grads.items()}
        _, self.opt_state = tx.update(grads, tx.init(self.params), self.params)


def clipped(run, *args):
    """The gradient that reached the optimizer: the momentum of a matrix after one step."""
    run.step(*args)
    return float(run.state("momentum_buffer")["b.weight"][0, 0])


@pytest.mark.parametrize(
    ("gradient", "by_torch", "by_optax"),
    [
        (0.02, 0.02 * 0.01 / (0.02 + 1e-6), 0.01),
        (0.01, 0.01 * 0.01 / (0.01 + 1e-6), 0.01),  # torch scales what is exactly at the limit
        (0.005, 0.005, 0.005),
    ],
)
def test_the_frameworks_clip_differently(gradient, by_torch, by_optax):
    """torch adds 1e-6 to the norm, optax does not: a relative 1e-6 / norm that no optimizer can undo."""
    grads = {"a.bias": [0.0], "b.weight": [[gradient]]}
    assert clipped(ClippedTorch(START, lr=0.1, **LIKE_ADAMW), grads, 0.01) == pytest.approx(by_torch, abs=NORM * 0.01)
    assert clipped(ClippedJax(START, lr=0.1, **LIKE_ADAMW), grads, 0.01) == pytest.approx(by_optax, abs=NORM * 0.01)


@pytest.mark.parametrize(
    ("run", "args", "expected"),
    [
        (ClippedTorch, (), 3 / (3 + 1e-6)),
        (ClippedJax, ("none",), 1.0),
        (ClippedJax, ("zero",), 1.0),
        (ClippedJax, ("dense",), 0.6),  # 3 / 5: a chain does not know what is frozen behind it
    ],
)
def test_frozen_gradients_and_the_global_norm(run, args, expected):
    """Trained gradient 3, frozen gradient 4, limit 1."""
    run = run(START, lr=0.1, keys_to_select=["weight"], **LIKE_ADAMW)
    assert clipped(run, {"a.bias": [4.0], "b.weight": [[3.0]]}, 1.0, *args) == pytest.approx(expected, abs=NORM)


def test_gradients_from_before_the_freezing_do_not_count():
    model = torch.nn.Linear(1, 1)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    torch_impl.build_optimizer(model, "adamw", lr=0.1, fused=True, keys_to_select=["weight"])
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 3.0


def micro_steps(run, gradients, every=2):
    """Values after each micro-batch; an update after every second one, from the mean."""
    values = []
    if isinstance(run, Torch):
        for p in run.named.values():
            p.grad = None
        for k, g in enumerate(gradients):
            for p in run.named.values():
                part = torch.full_like(p, g / every)
                p.grad = part if p.grad is None else p.grad + part
            if (k + 1) % every == 0:
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
            values.append({name: p.detach().double().numpy().copy() for name, p in run.named.items()})
        return values
    accumulator = optax.MultiSteps(run.tx, every)
    state = accumulator.init(run.params)
    update = jax.jit(accumulator.update)
    for g in gradients:
        grads = jax.tree.map(lambda p, value=g: jnp.full_like(p, value), run.params)
        updates, state = update(grads, state, run.params)
        run.params = optax.apply_updates(run.params, updates)
        values.append({name: np.asarray(p, np.float64) for name, p in run.params.items()})
    run.opt_state = state.inner_opt_state
    return values


def two_updates(options, role, p=0.0, lr=0.1, decay=0.1):
    """By the oracle, from the means 2 and 6 at lr and 2 lr: values and first moment or momentum."""
    m, v, values = np.zeros((1, 1)), np.zeros((1, 1)), []
    for t, g in enumerate((2.0, 6.0), start=1):
        rate = lr * t
        if role == "matrix":
            m = reference.momentum(m, np.full((1, 1), g), 0.95)
            update = reference.newton_schulz(reference.nesterov_direction(m, np.full((1, 1), g), 0.95, True))
            p = reference.descend(p, update, rate, decay, reference.adjusted_lr(rate, (1, 1), 0.2))
        else:
            g = g + decay * p if options is ADAM else g
            m, v = reference.first_moment(m, g, 0.9), reference.second_moment(v, g, 0.999)
            direction = reference.adam_direction(m, v, t, (0.9, 0.999), 1e-8)
            p = reference.descend(p, direction, rate, 0.0 if options is ADAM else decay)
        values.append(p)
    return [float(np.squeeze(x)) for x in values], float(m[0, 0])


@SIDES
@EVERY_TYPE
def test_accumulation_is_one_update(side, options):
    """Gradients 1, 3, 5, 7 in pairs: two updates, two counts, decay twice, lr .1 and .2."""
    run = side(START, schedule=RISING, lr=0.1, weight_decay=0.1, **options)
    values = micro_steps(run, [1.0, 3.0, 5.0, 7.0])
    assert {int(count) for count in run.counts()} == {2}
    assert run.rates() == pytest.approx([0.3])
    for name, role in (("a.bias", "adam"), ("b.weight", "matrix" if options is LIKE_ADAMW else "adam")):
        (first, second), moment = two_updates(options, role)
        found = [float(np.squeeze(value[name])) for value in values]
        np.testing.assert_allclose(found, [0.0, first, first, second], atol=FLOAT32)
        state = run.state("momentum_buffer" if role == "matrix" else "exp_avg")
        np.testing.assert_allclose(np.squeeze(state[name]), moment, atol=FLOAT32 * 10)  # moments near 10


def finite_steps(run, gradients):
    """Values after updates of which those with an infinite gradient are left out, by a gradient scaler or by optax."""
    if isinstance(run, Torch):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # powers of two: nothing is rounded
        (optimizer,) = run.optimizer
        for g in gradients:
            for p in run.named.values():
                p.grad = scaler.scale(torch.full_like(p, g))
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() == before:
                run.scheduler.step()
        return {name: p.detach().double().numpy() for name, p in run.named.items()}
    tx = optax.apply_if_finite(run.tx, 3)
    state = tx.init(run.params)
    for g in gradients:
        grads = jax.tree.map(lambda p, value=g: jnp.full_like(p, value), run.params)
        updates, state = tx.update(grads, state, run.params)
        run.params = optax.apply_updates(run.params, updates)
    run.opt_state = state.inner_state
    return {name: np.asarray(p, np.float64) for name, p in run.params.items()}


@SIDES
@EVERY_TYPE
def test_skipped_steps_count_for_nothing(side, options):
    """Gradients 1, inf, 2: the values, counts and lr of 1, 2."""
    run = side(START, schedule=RISING, lr=0.1, weight_decay=0.1, **options)
    plain = side(START, schedule=RISING, lr=0.1, weight_decay=0.1, **options)
    for g in (1.0, 2.0):
        expected = plain.step({"a.bias": [g], "b.weight": [[g]]})
    found = finite_steps(run, [1.0, np.inf, 2.0])
    assert {int(count) for count in run.counts()} == {2}
    assert run.rates() == plain.rates() == pytest.approx([0.3])
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)  # jitted or not: one rounding
