"""The harness on faults that were planted: it must name the side, the tensor, the stage and the first step.

Steps, stages and tensors were derived by hand: a fault shows in the first step in which its formula gives another
value, in the first stage that holds the value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import jax_impl.build
import jax_impl.master_weights
import jax_impl.muon
import torch_impl.aux_adamw
import torch_impl.muon
import torch_impl.schedules
from parity_tests.cases import CASES, Case
from parity_tests.problems import Problem
from parity_tests.tolerances import TIERS
from parity_tests.trajectory import run_case

FUSED_ADAM = sys.modules["jax_impl.fused_adam"]  # the package has a function of that name
MU, DECAY, LR = 0.95, 0.2, 0.02
MATRICES, VECTORS = {"up.weight", "square.weight"}, {"norm.weight", "norm.bias"}
CASE = Case(
    "planted",
    "has every stage; the lr changes with every step and is never zero",
    "muonwithauxadamw",
    {"lr": LR, "weight_decay": DECAY},
    Problem(
        modules=(("up", "Linear", 6, 16, False), ("square", "Linear", 7, 7, False), ("norm", "LayerNorm", 16)),
        gradients={"up": "large", "square": "large"},  # so large that the eps of the norm does not show
        seed=77,
    ),
    ("wsd", {"warm_up_steps": 6, "total_steps": 9, "decay_steps": 2, "f_start": 0.25, "f_max": 1.0, "f_min": 0.1}),
    steps=6,
)


class Altered:
    """A side that gets another case or other gradients than it was meant to."""

    def __init__(self, backend, case=lambda case: case, grads=lambda t, grads: grads):
        self.name, self.backend, self.alter_case, self.alter_grads = backend.name, backend, case, grads

    def start(self, case, precision):
        self.run, self.t = self.backend.start(self.alter_case(case), precision), 0
        return self

    def step(self, grads):
        self.t += 1
        return self.run.step(self.alter_grads(self.t, grads))

    def load(self, params, state):
        self.run.load(params, state)


def with_kwargs(**kwargs):
    return {"case": lambda case: dataclasses.replace(case, kwargs={**case.kwargs, **kwargs})}


def nan_in_gradient(t, grads):
    if t != 3:
        return grads
    broken = grads["square.weight"].copy()
    broken[2, 3] = np.nan
    return {**grads, "square.weight": broken}


def bias_corrected(calls: list, momentum, grad):
    """optax.contrib.muon's mix: both terms bias-corrected, with different counts."""
    calls.append(None)
    t = (len(calls) + 1) // len(MATRICES)
    return MU * (1 - MU) * momentum / (1 - MU ** (t + 1)) + (1 - MU) * grad / (1 - MU**t)


# --- torch ------------------------------------------------------------------------------------------------------------


def torch_momentum_as_average(patch):
    def update_momentum_(momentum_buffer, grad, muon_momentum, active):
        momentum_buffer.mul_(muon_momentum).add_(grad, alpha=1 - muon_momentum)

    patch.setattr(torch_impl.muon, "update_momentum_", update_momentum_)


def torch_nesterov_bias_corrected(patch):
    calls = []
    patch.setattr(torch_impl.muon, "descent_direction", lambda M, g, mu, nesterov: bias_corrected(calls, M, g))


def torch_eps_inside_root(patch):
    def fused_(params, grads, ms, vs, step, rule):
        (b1, b2), t = rule.betas, step.double()
        for p, g, m, v in zip(params, grads, ms, vs, strict=True):
            m.lerp_(g, 1 - b1)
            v.lerp_(g * g, 1 - b2)
            u = (m / (1 - b1**t)) / (v / (1 - b2**t) + rule.eps).sqrt()
            p.mul_(1 - rule.lr * rule.weight_decay).sub_(rule.lr * u)

    patch.setattr(torch_impl.kernels.adam_cpu, "compiled", dict)  # so that torch's kernels are taken
    patch.setattr(torch_impl.adam_step, "_fused_", fused_)


