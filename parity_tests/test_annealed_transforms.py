"""The annealer inside JAX transforms, against the annealer of torch on the same optimizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import jax_impl
import torch_impl
from parity_tests.test_annealing import STYLES, annealing

FLOAT64 = 1e-12
RISING = dict(start_wd=0.02, end_wd=0.3, wd_incr_steps=10, wd_incr_style="linear")
OPTIONS = dict(
    lr=1e-3, weight_decay=0.1, fused=True, lr_multipliers={"head": 5.0}, disable_weight_decay_for_1d_params=True
)
EXTRA = {"muonwithauxadamw": {"ns_dtype": "float64"}}
SHAPES = {"trunk": {"weight": (4, 3), "bias": (4,)}, "head": {"weight": (2, 4), "bias": (2,)}}


def trees(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape)), SHAPES, is_leaf=lambda x: type(x) is tuple)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("optimizer_type", jax_impl.config.CONFIGS)
def test_updates_and_trajectories_are_those_of_torch(optimizer_type, style):
    name, wsd_style = (*STYLES[style], None)[:2]
    kwargs = annealing(name, 0.0, 1e-2, 1e-4, 3, 10, 4, wsd_style, **RISING)
    params = trees(0)
    model = nn.ModuleDict({"trunk": nn.Linear(3, 4), "head": nn.Linear(4, 2)}).double()
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        model.get_parameter(f"{path[0].key}.{path[1].key}").data = torch.tensor(np.asarray(value))
    options = {**OPTIONS, **EXTRA.get(optimizer_type, {})}
    optimizer = torch_impl.build_optimizer(model, optimizer_type, **options)
    scheduler = torch_impl.OptimizerParamScheduler(optimizer, **kwargs)
    annealer = jax_impl.OptimizerParamScheduler(**kwargs)
    transform = jax_impl.build_optimizer(
        params, optimizer_type, lr_schedule=annealer, weight_decay_schedule=annealer, **options
    )
    state = transform.init(params)
    update = jax.jit(transform.update)
    for step in range(14):
        values = jax_impl.hyperparameters(state).values()
        groups = [group for inner in optimizer for group in inner.param_groups]
        for ours, theirs in zip(values, groups, strict=True):
            np.testing.assert_allclose(float(ours.learning_rate), float(theirs["lr"]), rtol=FLOAT64, atol=1e-18)
            np.testing.assert_allclose(float(ours.weight_decay), float(theirs["weight_decay"]), rtol=FLOAT64)
        grads = trees(100 + step)
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        for path, g in jax.tree_util.tree_leaves_with_path(grads):
            model.get_parameter(f"{path[0].key}.{path[1].key}").grad = torch.tensor(np.asarray(g))
        optimizer.step()
        scheduler.step()
    for path, value in jax.tree_util.tree_leaves_with_path(params):
        theirs = model.get_parameter(f"{path[0].key}.{path[1].key}").detach().numpy()
        np.testing.assert_allclose(value, theirs, rtol=1e-10, atol=1e-12)


HAND = annealing("linear", 0.0, 1.0, 0.2, 4, 8, start_wd=0.0, end_wd=0.1, wd_incr_steps=10, wd_incr_style="linear")


def learning_rates(given, steps, **options):
    """lr and decay of every group after ``steps`` updates."""
    params = trees(0)
    transform = jax_impl.build_optimizer(
        params, "adamw", lr_schedule=given, weight_decay_schedule=given, **{**OPTIONS, **options}
    )
    state = transform.set_hyperparameters(transform.init(params), step=steps)
    return [[float(v.learning_rate), float(v.weight_decay)] for v in jax_impl.hyperparameters(state).values()]


@pytest.mark.parametrize(
    ("given", "steps", "expected"),
    [
        # groups: trunk without and with decay, head (5 times the lr) without and with
        ("one", 2, [[0.5, 0.0], [0.5, 0.02], [2.5, 0.0], [2.5, 0.02]]),
        ("one", 6, [[0.6, 0.0], [0.6, 0.06], [3.0, 0.0], [3.0, 0.06]]),
        ("bounds", 6, [[0.6, 0.06], [1e-3, 0.1], [1.1, 0.06], [5e-3, 0.1]]),
        ("samples", 3, [[0.6, 0.0], [0.6, 0.06], [3.0, 0.0], [3.0, 0.06]]),
    ],
)
def test_factors_bounds_and_samples(given, steps, expected):
    annealer = jax_impl.OptimizerParamScheduler(**HAND)
    higher = jax_impl.OptimizerParamScheduler(**{**HAND, "max_lr": 2.0})
    schedules = {
        "one": annealer,
        "bounds": {0: annealer, 2: higher},
        "samples": jax_impl.OptimizerParamScheduler(**HAND, step_size=2),
    }
    np.testing.assert_allclose(learning_rates(schedules[given], steps), expected, rtol=FLOAT64)


@pytest.mark.parametrize("step_size", [1, 7, 2048])
@pytest.mark.parametrize("x64", [True, False])
def test_samples_beyond_32_bits(step_size, x64):
    """Around every seam of a run of 3e12 samples, against torch counting samples in whole numbers."""
    kwargs = annealing("WSD", 0.0, 1.0, 0.1, 1_000_003, 3 * 10**12, 10**12 + 1, "minus_sqrt", **RISING)
    if step_size == 1:
        kwargs |= dict(lr_decay_steps=2_000_000_011, wsd_decay_steps=999_999_999)
    reference = torch_impl.annealing.Annealing(**kwargs)
    annealer = jax_impl.OptimizerParamScheduler(**kwargs, step_size=step_size)
    end, start = kwargs["lr_decay_steps"], kwargs["lr_decay_steps"] - kwargs["wsd_decay_steps"]
    counts = sorted({seam // step_size + k for seam in (1_000_003, start, end) for k in (-1, 0, 1, 2)})
    with jax.enable_x64(x64):
        found = jax.jit(annealer.learning_rate)(jnp.asarray(counts, jnp.int32)) if counts[-1] < 2**31 - 1 else None
        if found is None:
            found = jnp.asarray([annealer.learning_rate(count) for count in counts])
        expected = [reference.learning_rate(count * step_size) for count in counts]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 if x64 else 2e-7)


@pytest.mark.parametrize(
    ("schedules", "options", "error", "message"),
    [
        (lambda a: {"lr_schedule": a.learning_rate}, {}, TypeError, "the annealer, not its method"),
        (lambda a: {"lr_schedule": 0.1}, {}, TypeError, "lr_schedule must be a function of the step or an annealer"),
        (lambda a: {"weight_decay_schedule": {"0": a}}, {}, TypeError, "groups by their numbers, got '0'"),
        (lambda a: {"weight_decay_schedule": {7: a}}, {}, ValueError, r"no group \[7\], only \[0, 1, 2, 3\]"),
        (lambda a: {"weight_decay_schedule": a}, {"weight_decay": 0.0}, ValueError, "built with weight_decay > 0"),
    ],
)
def test_wrong_schedules(schedules, options, error, message):
    with pytest.raises(error, match=message):
        jax_impl.build_optimizer(
            trees(0), "adamw", **schedules(jax_impl.OptimizerParamScheduler(**HAND)), **{**OPTIONS, **options}
        )


@pytest.mark.parametrize(("step_size", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_wrong_step_sizes(step_size, error):
    with pytest.raises(error, match="step_size must be"):
        jax_impl.OptimizerParamScheduler(**HAND, step_size=step_size)


def test_an_annealer_goes_on_after_a_restore():
    """Override: the new annealer at the saved count."""
    params = trees(0)
    old, new = (jax_impl.OptimizerParamScheduler(**{**HAND, "max_lr": top}) for top in (1.0, 2.0))
    first, second = (
        jax_impl.build_optimizer(params, "adamw", lr_schedule=a, weight_decay_schedule=a, **OPTIONS) for a in (old, new)
    )
    state = first.set_hyperparameters(first.init(params), step=4)
    restored = second.restore(second.init(params), state, override=True)
    assert [float(v.learning_rate) for v in jax_impl.hyperparameters(restored).values()] == [2.0, 2.0, 10.0, 10.0]


def test_an_annealer_in_use_keeps_its_values():
    """A compiled step would keep them anyway: the same values load, others raise; a branch is free again."""
    annealer = jax_impl.OptimizerParamScheduler(**HAND)
    state = annealer.state_dict()
    annealer.load_state_dict({**state, "max_lr": 2.0})
    with pytest.raises(ValueError, match="no group"):
        jax_impl.build_optimizer(trees(0), "adamw", lr_schedule={9: annealer}, **OPTIONS)
    annealer.load_state_dict(state)
    jax_impl.build_optimizer(trees(0), "adamw", lr_schedule={0: annealer}, **OPTIONS)
    annealer.load_state_dict({**state, "num_steps": 7})
    with pytest.raises(ValueError, match="load before build_optimizer"):
        annealer.load_state_dict({**state, "max_lr": 2.0})
    assert annealer.state_dict() == {**state, "num_steps": 7}
    stable = jax_impl.OptimizerParamScheduler(**{**HAND, "lr_decay_style": "constant"})
    jax_impl.build_optimizer(trees(0), "adamw", lr_schedule=stable, **OPTIONS)
    branch = stable.branch_from(5, decay_steps=2, decay_type="linear")
    branch.load_state_dict({**branch.state_dict(), "max_lr": 2.0})
    assert float(branch.learning_rate(5)) == 2.0
