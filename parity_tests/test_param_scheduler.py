"""OptimizerParamScheduler: recorded runs of the reference, numbers by hand, resume, both sides against each other."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_impl
import torch_impl
from parity_tests import reference
from parity_tests.test_golden import load_json

EXACT = 1e-15  # relative: the same float64 operations in the same order
FLOAT64 = 1e-12  # relative to the peak: the compiler may reorder
FLOAT32 = 2e-7  # of the peak: 1 + cos cancels near the end

GOLDEN = load_json("nemo_scheduler.json")["cases"]
RUNS = [case for case in GOLDEN if case["kind"] == "run"]
LOADS = [case for case in GOLDEN if case["kind"] == "load"]

# the reference finds these at the step that needs the value, we at construction
FOUND_EARLIER = {
    "err_lr_style_warm": "lr_decay_style must be one of",
    "err_wsd_lowercase": "lr_decay_style must be one of",
    "err_wsd_no_style": "lr_wsd_decay_style must be one of",
    "err_wsd_bad_style": "lr_wsd_decay_style must be one of",
}
# what is raised where the reference asserts, divides by zero or misses a key
MESSAGES = FOUND_EARLIER | {
    "err_min_above_max": "min_lr must be <= max_lr",
    "err_min_negative": "min_lr must be finite and >= 0",
    "err_init_above_max": "init_lr must be <= max_lr",
    "err_warm_ge_decay": "lr_decay_steps must be > lr_warmup_steps",
    "err_decay_zero": "lr_decay_steps must be > lr_warmup_steps",
    "err_wd_order": "end_wd must be",
    "err_wd_negative": "start_wd must be finite and >= 0",
    "err_wd_constant_unequal": "end_wd must be start_wd",
    "err_wd_incr_zero_linear": "wd_incr_steps must be > 0",
    "err_wd_style": "wd_incr_style must be one of",
    "err_lr_style_warm0": "lr_decay_style must be one of",
    "err_wsd_no_steps": "wsd_decay_steps must be a number",
    "err_override_and_use": "use_checkpoint_opt_param_scheduler must be False",
    "ck_strict_differs": "max_lr is 0.001 there and 0.004 here",
    "ck_strict_only_wd_differs": "end_wd is 0.3 there and 0.4 here",
    "ck_style_to_wsd_without_steps": "wsd_decay_steps must be a number",  # the reference has loaded half of it by then
    "ck_missing_min_lr": r"missing \['min_lr'\]",
    "ck_missing_num_steps": r"missing \['num_steps'\]",
}
SAVED_BY_US_ONLY = {"init_lr", "wsd_decay_steps", "lr_wsd_decay_style"}


def raises(case):
    return case["id"] in MESSAGES


def annealer(groups, kwargs):
    """A torch annealer over copies of ``groups``, as the recordings were made: the optimizer only has groups."""
    stub = SimpleNamespace(param_groups=copy.deepcopy(groups))
    return torch_impl.OptimizerParamScheduler(stub, **kwargs), stub.param_groups


def assert_groups(found, expected):
    assert [set(group) for group in found] == [set(group) for group in expected]
    for group, values in zip(found, expected, strict=True):
        assert group == pytest.approx(values, rel=EXACT, abs=0)


def assert_trace(scheduler, groups, trace):
    for row in trace:
        scheduler.step(row["increment"])
        assert scheduler.num_steps == row["num_steps"]
        assert [group["lr"] for group in groups] == pytest.approx(row["lr"], rel=EXACT, abs=0)
        assert [group["weight_decay"] for group in groups] == pytest.approx(row["wd"], rel=EXACT, abs=0)


def assert_state(found, expected):
    assert set(found) == set(expected) | SAVED_BY_US_ONLY
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("case", [case for case in RUNS if not raises(case)], ids=lambda case: case["id"])
def test_recorded_run(case):
    scheduler, groups = annealer(case["groups_before"], case["kwargs"])
    assert_groups(groups, case["groups_after_init"])
    assert_trace(scheduler, groups, case["trace"])
    assert_groups(groups, case["groups_final"])
    assert_state(scheduler.state_dict(), case["state_dict"])


@pytest.mark.parametrize("case", [case for case in RUNS if raises(case)], ids=lambda case: case["id"])
def test_recorded_error(case):
    """Where the reference has already written multipliers, or trains until the bad style is needed, nothing changed."""
    assert "construct_raises" in case or case["id"] in FOUND_EARLIER
    groups = copy.deepcopy(case["groups_before"])
    with pytest.raises(ValueError, match=MESSAGES[case["id"]]):
        torch_impl.OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **case["kwargs"])
    assert groups == case["groups_before"]


@pytest.mark.parametrize("case", LOADS, ids=lambda case: case["id"])
def test_recorded_load(case):
    first, groups = annealer(case["groups_before"], case["kwargs"])
    assert_trace(first, groups, case["trace"])
    assert_state(first.state_dict(), case["state_dict"])

    load = case["load"]
    second, groups = annealer(load["groups_before"], load["kwargs"])
    assert_groups(groups, load["groups_after_init"])
    assert raises(case) == (load.get("raises") is not None)
    if raises(case):
        before = second.state_dict()
        with pytest.raises(ValueError, match=MESSAGES[case["id"]]):
            second.load_state_dict(load["loaded"])
        assert second.state_dict() == before
        assert_groups(groups, load["groups_after_init"])
        return
    for _ in range(load["times"]):
        second.load_state_dict(load["loaded"])
    assert {name: getattr(second, name) for name in load["attrs_after_load"]} == load["attrs_after_load"]
    assert_groups(groups, load["groups_after_load"])
    assert_trace(second, groups, load["trace"])
    assert_state(second.state_dict(), load["state_dict"])


# --- the same on the JAX side, which has no groups: their bounds and factors come from the recording ------------------


def evaluate(side, kwargs, steps, bounds=None):
    """(lr, decay) at ``steps`` in float64, from the oracle, or jitted with x64 on ("jax") or off ("jax32")."""
    bounds = bounds or {}
    if side == "reference":
        lr = [reference.annealed_lr(s, **{**kwargs, **bounds}) for s in steps]
        return np.array(lr), np.array([reference.annealed_wd(s, **kwargs) for s in steps])
    with jax.enable_x64(side == "jax"):
        scheduler = jax_impl.OptimizerParamScheduler(**kwargs)
        counts = jnp.asarray(steps, jnp.int32 if max(steps) < 2**31 else jnp.uint32)
        found = jax.jit(lambda s: (scheduler.learning_rate(s, **bounds), scheduler.weight_decay(s)))(counts)
        assert {x.dtype for x in found} == {jnp.dtype("float64" if side == "jax" else "float32")}
        return tuple(np.asarray(x, np.float64) for x in found)


def assert_close(found, expected, side):
    """Relative to the largest value."""
    tolerance = FLOAT32 if side == "jax32" else FLOAT64
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("side", ["reference", "jax", "jax32"])
@pytest.mark.parametrize("case", [case for case in RUNS if not raises(case)], ids=lambda case: case["id"])
def test_recorded_values(case, side):
    for g, group in enumerate(case["groups_after_init"]):
        bounds = {key: group[key] for key in ("max_lr", "min_lr") if key in group}
        lr, wd = evaluate(side, case["kwargs"], [row["num_steps"] for row in case["trace"]], bounds)
        assert_close(lr * group.get("lr_mult", 1.0), [row["lr"][g] for row in case["trace"]], side)
        assert_close(wd * group["wd_mult"], [row["wd"][g] for row in case["trace"]], side)


@pytest.mark.parametrize("case", [case for case in RUNS if raises(case)], ids=lambda case: case["id"])
def test_recorded_error_in_jax(case):
    with pytest.raises(ValueError, match=MESSAGES[case["id"]]):
        jax_impl.OptimizerParamScheduler(**case["kwargs"])


@pytest.mark.parametrize("case", LOADS, ids=lambda case: case["id"])
def test_recorded_load_in_jax(case):
    first = jax_impl.OptimizerParamScheduler(**case["kwargs"])
    for row in case["trace"]:
        first.step(row["increment"])
    assert_state(first.state_dict(), case["state_dict"])

    load = case["load"]
    second = jax_impl.OptimizerParamScheduler(**load["kwargs"])
    if raises(case):
        before = second.state_dict()
        with pytest.raises(ValueError, match=MESSAGES[case["id"]]):
            second.load_state_dict(load["loaded"])
        assert second.state_dict() == before
        return
    for _ in range(load["times"]):
        second.load_state_dict(load["loaded"])
    assert {name: getattr(second, name) for name in load["attrs_after_load"]} == load["attrs_after_load"]
    for row in load["trace"]:
        second.step(row["increment"])
        assert second.num_steps == row["num_steps"]
        for g, group in enumerate(load["groups_after_load"]):
            bounds = {key: group[key] for key in ("max_lr", "min_lr") if key in group}
            lr = second.learning_rate(second.num_steps, **bounds) * group.get("lr_mult", 1.0)
            assert float(lr) == pytest.approx(row["lr"][g], rel=FLOAT64)
            assert float(second.weight_decay(second.num_steps)) * group["wd_mult"] == pytest.approx(
                row["wd"][g], rel=FLOAT64
            )
    assert_state(second.state_dict(), load["state_dict"])