def torch_matrix_update(patch, alter):
    """Replace the rule by ``alter(original, self, working, grad, state, group, role)``."""
    original = torch_impl.muon.MuonWithAuxAdamW.matrix_update_
    patch.setattr(torch_impl.muon.MuonWithAuxAdamW, "matrix_update_", lambda *args: alter(original, *args))


def torch_decay_after_step(patch):
    def alter(original, self, working, grad, state, group, role):
        original(self, working, grad, state, {**group, "weight_decay": 0.0}, role)
        working.mul_(1 - group["lr"] * group["weight_decay"])

    torch_matrix_update(patch, alter)


def torch_decay_by_scaled_lr(patch):
    def alter(original, self, working, grad, state, group, role):
        scale = 0.2 * math.sqrt(max(working.shape))
        original(self, working, grad, state, {**group, "weight_decay": group["weight_decay"] * scale}, role)

    torch_matrix_update(patch, alter)


def torch_stale_lr(patch):
    first = {}

    def alter(original, self, working, grad, state, group, role):
        lr = first.setdefault(id(group), group["lr"].clone())
        original(self, working, grad, state, {**group, "lr": lr}, role)

    torch_matrix_update(patch, alter)


def torch_schedule_late(patch):
    original = torch_impl.schedules.WSDScheduler.schedule
    patch.setattr(torch_impl.schedules.WSDScheduler, "schedule", lambda self, n: original(self, max(n - 1, 0)))


def torch_transposed(patch):
    original = torch_impl.muon.newton_schulz

    def newton_schulz(x, **options):
        result = original(x, **options)
        return result.mT if x.size(0) == x.size(1) else result

    patch.setattr(torch_impl.muon, "newton_schulz", newton_schulz)


def torch_sqrt_min(patch):
    patch.setattr(torch_impl.muon, "adjusted_lr_scale", lambda shape, scale: scale * math.sqrt(min(shape)))


def torch_nan_in_result(patch):
    def alter(original, self, working, grad, state, group, role):
        original(self, working, grad, state, group, role)
        if working.size(0) == 16 and group["step"] == 2:
            working[3, 1] = torch.nan

    torch_matrix_update(patch, alter)


# --- JAX --------------------------------------------------------------------------------------------------------------


def jax_momentum_as_average(patch):
    patch.setattr(jax_impl.muon, "update_momentum", lambda M, g, mu, active: mu * M + (1 - mu) * g)


def jax_nesterov_bias_corrected(patch):
    calls = []
    patch.setattr(jax_impl.muon, "descent_direction", lambda M, g, mu, nesterov: bias_corrected(calls, M, g))


def jax_eps_inside_root(patch):
    def adam_direction(mu, nu, count, betas, eps):
        return (mu / (1 - betas[0] ** count)) / jnp.sqrt(nu / (1 - betas[1] ** count) + eps)

    patch.setattr(FUSED_ADAM, "adam_direction", adam_direction)


def jax_descend(patch, alter, **override):
    """Replace the updates of every group by ``alter(updates, params, state, new_state, weight_decay)``."""
    original = jax_impl.build.descend

    def descend(direction, *, weight_decay, **options):
        inner = original(direction, weight_decay=override.get("weight_decay", weight_decay), **options)

        def update(grads, state, params=None, **extra):
            updates, new_state = inner.update(grads, state, params, **extra)
            return alter(updates, params, state, new_state, weight_decay), new_state

        return optax.GradientTransformationExtraArgs(inner.init, update)

    patch.setattr(jax_impl.build, "descend", descend)


def jax_decay_after_step(patch):
    def alter(updates, params, state, new_state, weight_decay):
        return jax.tree.map(lambda u, p: (p + u) * (1 - state.learning_rate * weight_decay) - p, updates, params)

    jax_descend(patch, alter, weight_decay=0.0)


def jax_decay_by_scaled_lr(patch):
    def alter(updates, params, state, new_state, weight_decay):
        def leaf(u, p):
            scale = 0.2 * math.sqrt(max(p.shape)) if p.ndim == 2 else 1.0
            return u - state.learning_rate * weight_decay * scale * p

        return jax.tree.map(leaf, updates, params)

    jax_descend(patch, alter, weight_decay=0.0)


