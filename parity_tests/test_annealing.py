"""The annealer's lr and decay as functions: by hand, published configurations, every seam, every kind of step."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl
import torch_impl
from parity_tests.test_param_scheduler import EXACT, FLOAT32, FLOAT64, assert_close, evaluate

PRINTED = 1e-6  # relative to the peak; the values below have six digits or more

DECAY = dict(start_wd=0.0, end_wd=0.1, wd_incr_steps=10, wd_incr_style="linear")
NO_DECAY = dict(start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant")


def annealing(style, init_lr, max_lr, min_lr, warmup, end, wsd=None, wsd_style=None, **decay):
    return dict(
        init_lr=init_lr,
        max_lr=max_lr,
        min_lr=min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=end,
        lr_decay_style=style,
        wsd_decay_steps=wsd,
        lr_wsd_decay_style=wsd_style,
        **(decay or NO_DECAY),
    )


STYLES = {
    "constant": ("constant",),
    "linear": ("linear",),
    "cosine": ("cosine",),
    "inverse-square-root": ("inverse-square-root",),
    **{f"WSD {style}": ("WSD", style) for style in ("linear", "cosine", "exponential", "minus_sqrt")},
}
WARM_COSINE = [0, 0.5, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1, 0.1, 0.1]
NEMOTRON = annealing(
    "WSD", 0.0, 4.5e-4, 4.5e-6, 24_414_063, 3_048_706_055, 610_351_563, "minus_sqrt", **{**DECAY, "wd_incr_steps": 4}
)

# name: (kwargs, {step: lr}, {step: decay})
BY_HAND = {
    "without warm-up step 0 has the peak": (
        annealing("WSD", 0.0, 1.0, 0.1, 0, 6, 2, "linear"),
        dict(enumerate([1, 1, 1, 1, 1, 0.55, 0.1, 0.1])),
        {0: 0.0},
    ),
    "cosine from the first step": (annealing("cosine", 0, 1, 0.1, 0, 10, **DECAY), {5: 0.55}, {0: 0, 5: 0.05, 11: 0.1}),
    "warm-up of two, cosine to ten": (
        annealing("cosine", 0.0, 1.0, 0.1, 2, 10, **DECAY),
        dict(enumerate(WARM_COSINE)),
        {n: min(0.01 * n, 0.1) for n in range(13)},
    ),
    "decay that rises along half a cosine": (
        annealing("constant", 0, 1, 0, 0, 1, start_wd=0.1, end_wd=0.5, wd_incr_steps=4, wd_incr_style="cosine"),
        {0: 1, 1: 1, 10**9: 1},
        {0: 0.1, 1: 0.158579, 2: 0.3, 3: 0.441421, 4: 0.5, 5: 0.5},  # 0.3 -+ 0.2 cos(pi n / 4)
    ),
    "inverse square root": (
        annealing("inverse-square-root", 0.0, 1.0, 0.3, 4, 100),
        {2: 0.5, 4: 1.0, 16: 0.5, 25: 0.4, 64: 0.3, 100: 0.3, 101: 0.3},
        {},
    ),
    "WSD exponential": (
        annealing("WSD", 0, 1, 0, 0, 4, 2, "exponential"),
        {2: 1.0, 3: 0.414214, 4: 0.0, 5: 0.0},  # 2 / sqrt(2) - 1
        {},
    ),
    "WSD without a decay drops to its floor": (
        annealing("WSD", 0.0, 1.0, 0.1, 2, 6, 0, "minus_sqrt"),
        {1: 0.5, 5: 1.0, 6: 1.0, 7: 0.1},
        {},
    ),
    "Automodel megatron_pretrain_gpt2": (
        annealing(
            "cosine", 6e-5, 6e-4, 0.0, 700, 18500, start_wd=0.1, end_wd=0.1, wd_incr_steps=1, wd_incr_style="constant"
        ),
        {0: 6e-5, 350: 3.3e-4, 700: 6e-4, 9600: 3e-4, 18500: 0.0},
        {0: 0.1, 18500: 0.1},
    ),
    "Automodel qwen3_4b_dflash": (annealing("cosine", 0, 6e-4, 0, 2000, 20000), {0: 0, 1000: 3e-4, 2000: 6e-4}, {}),
    "Automodel llama_peft": (
        annealing("cosine", 1e-5, 1e-4, 1e-6, 207, 20000),
        {0: 1e-5, 207: 1e-4, 250: 9.9998847e-5},
        {},
    ),
    "Megatron nemotron3_super, in samples": (
        NEMOTRON,
        {
            0: 0,
            12_207_031: 2.25e-4,
            24_414_063: 4.5e-4,
            2_438_354_492: 4.5e-4,
            2_438_354_492 + 152_587_891: 2.2725e-4,  # a quarter of the way down: 1 - sqrt(1/4)
            3_048_706_055: 4.5e-6,
            4_000_000_000: 4.5e-6,
        },
        {2: 0.05, 4: 0.1, 3_048_706_055: 0.1},
    ),
    "Megatron gpt3_moe muon": (
        annealing("cosine", 0, 1.5e-4, 1e-5, 3200, 320000),
        {50: 2.34375e-6, 100: 4.6875e-6},
        {},
    ),
}


def torch_annealer(kwargs):
    groups = [{"lr": 1.0, "weight_decay": 1.0}]
    return torch_impl.OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **kwargs)


def trajectory(side, kwargs, steps):
    """(lr, decay) at ``steps``."""
    if side != "torch":
        return evaluate(side, kwargs, steps)
    scheduler, found = torch_annealer(kwargs), []
    for step in steps:
        scheduler.step(int(step) - scheduler.num_steps)
        found.append((scheduler.get_lr({}), scheduler.get_wd()))
    return tuple(np.array(found).T)


@pytest.mark.parametrize("side", ["reference", "torch", "jax", "jax32"])
@pytest.mark.parametrize("row", BY_HAND)
def test_by_hand(row, side):
    kwargs, *expected = BY_HAND[row]
    for index, values in enumerate(expected):
        if values:
            found = trajectory(side, kwargs, list(values))[index]
            np.testing.assert_allclose(found, list(values.values()), rtol=0, atol=PRINTED * max(*values.values(), 1e-9))


SCALES = {"short": (7, 60, 21), "samples": (24_414_063, 3_048_706_055, 610_351_563)}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("wd_style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("style", STYLES)
def test_every_seam(style, wd_style, scale):
    """Both sides and the oracle at every boundary +-1, halfway between, at zero and past the end."""
    warmup, end, wsd = SCALES[scale]
    incr = end - end // 4
    start_wd = 0.3 if wd_style == "constant" else 0.02
    decay = dict(start_wd=start_wd, end_wd=0.3, wd_incr_steps=incr, wd_incr_style=wd_style)
    name, wsd_style = (*STYLES[style], None)[:2]
    kwargs = annealing(name, 1e-4, 1e-3, 1e-5, warmup, end, wsd, wsd_style, **decay)
    seams = [0, warmup, incr, end - wsd, end]
    halfway = [(a + b) // 2 for a, b in zip(sorted(seams), sorted(seams)[1:], strict=False)]
    steps = sorted({0, 1, *halfway, end + end // 3, *(max(0, seam + k) for seam in seams for k in (-1, 0, 1))})
    expected = trajectory("reference", kwargs, steps)
    for side in ("torch", "jax", "jax32"):
        for found, values in zip(trajectory(side, kwargs, steps), expected, strict=True):
            assert_close(found, values, side)


@pytest.mark.parametrize("x64", [True, False])
def test_steps_of_every_kind(x64):
    """Python and numpy numbers beyond 32 bits, floats, arrays, small and unsigned integers, under jit and vmap."""
    with jax.enable_x64(x64):
        scheduler = jax_impl.OptimizerParamScheduler(**annealing("linear", 0.0, 1.0, 0.0, 100, 4 * 10**12 + 100))
        for step in (10**12 + 100, np.int64(10**12 + 100), 1e12 + 100):
            assert float(scheduler.learning_rate(step)) == pytest.approx(0.75, abs=FLOAT32)
        for step in (25, np.int16(25), jnp.uint8(25), jnp.int8(25), jnp.uint32(25), jnp.float32(25.0)):
            assert float(scheduler.learning_rate(step)) == pytest.approx(0.25, abs=FLOAT32), repr(step)
        steps = np.array([[0, 25], [50, 75]])
        one_by_one = jax.vmap(jax.vmap(scheduler.learning_rate))(jnp.asarray(steps))
        for found in (scheduler.learning_rate(steps), jax.jit(scheduler.learning_rate)(steps), one_by_one):
            assert found.shape == (2, 2)
            assert found.dtype == jnp.result_type(float)
            np.testing.assert_allclose(found, steps / 100, rtol=0, atol=FLOAT32)


def test_single_steps_late_in_a_run_in_float32():
    """Near 1e8 float32 counts in eights; a decay of ten steps must still go step by step."""
    kwargs = annealing("WSD", 0.0, 1.0, 0.0, 4, 10**8 + 10, 10, "linear", **{**DECAY, "wd_incr_steps": 10**8})
    with jax.enable_x64(False):
        scheduler = jax_impl.OptimizerParamScheduler(**kwargs)
        for dtype in (jnp.int32, jnp.uint32):
            found = jax.jit(scheduler.learning_rate)(jnp.asarray(10**8, dtype) + jnp.arange(12, dtype=dtype))
            np.testing.assert_allclose(found, [*np.linspace(1, 0, 11), 0], rtol=0, atol=FLOAT32)


def test_bounds_of_a_group_may_be_traced():
    scheduler = jax_impl.OptimizerParamScheduler(**annealing("linear", 0.0, 1.0, 0.0, 2, 10))
    lr = jax.jit(lambda s, high, low: scheduler.learning_rate(s, max_lr=high, min_lr=low))
    assert float(lr(1, 3.0, 1.0)) == pytest.approx(1.5)  # halfway up
    assert float(lr(6, 3.0, 1.0)) == pytest.approx(2.0)  # halfway down
    assert float(lr(11, 3.0, 1.0)) == 1.0


def build(side, kwargs):
    return torch_annealer(kwargs) if side == "torch" else jax_impl.OptimizerParamScheduler(**kwargs)


@pytest.mark.parametrize("side", ["torch", "jax"])
def test_a_decay_that_falls(side):
    falling = dict(start_wd=0.3, end_wd=0.1, wd_incr_steps=4, wd_incr_style="linear")
    kwargs = annealing("constant", 0.0, 1.0, 0.0, 0, 1, **falling)
    with pytest.raises(ValueError, match=r"end_wd must be >= start_wd 0\.3 without allow_decreasing_wd, got 0\.1"):
        build(side, kwargs)
    scheduler = build(side, {**kwargs, "allow_decreasing_wd": True})
    if side == "torch":
        scheduler.step(3)
        assert scheduler.get_wd() == pytest.approx(0.15)
    else:
        np.testing.assert_allclose(scheduler.weight_decay(np.arange(6)), [0.3, 0.25, 0.2, 0.15, 0.1, 0.1], rtol=FLOAT64)
    # a state says what was allowed when it was saved
    resumed = build(side, annealing("constant", 0.0, 1.0, 0.0, 0, 1))
    resumed.load_state_dict(scheduler.state_dict())
    assert (resumed.start_wd, resumed.end_wd) == (0.3, 0.1)


GOOD = annealing("WSD", 0.0, 1.0, 0.1, 2, 10, 4, "linear", **DECAY)


@pytest.mark.parametrize("side", ["torch", "jax"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        *(({name: "1"}, TypeError, f"{name} must be a number, got '1'") for name in ("init_lr", "max_lr", "min_lr")),
        *(({name: None}, TypeError, f"{name} must be a number, got None") for name in ("start_wd", "end_wd")),
        *(({name: True}, TypeError, f"{name} must be a number") for name in ("lr_warmup_steps", "lr_decay_steps")),
        *(({name: -1}, ValueError, f"{name} must be finite and >= 0") for name in ("wd_incr_steps", "wsd_decay_steps")),
        ({"init_lr": -0.1}, ValueError, "init_lr must be finite and >= 0"),
        ({"max_lr": float("nan")}, ValueError, "max_lr must be finite"),
        ({"lr_decay_steps": float("inf")}, ValueError, "lr_decay_steps must be finite"),
        ({"lr_decay_style": None}, ValueError, "lr_decay_style must be one of .*'WSD'.*, got None"),
        ({"lr_decay_style": ["WSD"]}, ValueError, "lr_decay_style must be one of"),
        ({"lr_decay_style": "cosine", "lr_wsd_decay_style": "sqrt"}, ValueError, "lr_wsd_decay_style must be one of"),
        ({"wd_incr_style": "Linear"}, ValueError, "wd_incr_style must be one of"),
        ({"use_checkpoint_opt_param_scheduler": 1}, TypeError, "use_checkpoint_opt_param_scheduler must be True or"),
        ({"override_opt_param_scheduler": None}, TypeError, "override_opt_param_scheduler must be True or False"),
        ({"allow_decreasing_wd": "no"}, TypeError, "allow_decreasing_wd must be True or False"),
        ({"warmup": 3}, TypeError, "warmup"),
    ],
)
def test_bad_arguments(side, change, error, message):
    with pytest.raises(error, match=message):
        build(side, {**GOOD, **change})


STATE = torch_annealer(GOOD).state_dict()


@pytest.mark.parametrize("side", ["torch", "jax"])
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.step(1.5), TypeError, "increment must be an integer, got 1.5"),
        (lambda s: s.step(True), TypeError, "increment must be an integer"),
        (lambda s: s.load_state_dict([STATE]), TypeError, "state_dict must be a mapping"),
        (lambda s: s.load_state_dict({**STATE, "num_steps": 7.0}), TypeError, "num_steps must be an integer, got 7.0"),
        (lambda s: s.load_state_dict({**STATE, "max_lr": "1"}), TypeError, "max_lr must be a number, got '1'"),
        (lambda s: s.load_state_dict({**STATE, "max_lr": -1.0}), ValueError, "max_lr must be finite and >= 0"),
        (lambda s: s.load_state_dict({**STATE, "min_lr": 2.0}), ValueError, "min_lr must be <= max_lr 1.0, got 2.0"),
        (lambda s: s.load_state_dict({**STATE, "lr_decay_style": "wsd"}), ValueError, "lr_decay_style must be one of"),
        (lambda s: s.load_state_dict({**STATE, "base_lrs": [1.0]}), ValueError, r"unknown \['base_lrs'\]"),
        (lambda s: s.load_state_dict({}), ValueError, "missing .*'num_steps'"),
        (
            lambda s: s.load_state_dict({k: v for k, v in STATE.items() if k != "wd_incr_steps"}),
            ValueError,
            r"missing \['wd_incr_steps'\]",
        ),
    ],
)
def test_a_call_that_raises_changes_nothing(side, call, error, message):
    scheduler = build(side, GOOD)
    scheduler.step(5)
    before = repr(scheduler)
    with pytest.raises(error, match=message):
        call(scheduler)
    assert repr(scheduler) == before
    assert before.startswith("OptimizerParamScheduler(num_steps=5, init_lr=0.0, max_lr=1.0")


@pytest.mark.parametrize("style", STYLES)
def test_states_cross_over(style):
    """Each side loads the other's state, by way of JSON, and gives the other's lr and decay."""
    name, wsd_style = (*STYLES[style], None)[:2]
    kwargs = annealing(name, 1e-4, 1e-3, 1e-5, 4, 16, 6, wsd_style, **DECAY)
    other = annealing("linear", 0.0, 2.0, 0.0, 0, 5)
    there, here = torch_annealer(kwargs), jax_impl.OptimizerParamScheduler(**other)
    there.step(13)
    here.load_state_dict(json.loads(json.dumps(there.state_dict())))
    back = torch_annealer(other)
    back.load_state_dict(json.loads(json.dumps(here.state_dict())))
    assert there.state_dict() == here.state_dict() == back.state_dict()
    assert (back.get_lr({}), back.get_wd()) == (there.get_lr({}), there.get_wd())
    assert float(here.learning_rate(here.num_steps)) == pytest.approx(there.get_lr({}), rel=FLOAT64)
    assert float(here.weight_decay(here.num_steps)) == pytest.approx(there.get_wd(), rel=EXACT)
