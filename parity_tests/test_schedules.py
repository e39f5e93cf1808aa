"""Schedules beyond the golden values: rows derived by hand, seams, float32, horizons beyond 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl
from parity_tests.cases import SCHEDULE_CASES
from parity_tests.schedule_parity import compare_schedule
from parity_tests.test_golden import build_schedule

FLOAT64 = 1e-12
FLOAT32 = 2e-7  # of the peak: 1 + cos cancels near the end
PRINTED = 5e-7  # the values below have six digits

COSINE_10 = {"warm_up_steps": [0], "f_start": [0.0], "f_max": [1.0], "f_min": [0.1], "cycle_lengths": [10]}
COSINE_WARM = {**COSINE_10, "warm_up_steps": [4]}

# (type, kwargs, {n: multiplier})
BY_HAND = {
    "wsd linear, no stable phase": (
        "wsd",
        dict(warm_up_steps=2, total_steps=10, decay_steps=8, f_start=0.0, f_max=1.0, f_min=0.0, decay_type="linear"),
        dict(enumerate([0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0])),
    ),
    "wsd linear": (
        "wsd",
        dict(warm_up_steps=4, total_steps=10, decay_steps=4, f_start=0.0, f_max=1.0, f_min=0.0, decay_type="linear"),
        dict(enumerate([0, 0.25, 0.5, 0.75, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])),
    ),
    "wsd cosine": (
        "wsd",
        dict(warm_up_steps=2, total_steps=10, decay_steps=4, f_start=0.1, f_max=1.0, f_min=0.1),
        dict(enumerate([0.1, 0.55, 1, 1, 1, 1, 1, 0.868198, 0.55, 0.231802, 0.1, 0.1])),
    ),
    "wsd without warm-up starts at the top": (
        "wsd",
        dict(warm_up_steps=0, total_steps=6, decay_steps=2, f_start=0.0, f_max=1.0, f_min=0.1, decay_type="linear"),
        dict(enumerate([1, 1, 1, 1, 1, 0.55, 0.1])),
    ),
    "cosine divides by its length": ("lambdacosine", COSINE_10, {0: 1, 5: 0.55, 9: 0.122025, 10: 0.1, 11: 0.1}),
    "cosine length includes the warm-up": (
        "lambdacosine",
        COSINE_WARM,
        dict(
            enumerate([0, 0.25, 0.5, 0.75, 1, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1, 0.1, 0.1]),
        ),
    ),
    "wsfd: slow from 1 to 0.6 over 4, fast to 0.2 over 2": (
        "wsfd",
        dict(
            warm_up_steps=2,
            total_steps=8,
            decay_steps=2,
            f_start=0.0,
            f_max=1.0,
            f_cooldown_start=0.6,
            f_min=0.2,
            decay_type="linear",
        ),
        dict(enumerate([0, 0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2, 0.2])),
    ),
    "warm-up as long as its cycle ends on the ramp": (
        "lambdalinear",
        dict(warm_up_steps=[4], f_start=[0.0], f_max=[1.0], f_min=[0.3], cycle_lengths=[4]),
        {0: 0, 3: 0.75, 4: 1, 5: 1, 100: 1},
    ),
    "a longer warm-up is cut off and held": (
        "lambdacosine",
        dict(warm_up_steps=[1000], f_start=[0.05], f_max=[1.0], f_min=[0.5], cycle_lengths=[500]),
        {0: 0.05, 500: 0.525, 501: 0.525, 10**6: 0.525},
    ),
    "a boundary step belongs to the earlier cycle": (
        "lambdalinear",
        dict(warm_up_steps=[0, 0], f_start=[0.0, 0.0], f_max=[1.0, 0.8], f_min=[0.2, 0.0], cycle_lengths=[4, 4]),
        {0: 1, 4: 0.2, 5: 0.6, 8: 0, 9: 0},
    ),
    "a last cycle of zero length is never entered": (
        "lambdalinear",
        dict(warm_up_steps=[2, 5], f_start=[0.0, 0.9], f_max=[1.0, 1.0], f_min=[0.2, 0.5], cycle_lengths=[6, 0]),
        {0: 0, 2: 1, 4: 0.6, 6: 0.2, 7: 0.2, 100: 0.2},
    ),
    "a horizon of 1e13": (
        "lambdalinear",
        dict(warm_up_steps=[1000], f_start=[1e-6], f_max=[1.0], f_min=[1.0], cycle_lengths=[10**13]),
        {0: 1e-6, 500: 0.5000005, 1000: 1, 2 * 10**9: 1},
    ),
}


@pytest.mark.parametrize("side", ["reference", "torch", "jax"])
@pytest.mark.parametrize("row", BY_HAND)
def test_by_hand(row, side, backends):
    lr_scheduler_type, kwargs, values = BY_HAND[row]
    schedule = build_schedule(side, lr_scheduler_type, kwargs)
    for n, expected in values.items():
        assert float(schedule(n)) == pytest.approx(expected, abs=PRINTED), n


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("row", BY_HAND)
def test_traced_in_both_precisions(row, x64):
    """Under jit, vmap and grad; in float32 no value may be further off than float32 allows."""
    lr_scheduler_type, kwargs, values = BY_HAND[row]
    counts = np.array([n for n in values if n < 2**31], np.int32)
    with jax.enable_x64(x64):
        schedule = jax_impl.build_lr_schedule(lr_scheduler_type, **kwargs)
        at_once = jax.jit(schedule)(jnp.asarray(counts))
        one_by_one = jax.vmap(schedule)(jnp.asarray(counts))
        slopes = jax.vmap(jax.grad(schedule))(jnp.asarray(counts, float))
        assert at_once.dtype == (jnp.float64 if x64 else jnp.float32)
        assert at_once.shape == counts.shape
        np.testing.assert_allclose(at_once, [values[int(n)] for n in counts], atol=PRINTED, rtol=0)
        np.testing.assert_allclose(at_once, one_by_one, atol=FLOAT32, rtol=0)
        assert np.isfinite(slopes).all()


@pytest.mark.parametrize("case", SCHEDULE_CASES, ids=lambda case: case.id)
def test_around_every_seam(case):
    result = compare_schedule(case)
    assert result.passed, result.failure()
    for seam in case.seams:
        assert {max(0, seam - 1), seam, seam + 1} <= set(result.steps.tolist())
    assert result.errors["jax"] <= FLOAT64
    assert result.errors["jax32"] <= FLOAT32


def test_counts_of_every_kind():
    """Host numbers beyond 32 bits, numpy scalars, unsigned and small integers give the same as a Python int."""
    kwargs = dict(warm_up_steps=[1000], f_start=[0.0], f_max=[1.0], f_min=[0.0], cycle_lengths=[4 * 10**12])
    with jax.enable_x64(False):
        schedule = jax_impl.build_lr_schedule("lambdalinear", **kwargs)
        assert float(schedule(10**12)) == pytest.approx(0.75, abs=FLOAT32)  # (1e12 - 1e3) / (4e12 - 1e3) is done
        assert float(schedule(np.int64(2 * 10**12))) == pytest.approx(0.5, abs=FLOAT32)
        for count in (100, np.int16(100), jnp.uint8(100), jnp.uint32(100), jnp.int8(100), jnp.float32(100.0)):
            assert float(schedule(count)) == pytest.approx(0.1, abs=FLOAT32), repr(count)


def test_late_cycles_keep_their_steps_in_float32():
    """At a count of 1e8 float32 counts in eights; the position within a cycle of 10 steps must still be exact."""
    kwargs = dict(warm_up_steps=[0, 0], f_start=[0.0] * 2, f_max=[1.0] * 2, f_min=[1.0, 0.0], cycle_lengths=[10**8, 10])
    with jax.enable_x64(False):
        schedule = jax.jit(jax_impl.build_lr_schedule("lambdalinear", **kwargs))
        found = [float(schedule(10**8 + k)) for k in range(1, 12)]
    np.testing.assert_allclose(found, [*np.arange(0.9, -0.05, -0.1), 0.0], atol=FLOAT32)


def test_unsigned_counts_beyond_float32():
    """uint32 counts near 1e8, where float32 counts in eights."""
    kwargs = dict(warm_up_steps=[0, 0], f_start=[0.0] * 2, f_max=[1.0] * 2, f_min=[1.0, 0.0], cycle_lengths=[10**8, 10])
    with jax.enable_x64(False):
        schedule = jax.jit(jax_impl.build_lr_schedule("lambdalinear", **kwargs))
        assert float(schedule(jnp.uint32(10**8 + 3))) == pytest.approx(0.7, abs=FLOAT32)
        assert float(schedule(jnp.uint32(3 * 10**9))) == 0.0


def test_torch_values_survive_a_weights_only_checkpoint():
    schedule = build_schedule("torch", "lambdacosine", COSINE_WARM)
    assert {type(schedule(n)) for n in range(13)} == {float}


@pytest.mark.parametrize("side", ["torch", "jax"])
@pytest.mark.parametrize(
    ("lr_scheduler_type", "change", "error", "message"),
    [
        ("lambdacosine", {"f_max": [1.0, 2.0]}, ValueError, "same number of entries"),
        ("lambdacosine", {name: [] for name in COSINE_10}, ValueError, "at least one"),
        ("lambdalinear", {"warm_up_steps": 4}, TypeError, "warm_up_steps must be a list"),
        ("lambdalinear", {"f_min": "0.1"}, TypeError, "f_min must be a list"),
        ("lambdalinear", {"f_min": ["0.1"]}, TypeError, "f_min must be a number"),
        ("lambdalinear", {"cycle_lengths": [-1]}, ValueError, "cycle_lengths must be finite and >= 0"),
        ("lambdalinear", {"f_max": [float("nan")]}, ValueError, "f_max must be finite"),
        ("wsd", {"decay_type": "exponential"}, ValueError, "decay_type must be one of"),
        ("wsd", {"total_steps": -1}, ValueError, "total_steps must be finite and >= 0"),
        ("wsd", {"f_start": None}, TypeError, "f_start must be a number"),
        ("wsd", {"decay_steps": True}, TypeError, "decay_steps must be a number"),
        ("wsfd", {"warm_up_steps": 0}, ValueError, "warm_up_steps >= 1"),
        ("wsfd", {"decay_steps": 90}, ValueError, r"warm_up_steps \+ decay_steps < total_steps"),
        ("wsfd", {"f_cooldown_start": float("inf")}, ValueError, "f_cooldown_start must be finite"),
    ],
)
def test_bad_arguments(side, lr_scheduler_type, change, error, message):
    wsd = dict(warm_up_steps=10, total_steps=100, decay_steps=20, f_start=0.0, f_max=1.0, f_min=0.1)
    kwargs = {"lambda": COSINE_WARM, "wsd": wsd, "wsfd": {**wsd, "f_cooldown_start": 0.5}}[
        "lambda" if lr_scheduler_type.startswith("lambda") else lr_scheduler_type
    ]
    with pytest.raises(error, match=message):
        build_schedule(side, lr_scheduler_type, {**kwargs, **change})