def jax_stale_lr(patch):
    def alter(updates, params, state, new_state, weight_decay):
        return jax.tree.map(lambda u: u * (0.25 * LR / state.learning_rate) if u.ndim == 2 else u, updates)

    jax_descend(patch, alter)


def jax_schedule_late(patch):
    original = jax_impl.build.SCHEDULES["wsd"]

    @functools.wraps(original)
    def late(**kwargs):
        schedule = original(**kwargs)
        return lambda count: schedule(jnp.maximum(count - 1, 0))

    patch.setitem(jax_impl.build.SCHEDULES, "wsd", late)


def jax_transposed(patch):
    original = jax_impl.muon.newton_schulz

    def newton_schulz(x, **options):
        result = original(x, **options)
        return result.mT if x.shape[0] == x.shape[1] else result

    patch.setattr(jax_impl.muon, "newton_schulz", newton_schulz)


def jax_sqrt_min(patch):
    patch.setattr(jax_impl.muon, "adjusted_lr_scale", lambda shape, axes, scale: scale * math.sqrt(min(shape)))


def jax_nan_in_result(patch):
    def alter(updates, params, state, new_state, weight_decay):
        at_step_2 = state.schedule_count == 1
        return jax.tree.map(
            lambda u: jnp.where(at_step_2, u.at[1, 3].set(jnp.nan), u) if u.shape == (6, 16) else u, updates
        )

    jax_descend(patch, alter)


# fault: (plant on torch, plant on JAX, or how both are altered; stage; first step; tensors; has Python-side counters)
FAULTS = {
    "beta off by 0.1 %": (with_kwargs(adam_betas=(0.9009, 0.95)), "first moment", 1, VECTORS),
    "second beta off by 0.1 %": (with_kwargs(adam_betas=(0.9, 0.95095)), "second moment", 1, VECTORS),
    "momentum off by 0.1 %": (with_kwargs(muon_momentum=0.95 * 1.001), "momentum", 2, MATRICES),
    "momentum as average": ((torch_momentum_as_average, jax_momentum_as_average), "momentum", 1, MATRICES),
    "nesterov bias-corrected": (
        (torch_nesterov_bias_corrected, jax_nesterov_bias_corrected),
        "nesterov",
        2,
        MATRICES,
    ),
    "nesterov left out": (with_kwargs(nesterov=False), "nesterov", 2, MATRICES),
    "one Newton-Schulz step less": (with_kwargs(ns_steps=4), "newton-schulz", 1, MATRICES),
    "eps inside the root": ((torch_eps_inside_root, jax_eps_inside_root), "denominator", 1, VECTORS),
    "decay after the step": ((torch_decay_after_step, jax_decay_after_step), "decay", 1, MATRICES | VECTORS),
    "decay by the scaled lr": ((torch_decay_by_scaled_lr, jax_decay_by_scaled_lr), "decay", 1, MATRICES),
    "decay off by 0.1 %": (with_kwargs(weight_decay=DECAY * 1.001), "decay", 1, MATRICES | VECTORS),
    "schedule late by one": ((torch_schedule_late, jax_schedule_late), "learning rate", 2, MATRICES | VECTORS),
    "kernel transposed": ((torch_transposed, jax_transposed), "newton-schulz", 1, {"square.weight"}),
    "sqrt(max) by sqrt(min)": ((torch_sqrt_min, jax_sqrt_min), "scale", 1, {"up.weight"}),
    "a NaN in a gradient": ({"grads": nan_in_gradient}, "momentum", 3, {"square.weight"}),
    "a NaN in the result": ((torch_nan_in_result, jax_nan_in_result), "apply", 2, {"up.weight"}),
    "a dropped parameter": (
        with_kwargs(keys_to_select=["up", "square", "norm.s", "norm.w"]),
        "routing",
        1,
        {"norm.bias"},
    ),
    "a stale lr": ((torch_stale_lr, jax_stale_lr), "learning rate", 2, MATRICES),
    "lr off by 0.1 %": (with_kwargs(lr=LR * 1.001), "learning rate", 1, MATRICES | VECTORS),
}


