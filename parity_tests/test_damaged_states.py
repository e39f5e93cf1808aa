"""States that were edited, cut or saved under other groups: refused whole, or loaded for what they are."""

from __future__ import annotations

import copy
from collections import defaultdict
from http import HTTPStatus
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.training.train_state import TrainState
from torch import nn

import jax_impl
import torch_impl
from jax_impl.tree import named_leaves
from parity_tests.backends.torch_resume import first_difference
from parity_tests.resume import SCHEDULE

NAN = float("nan")
TYPES = pytest.mark.parametrize("optimizer_type", torch_impl.config.CONFIGS)
MODES = pytest.mark.parametrize("override", [False, True])


def torch_run(optimizer_type, steps, **options):
    torch.manual_seed(0)
    model = nn.ModuleDict({"fc": nn.Linear(3, 4), "head": nn.Linear(4, 2)})
    model["fc"].weight.device_mesh = SimpleNamespace(mesh_dim_names=("fsdp",))  # adam and adamw: two optimizers
    optimizer = torch_impl.build_optimizer(model, optimizer_type, lr=0.1, fused=True, **options)
    scheduler = torch_impl.build_lr_scheduler(optimizer, "wsd", **SCHEDULE)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def every(state, ending, value):
    state.update({key: copy.deepcopy(value) for key in list(state) if key.endswith(ending)})


SCHEDULER_STATES = [
    (lambda s: s.update(last_epoch=-4), "last_epoch must be a whole number >= 0, got -4"),
    (lambda s: s.update(last_epoch=NAN), "last_epoch must be a whole number >= 0, got nan"),
    (lambda s: s.update(last_epoch=2.5), "last_epoch must be a whole number >= 0, got 2.5"),
    (lambda s: s.update(last_epoch=True), "last_epoch must be one number, got True"),
    (lambda s: s.update(base_lrs=5), "base_lrs must be a list, got 5"),
    (lambda s: s.update(base_lrs=[-1.0]), r"base_lrs must be finite and >= 0, got \[-1.0\]"),
    (lambda s: s.update(base_lrs=[NAN]), r"base_lrs must be finite and >= 0, got \[nan\]"),
    (lambda s: s.pop("base_lrs"), "no scheduler state"),
]


@MODES
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("change", "message"), SCHEDULER_STATES)
def test_scheduler_states(change, message, which, override):
    _, scheduler = torch_run("adamw", 3)
    state = copy.deepcopy(scheduler.state_dict())
    change(state["schedulers"][which])
    _, target = torch_run("adamw", 1)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(state, override=override)
    assert first_difference(before, target.state_dict()) is None


def test_schedulers_at_different_counts():
    _, scheduler = torch_run("adamw", 3)
    state = copy.deepcopy(scheduler.state_dict())
    state["schedulers"][1]["last_epoch"] = 7
    with pytest.raises(ValueError, match=r"at different counts: \[3, 7\]"):
        scheduler.load_state_dict(state)


def test_nothing_but_counts_and_lrs_is_taken_from_a_scheduler_state():
    _, scheduler = torch_run("adamw", 3)
    state = copy.deepcopy(scheduler.state_dict())
    for one in state["schedulers"]:
        one.update(optimizer=1, lr_lambdas=[{}, {}, {}])
    optimizer, target = torch_run("adamw", 1)
    target.load_state_dict(state)
    assert [s.optimizer for s in target] == list(optimizer)
    assert first_difference(scheduler.state_dict(), target.state_dict()) is None


OPTIMIZER_STATES = [
    (lambda s: every(s, ".step", torch.tensor(NAN)), "step must be a whole number >= 0"),
    (lambda s: every(s, ".step", torch.tensor(-3.0)), "step must be a whole number >= 0"),
    (lambda s: [s.pop(k) for k in list(s) if k.startswith("state.head.weight.")], r"\['head.weight'\] is missing"),
    (lambda s: [s.pop(k) for k in list(s) if k.startswith("state.")], "is missing from a checkpoint"),
]
WITHOUT_OVERRIDE = [
    (lambda s: every(s, ".lr", NAN), "lr must be finite and >= 0"),
    (lambda s: every(s, ".lr", -1.0), "lr must be finite and >= 0"),
    (lambda s: every(s, ".weight_decay", -0.1), "weight_decay must be finite and >= 0"),
    (lambda s: every(s, ".eps", -1e-8), "eps must be finite and >= 0"),
    (lambda s: every(s, ".betas", (2.0, 0.9)), r"betas must be in \[0, 1\)"),
    (lambda s: every(s, ".initial_lr", -1.0), "initial_lr must be finite and >= 0"),
    (lambda s: s.update({f"{k}.wd_mult": NAN for k in group_names(s)}), "wd_mult must be finite"),
]
RULES = {
    "adam": ("maximize", "amsgrad", "decoupled_weight_decay"),
    "adamw": ("maximize", "amsgrad", "decoupled_weight_decay"),
    "muonwithauxadamw": ("master_weights",),
}


def group_names(state):
    return {key.rpartition(".")[0] for key in state if key.startswith("param_groups.")}


