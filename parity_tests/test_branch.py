"""``branch_from``: a schedule that leaves the stable phase early, on both sides, against the oracle and by hand."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jax_impl
import torch_impl
from parity_tests import reference
from parity_tests.test_golden import FLOAT64

WSD = dict(warm_up_steps=4, total_steps=40, decay_steps=10, f_start=0.0, f_max=1.0, f_min=0.2, decay_type="linear")
WSFD = {**WSD, "f_cooldown_start": 0.4}
ANNEALING = dict(
    init_lr=0.0,
    max_lr=1.0,
    min_lr=0.2,
    lr_warmup_steps=4,
    lr_decay_steps=40,
    start_wd=0.0,
    end_wd=0.5,
    wd_incr_steps=20,
    wd_incr_style="linear",
)
WSD_STYLE = {**ANNEALING, "lr_decay_style": "WSD", "wsd_decay_steps": 10, "lr_wsd_decay_style": "cosine"}
CONSTANT_STYLE = {**ANNEALING, "lr_decay_style": "constant"}


def build(kind, kwargs, side):
    if kind == "annealer" and side == "torch":
        groups = [{"lr": 1.0, "weight_decay": 0.5}]
        return torch_impl.OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **kwargs)
    if kind == "annealer":
        return jax_impl.OptimizerParamScheduler(**kwargs)
    schedules = {"torch": torch_impl.schedules.SCHEDULERS, "jax": jax_impl.schedules.SCHEDULES}
    return schedules[side][kind](**kwargs)


def value(schedule, n):
    if isinstance(schedule, torch_impl.OptimizerParamScheduler):
        schedule.step(n - schedule.num_steps)
        return schedule.get_lr({})
    return float(schedule.learning_rate(n) if isinstance(schedule, jax_impl.OptimizerParamScheduler) else schedule(n))


def oracle(kind, kwargs, step, decay_steps, decay_type):
    """The branch as a schedule of its own; wsfd's slow line is cut where it is left."""
    if kind == "annealer":
        changed = dict(lr_decay_style="WSD", lr_decay_steps=step + decay_steps, wsd_decay_steps=decay_steps)
        return lambda n: reference.annealed_lr(n, **{**kwargs, **changed, "lr_wsd_decay_style": decay_type})
    changed = dict(total_steps=step + decay_steps, decay_steps=decay_steps, decay_type=decay_type)
    if kind == "wsfd":
        changed["f_cooldown_start"] = 1.0 + (0.4 - 1.0) * (step - 4) / (30 - 4)
    return lambda n: reference.wsd(n, **{**kwargs, **changed})


# kind, kwargs, step of the branch, {options}, decay type in force, {n: value by hand}
BRANCHES = [
    ("wsd", WSD, 10, {"decay_steps": 4}, "linear", {2: 0.5, 10: 1.0, 11: 0.8, 13: 0.4, 14: 0.2, 99: 0.2}),
    ("wsd", WSD, 4, {"decay_steps": 4, "decay_type": "cosine"}, "cosine", {3: 0.75, 4: 1.0, 6: 0.6, 8: 0.2}),
    ("wsd", WSD, 30, {"decay_steps": 10}, "linear", {30: 1.0, 35: 0.6, 40: 0.2}),  # the old end: the schedule itself
    ("wsfd", WSFD, 17, {"decay_steps": 5}, "linear", {4: 1.0, 17: 0.7, 18: 0.6, 19: 0.5, 22: 0.2, 23: 0.2}),
    ("wsfd", WSFD, 30, {"decay_steps": 2}, "linear", {17: 0.7, 30: 0.4, 31: 0.3, 32: 0.2}),
    ("annealer", WSD_STYLE, 10, {"decay_steps": 4}, "cosine", {2: 0.5, 10: 1.0, 12: 0.6, 14: 0.2, 99: 0.2}),
    ("annealer", WSD_STYLE, 30, {"decay_steps": 8, "decay_type": "linear"}, "linear", {30: 1.0, 34: 0.6, 38: 0.2}),
    (
        "annealer",
        CONSTANT_STYLE,
        1000,
        {"decay_steps": 4, "decay_type": "minus_sqrt"},
        "minus_sqrt",
        {2: 0.5, 1000: 1.0, 1001: 0.6, 1004: 0.2, 1005: 0.2},
    ),
]


@pytest.mark.parametrize("side", ["torch", "jax"])
@pytest.mark.parametrize(("kind", "kwargs", "step", "options", "decay_type", "by_hand"), BRANCHES)
def test_branch(side, kind, kwargs, step, options, decay_type, by_hand):
    trunk = build(kind, kwargs, side)
    before = {n: value(trunk, n) for n in range(step + 1)}
    branch = trunk.branch_from(step, **options)
    expected = oracle(kind, kwargs, step, options["decay_steps"], decay_type)
    for n in range(step + 1):
        assert value(branch, n) == pytest.approx(before[n], rel=1e-15), n  # min + 1 (max - min) may round
    for n in range(step + options["decay_steps"] + 3):
        assert value(branch, n) == pytest.approx(expected(n), abs=FLOAT64), n
    for n, by_hand_value in by_hand.items():
        assert value(branch, n) == pytest.approx(by_hand_value, abs=FLOAT64), n