# in bfloat16 a decay that is off by lr * decay of itself is smaller than the rounding of Newton-Schulz
RUNS = [(fault, side, "float64", "free") for fault in FAULTS for side in ("torch", "jax")]
RUNS += [(fault, "jax", "float32", "forced") for fault in FAULTS]
RUNS += [(fault, "torch", "bfloat16", "forced") for fault in FAULTS if fault != "decay after the step"]


@pytest.mark.parametrize(("fault", "side", "tier", "mode"), RUNS)
def test_planted_fault_is_found(fault, side, tier, mode, backends, monkeypatch):
    plant, stage, step, tensors = FAULTS[fault]
    # the oracle convicts the faulty side alone; one fault shows that the innocent side is not blamed
    sides = dict(backends) if fault == "a stale lr" else {side: backends[side]}
    eager = contextlib.nullcontext()
    if isinstance(plant, dict):
        sides[side] = Altered(backends[side], **plant)
    else:
        plant[("torch", "jax").index(side)](monkeypatch)
        if fault == "nesterov bias-corrected":
            eager = jax.disable_jit()  # the plant counts its calls
    with eager:
        result = run_case(CASE, TIERS[tier], mode, sides)
    found = result.divergence
    assert found is not None
    assert (found.suspect, found.stage, found.step) == (side, stage, step), str(found)
    assert found.tensor in tensors, str(found)
    message = str(found)
    for part in ("planted", side, found.tensor, stage, f"step {step} of 6", found.tolerance.reason, "-k planted"):
        assert part in message


LOW_PRECISION_FAULTS = {
    "torch": lambda patch: patch.setattr(torch_impl.aux_adamw, "write_back_", lambda param, working: None),
    "jax": lambda patch: patch.setattr(jax_impl.build, "keep_master_weights", never_lands),
}


def never_lands(inner):
    original = jax_impl.master_weights.keep_master_weights(inner)

    def update(grads, state, params=None, **extra):
        updates, state = original.update(grads, state, params, **extra)
        return jax.tree.map(jnp.zeros_like, updates), state

    return optax.GradientTransformationExtraArgs(original.init, update)


@pytest.mark.parametrize("side", LOW_PRECISION_FAULTS)
def test_parameters_that_leave_their_masters_are_found(side, backends, monkeypatch):
    LOW_PRECISION_FAULTS[side](monkeypatch)
    found = run_case(CASE, TIERS["bfloat16"], "forced", backends).divergence
    assert (found.suspect, found.stage, found.step, found.tolerance.name) == (side, "apply", 1, "rounded-master")


@pytest.mark.parametrize("eps", [1e-8, 1e-5])
def test_a_wrong_eps_of_the_norm_is_told_apart(eps, backends, monkeypatch):
    monkeypatch.setattr(
        sys.modules["jax_impl.newton_schulz"], "NORM_EPS", eps
    )  # the package has a function of that name
    case = dataclasses.replace(CASE, problem=dataclasses.replace(CASE.problem, gradients={}))
    found = run_case(case, TIERS["float64"], "free", backends).divergence
    assert (found.suspect, found.stage, found.step) == ("jax", "newton-schulz", 1)
    assert f"eps of the norm is {eps:.3g} instead" in found.note


@pytest.mark.parametrize("count", [1, 5])
def test_a_wrong_bias_correction_is_no_wrong_lr(count, backends, monkeypatch):
    original = FUSED_ADAM.adam_direction
    late = lambda mu, nu, t, betas, eps: original(mu, nu, t + count, betas, eps)  # noqa: E731
    monkeypatch.setattr(FUSED_ADAM, "adam_direction", late)
    found = run_case(CASE, TIERS["float64"], "free", backends).divergence
    assert (found.suspect, found.stage, found.step) == ("jax", "denominator", 1)