def assert_refused(optimizer_type, change, message, **kwargs):
    state = copy.deepcopy(torch_run(optimizer_type, 3)[0].state_dict())
    change(state)
    target, _ = torch_run(optimizer_type, 1)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(state, **kwargs)
    assert first_difference(before, target.state_dict()) is None


@MODES
@TYPES
@pytest.mark.parametrize(("change", "message"), OPTIMIZER_STATES)
def test_optimizer_states(optimizer_type, change, message, override):
    assert_refused(optimizer_type, change, message, override=override)


@pytest.mark.parametrize("step", [torch.ones(2), "x", None])
@MODES
def test_group_steps(step, override):
    assert_refused("muonwithauxadamw", lambda s: every(s, ".step", step), "step must be one number", override=override)


@TYPES
@pytest.mark.parametrize(("change", "message"), WITHOUT_OVERRIDE)
def test_groups(optimizer_type, change, message):
    assert_refused(optimizer_type, change, message)


@pytest.mark.parametrize(("optimizer_type", "rule"), [(t, rule) for t, rules in RULES.items() for rule in rules])
def test_another_rule(optimizer_type, rule):
    current = torch_run(optimizer_type, 0)[0].optimizers[0].param_groups[0][rule]
    assert_refused(optimizer_type, lambda s: every(s, f".{rule}", not current), f"{rule}={not current} in the state")


@TYPES
def test_how_a_step_is_computed_is_not_loaded(optimizer_type):
    optimizer, _ = torch_run(optimizer_type, 2)
    state = copy.deepcopy(optimizer.state_dict())
    for key in ("fused", "foreach", "capturable", "differentiable"):
        every(state, f".{key}", key in ("foreach", "differentiable"))
    target, _ = torch_run(optimizer_type, 0)
    target.load_state_dict(state)
    assert first_difference(optimizer.state_dict(), target.state_dict()) is None


# --- JAX -------------------------------------------------------------------------------------------------------------


def jax_run(optimizer_type, steps, params=None, **options):
    params = {"fc": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}} if params is None else params
    transform = jax_impl.build_optimizer(params, optimizer_type, **{"lr": 0.1, **options})
    state = transform.init(params)
    for _ in range(steps):
        _, state = transform.update(jax.tree.map(jnp.ones_like, params), state, params)
    return transform, state, params


@TYPES
@pytest.mark.parametrize(("field", "value"), [("base_lr", NAN), ("base_lr", -1.0), ("base_weight_decay", -0.1)])
def test_bases_out_of_range(optimizer_type, field, value):
    transform, state, params = jax_run(optimizer_type, 1)
    saved = {name: jnp.full_like(x, value) if name.endswith(field) else x for name, x in named_leaves(state).items()}
    with pytest.raises(ValueError, match=f"{field} must be finite and >= 0"):
        transform.restore(transform.init(params), saved)


@MODES
@TYPES
@pytest.mark.parametrize("field", ["schedule_count", "count"])
def test_negative_counts(optimizer_type, field, override):
    transform, state, params = jax_run(optimizer_type, 3)
    saved = {name: np.asarray(leaf) - 10 if f".{field}" in name else leaf for name, leaf in named_leaves(state).items()}
    with pytest.raises(ValueError, match=rf"{field}.* must be >= 0"):
        transform.restore(transform.init(params), saved, override=override)


@pytest.mark.parametrize("saved_step", [3, np.int32(3), jnp.asarray(3, jnp.int32)])
def test_a_train_state_whose_fresh_step_is_a_python_number(saved_step):
    transform, state, params = jax_run("adamw", 3)
    fresh = TrainState.create(apply_fn=None, params=params, tx=transform)
    assert type(fresh.step) is int
    restored = transform.restore(fresh, fresh.replace(step=saved_step, opt_state=state))
    assert (type(restored.step), restored.step) == (int, 3)
    with pytest.raises(ValueError, match=r"step has float \(\), it must have int \(\)"):
        transform.restore(fresh, fresh.replace(step=3.0, opt_state=state))


NAMES = ("base_lr", "weight_decay_factor", "schedule_count", "config_hash", "count")