@pytest.mark.parametrize("side", ["torch", "jax"])
@pytest.mark.parametrize(
    ("kind", "kwargs", "step", "options", "error", "message"),
    [
        ("wsd", WSD, 3, {}, ValueError, "step must be in the stable phase, 4 to 30, got 3"),
        ("wsd", WSD, 31, {}, ValueError, "step must be in the stable phase, 4 to 30, got 31"),
        ("wsd", WSD, -1, {}, ValueError, "step must be finite and >= 0"),
        ("wsd", WSD, "10", {}, TypeError, "step must be a number"),
        ("wsd", WSD, 10, {"decay_steps": 0}, ValueError, "decay_steps must be finite and >= 1"),
        ("wsd", WSD, 10, {"decay_type": "minus_sqrt"}, ValueError, "decay_type must be one of"),
        ("wsfd", WSFD, 3, {}, ValueError, "step must be in the stable phase, 4 to 30, got 3"),
        ("wsfd", WSFD, 31, {}, ValueError, "step must be in the stable phase, 4 to 30, got 31"),
        ("annealer", WSD_STYLE, 3, {}, ValueError, "step must be in the stable phase, 4 to 30, got 3"),
        ("annealer", WSD_STYLE, 31, {}, ValueError, "step must be in the stable phase, 4 to 30, got 31"),
        ("annealer", WSD_STYLE, 10, {"decay_steps": 0}, ValueError, "decay_steps must be >= 1"),
        ("annealer", WSD_STYLE, 10, {"decay_type": "sqrt"}, ValueError, "lr_wsd_decay_style must be one of"),
        ("annealer", CONSTANT_STYLE, 3, {}, ValueError, "step must be in the stable phase, 4 to inf, got 3"),
        (
            "annealer",
            CONSTANT_STYLE,
            10,
            {},
            ValueError,
            "lr_wsd_decay_style must be one of",
        ),  # none to keep
        ("annealer", {**ANNEALING, "lr_decay_style": "cosine"}, 10, {}, ValueError, "lr_decay_style must be one of"),
    ],
)
def test_branch_outside_the_stable_phase(side, kind, kwargs, step, options, error, message):
    trunk = build(kind, kwargs, side)
    with pytest.raises(error, match=message):
        trunk.branch_from(step, **{"decay_steps": 5, **options})
    assert value(trunk, 20) == value(build(kind, kwargs, side), 20)


def test_a_branch_drives_the_optimizer_of_its_trunk():
    """Branched at step 12: the lr decays from there, factors are kept, the weight decay goes on as it was."""
    groups = [{"lr": 1.0, "weight_decay": 0.5}, {"lr": 0.5, "weight_decay": 0.0}]
    trunk = torch_impl.OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **WSD_STYLE)
    trunk.step(12)
    branch = trunk.branch_from(12, decay_steps=4, decay_type="linear")
    assert (branch.num_steps, branch.lr_decay_steps, trunk.lr_decay_steps) == (12, 16, 40)
    found = []
    for _ in range(5):
        found.append([groups[0]["lr"], groups[1]["lr"], groups[0]["weight_decay"], groups[1]["weight_decay"]])
        branch.step()
    lrs = [1.0, 0.8, 0.6, 0.4, 0.2]
    np.testing.assert_allclose(
        found, [[lr, lr / 2, 0.025 * n, 0.0] for n, lr in enumerate(lrs, 12)], rtol=0, atol=FLOAT64
    )


def test_a_branch_is_saved_as_it_is():
    """Its state continues on the other side, in an annealer built with the trunk's arguments."""
    trunk = jax_impl.OptimizerParamScheduler(**CONSTANT_STYLE)
    trunk.step(11)
    branch = trunk.branch_from(10, decay_steps=4, decay_type="linear")
    groups = [{"lr": 1.0, "weight_decay": 0.5}]
    resumed = torch_impl.OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **CONSTANT_STYLE)
    resumed.load_state_dict(branch.state_dict())
    assert groups[0]["lr"] == pytest.approx(0.8, rel=FLOAT64)
    assert resumed.state_dict() == branch.state_dict()


@pytest.mark.parametrize("x64", [True, False])
def test_a_branch_in_jax_can_be_traced(x64):
    with jax.enable_x64(x64):
        branch = jax_impl.wsfd_schedule(**WSFD).branch_from(17, decay_steps=5)
        found = jax.jit(jax.vmap(branch))(np.arange(17, 24, dtype=np.int32))
    np.testing.assert_allclose(found, [0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2], rtol=0, atol=1e-7 if not x64 else FLOAT64)