def test_input_of_another_size_is_no_newton_schulz_fault(backends):
    """Without Nesterov the first input is g instead of 1.95 g: the same direction, and only eps tells them apart."""
    case = dataclasses.replace(CASE, problem=dataclasses.replace(CASE.problem, gradients={}))
    sides = {**backends, "jax": Altered(backends["jax"], **with_kwargs(nesterov=False))}
    found = run_case(case, TIERS["float64"], "free", sides).divergence
    assert (found.suspect, found.stage, found.step) == ("jax", "nesterov", 1)
    assert "momentum alone" in found.note


def case_named(case_id):
    return next(case for case in CASES if case.id == case_id)


def moving_frozen(patch):
    still = jax_impl.build.freeze()
    moved = lambda g, s, p=None, **extra: (jax.tree.map(lambda x: x + 1e-3, still.update(g, s, p)[0]), s)  # noqa: E731
    patch.setattr(jax_impl.build, "freeze", lambda: optax.GradientTransformationExtraArgs(still.init, moved))


def ignores_lr_zero(patch):
    torch_matrix_update(
        patch, lambda original, self, w, g, state, group, role: original(self, w, g, state, {**group, "lr": LR}, role)
    )


def count_stops_without_gradient(patch):
    def step(self, closure=None):
        before = [group["step"].clone() for group in self.param_groups]
        original(self, closure)
        for group, count in zip(self.param_groups, before, strict=True):
            if any(p.grad is None for p in group["params"]):
                group["step"].copy_(count)

    original = torch_impl.muon.MuonWithAuxAdamW.step
    patch.setattr(torch_impl.muon.MuonWithAuxAdamW, "step", step)


def lr_slightly_off(patch):
    original = jax_impl.build.SCHEDULES["wsd"]

    @functools.wraps(original)
    def off(**kwargs):
        schedule = original(**kwargs)
        return lambda count: schedule(count) * (1 + 1e-6)

    patch.setitem(jax_impl.build.SCHEDULES, "wsd", off)


# (case, plant, or how one side is altered; tier, mode; side, stage, first step, tensors)
ELSEWHERE = {
    "a frozen parameter moves": ("adamw-frozen", moving_frozen, "float64", "free", "jax", "frozen", 1, "down"),
    "lr zero is ignored": ("muon-defaults", ignores_lr_zero, "float64", "free", "torch", "learning rate", 1, ""),
    "a group count stops": ("muon-gaps", count_stops_without_gradient, "float64", "free", "torch", "step count", 1, ""),
    "another role": (
        "muon-defaults",
        ("torch", with_kwargs(adamw_module_keywords=["up"])),
        "float64",
        "forced",
        "torch",
        "routing",
        1,
        "",
    ),
    "no nesterov on tiny gradients": (
        "muon-hard",
        ("jax", with_kwargs(nesterov=False)),
        "float64",
        "free",
        "jax",
        "nesterov",
        1,
        "",
    ),
    "lr off by 1e-6": ("muon-defaults", lr_slightly_off, "float32", "forced", "jax", "learning rate", 2, ""),
}


@pytest.mark.parametrize("fault", ELSEWHERE)
def test_planted_fault_in_another_case(fault, backends, monkeypatch):
    """Faults that the planted case cannot show; steps where f(0) = 0 show at the second update."""
    case_id, plant, tier, mode, side, stage, step, tensor = ELSEWHERE[fault]
    sides = dict(backends)
    if callable(plant):
        plant(monkeypatch)
    else:
        sides[plant[0]] = Altered(backends[plant[0]], **plant[1])
    found = run_case(case_named(case_id), TIERS[tier], mode, sides, 8).divergence
    assert (found.suspect, found.stage, found.step) == (side, stage, step), str(found)
    assert tensor in found.tensor


def test_without_a_fault_nothing_is_found(backends):
    for mode in ("free", "forced"):
        assert run_case(CASE, TIERS["float64"], mode, backends).passed