@MODES
@TYPES
def test_parameters_with_the_names_of_fields(optimizer_type, override):
    params = {name: -jnp.ones((3, 4)) for name in NAMES}
    transform, state, _ = jax_run(optimizer_type, 2, params)
    fresh = {"params": params, "opt_state": transform.init(params)}
    restored = transform.restore(fresh, {"params": params, "opt_state": state}, override=override)
    for a, b in zip(jax.tree.leaves(restored["opt_state"]), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_states_under_vmap():
    """Two replicas: restored as they are, and set for both."""
    transform, _, params = jax_run("adamw", 0)
    many = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    state = jax.vmap(transform.init)(many)
    restored = transform.restore(state, state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    changed = transform.set_hyperparameters(state, base_lr=0.5)
    np.testing.assert_array_equal(jax_impl.hyperparameters(changed)[0].base_lr, [0.5, 0.5])


MULTIPLIERS = [{"bias": 0.5}, {"bias": 2.0}, {}, {"kernel": 3.0, "bias": 3.0}]


@TYPES
@pytest.mark.parametrize("now", MULTIPLIERS)
@pytest.mark.parametrize("then", MULTIPLIERS)
def test_override_takes_other_groups_on_both_sides(optimizer_type, then, now):
    """Groups split, merge and change places; counts and moments go on, lr is that of the new groups."""
    _, state, params = jax_run(optimizer_type, 3, lr_multipliers=then)
    transform, fresh, _ = jax_run(optimizer_type, 0, lr_multipliers=now)
    restored = transform.restore(fresh, state, override=True)
    values = jax_impl.hyperparameters(restored)
    expected = sorted({0.1 * now.get(key, 1.0) for key in ("kernel", "bias")})
    assert [int(v.step) for v in values.values()] == [3] * len(expected)
    np.testing.assert_allclose([v.learning_rate for v in values.values()], expected, rtol=1e-6)
    grads = jax.tree.map(jnp.ones_like, params)
    after = named_leaves(transform.update(grads, restored, params)[1])
    _, went_on, _ = jax_run(optimizer_type, 4, lr_multipliers=now)
    for name, leaf in named_leaves(went_on).items():
        if ".mu." in name or ".nu." in name:  # under equal gradients they do not depend on the lr
            np.testing.assert_allclose(after[name], leaf, rtol=1e-6)

    multipliers = [{{"kernel": "weight"}.get(k, k): m for k, m in given.items()} for given in (then, now)]
    saved, _ = torch_run(optimizer_type, 3, lr_multipliers=multipliers[0])
    target, _ = torch_run(optimizer_type, 0, lr_multipliers=multipliers[1])
    target.load_state_dict(saved.state_dict(), override=True)
    found, before = target.state_dict(), saved.state_dict()
    assert all(torch.equal(found[key], before[key]) for key in found if key.startswith("state."))
    lrs = {float(group["initial_lr"]) for inner in target for group in inner.param_groups}
    assert sorted(lrs) == pytest.approx(expected)


def test_groups_at_different_counts_are_no_one_state():
    _, state, _ = jax_run("muonwithauxadamw", 3)
    transform, fresh, _ = jax_run("muonwithauxadamw", 0)
    saved = named_leaves(state)
    saved["inner.inner_states.9.adamw.inner_state.inner.schedule_count"] = jnp.asarray(5)
    with pytest.raises(ValueError, match="the groups of the state have different values"):
        transform.restore(fresh, saved, override=True)


@pytest.mark.parametrize("field", ["lr_factor", "weight_decay_factor"])
def test_factors_that_are_not_finite(field):
    transform, state, params = jax_run("adamw", 1)
    saved = {name: jnp.full_like(x, NAN) if name.endswith(field) else x for name, x in named_leaves(state).items()}
    with pytest.raises(ValueError, match=f"{field} must be finite"):
        transform.restore(transform.init(params), saved)


@pytest.mark.parametrize(
    ("change", "x64", "message"),
    [
        ({"step": 2**31}, True, "step must fit a 32-bit count"),
        ({"step": np.int64(2**40)}, True, "step must fit a 32-bit count"),
        ({"base_lr": 1e39}, False, "base_lr must be at most 3.4"),
        ({"base_weight_decay": {0: 1e39}}, False, "base_weight_decay must be at most 3.4"),
    ],
)
def test_numbers_that_the_state_cannot_hold(change, x64, message):
    with jax.enable_x64(x64):
        transform, state, _ = jax_run("adamw", 0)
        with pytest.raises(ValueError, match=message):
            transform.set_hyperparameters(state, **change)


# --- files -----------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"loss": np.float64(1.0)}, "'loss' must be a tensor or a plain value, got float64"),
        ({"a": {"name": np.str_("x")}}, "'a.name' must be"),
        ({"pair": Pair(1)}, "'pair' must be a tensor or a plain value, got Pair"),
        ({"seen": defaultdict(int)}, "'seen' must be"),
        ({"kind": HTTPStatus.OK}, "'kind' must be"),
        ({"a": {np.int64(3): 1}}, "the key of 'a.3' must be a plain value, got int64"),
        ({"a": [{(1, 2): 1}]}, "the key of"),
    ],
)
def test_what_could_not_be_loaded_again_is_not_saved(tmp_path, tree, message):
    path = tmp_path / "run.pt"
    torch_impl.save_checkpoint(path, {"step": 1})
    with pytest.raises(TypeError, match=message):
        torch_impl.save_checkpoint(path, tree)
    assert torch_impl.load_checkpoint(path) == {"step": 1}


def test_byte_orders_and_structured_arrays_in_jax(tmp_path):
    path = tmp_path / "run.msgpack"
    jax_impl.save_checkpoint(path, {"x": np.arange(3, dtype=">f4"), "y": jnp.ones(2, jnp.bfloat16)})
    loaded = jax_impl.load_checkpoint(path)
    assert loaded["x"].tolist() == [0.0, 1.0, 2.0]
    assert loaded["y"].dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="'z' must be an array or a number"):
        jax_impl.save_checkpoint(path, {"z": np.zeros(2, [("a", "i4"), ("b", "f4")])})
    assert jax_impl.load_checkpoint(path).keys() == {"x", "y"}
