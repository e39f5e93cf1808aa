"""Saving, loading and going on, with values known by hand: lr, step counts, masters; on both sides."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from flax import serialization
from torch import nn

import torch_impl
from parity_tests.test_update_rules import ADAM, ADAMW, FLOAT32, FUSED, LIKE_ADAMW, MUON, PHI_1, SIDES, Jax, Torch

# f(n) = 1 - n / 10
LINE = ("lambdalinear", dict(warm_up_steps=[0], f_start=[1.0], f_max=[1.0], f_min=[0.0], cycle_lengths=[10]))
TYPES = {"adam": ADAM, "adamw": ADAMW, "fusedadam": FUSED, "hybrid": LIKE_ADAMW}
EVERY_TYPE = pytest.mark.parametrize("options", TYPES.values(), ids=TYPES)
ALL = ("optimizer", "scheduler", "model")


def fresh(side, options, dtype="float32"):
    """A vector under Adam and a matrix, lr 1 that falls by a tenth of itself a step."""
    start = {"a.bias": np.ones(2), "b.weight": np.ones((2, 2))}
    return side(start, schedule=LINE, dtype=dtype, lr=1.0, weight_decay=0.0, **options)


def train(run, start, stop):
    """Constant gradients: vectors move by the lr exactly. Returns the lr of every update, and where it ended."""
    rates = []
    for _ in range(start, stop):
        rates.append(run.rates())
        values = run.step({"a.bias": [1.0, 1.0], "b.weight": np.diag([1.0, 0.0])})
    return np.array(rates), values


def save(run):
    """As bytes: what a checkpoint keeps."""
    if isinstance(run, Jax):
        return serialization.to_bytes((run.params, run.opt_state))
    buffer = io.BytesIO()
    parts = {"optimizer": run.optimizer, "scheduler": run.scheduler, "model": run.optimizer.model}
    torch.save({name: part.state_dict() for name, part in parts.items()}, buffer)
    return buffer.getvalue()


def load(run, saved, parts=ALL):
    if isinstance(run, Jax):
        run.params, run.opt_state = serialization.from_bytes((run.params, run.opt_state), saved)
        return
    states = torch.load(io.BytesIO(saved), weights_only=True)
    for part in parts:
        (run.optimizer.model if part == "model" else getattr(run, part)).load_state_dict(states[part])


@SIDES
@EVERY_TYPE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_lr_goes_on(side, options, dtype):
    """Four updates, saved, loaded once and twice: .6 and .5 come next, counted from the base lr, and the same bits."""
    whole = fresh(side, options, dtype)
    rates, _ = train(whole, 0, 4)
    saved = save(whole)
    rest, values = train(whole, 4, 8)
    np.testing.assert_allclose([*rates[:, 0], *rest[:, 0]], 1 - np.arange(8) / 10, rtol=1e-6)
    for times in (1, 2):
        run = fresh(side, options, dtype)
        train(run, 0, times)
        for _ in range(times):
            load(run, saved)
            assert run.rates() == pytest.approx([0.6], rel=1e-6)
        resumed_rates, resumed_values = train(run, 4, 8)
        assert (resumed_rates == rest).all()
        for name, value in values.items():
            assert (resumed_values[name] == value).all(), name
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "master_param"):
            kept, expected = run.state(key), whole.state(key)
            assert {name: x.tolist() for name, x in kept.items()} == {name: x.tolist() for name, x in expected.items()}


@EVERY_TYPE
def test_a_scheduler_built_after_loading_does_not_reset_the_lr(options):
    """Its constructor sets the first lr; loading its state sets the right one, 0.6."""
    first = fresh(Torch, options)
    train(first, 0, 4)
    run = fresh(Torch, options)
    load(run, save(first), ("model", "optimizer"))
    run.scheduler = torch_impl.build_lr_scheduler(run.optimizer, LINE[0], **LINE[1])
    load(run, save(first), ("scheduler",))
    assert run.rates() == pytest.approx([0.6], rel=1e-6)
    assert run.scheduler.get_last_lr() == run.rates()
    rates, _ = train(run, 4, 6)
    np.testing.assert_allclose(rates[:, 0], [0.6, 0.5], rtol=1e-6)


@pytest.mark.parametrize("container", [True, False])
def test_loaded_groups_are_the_ones_that_both_rules_read(container):
    """Loading replaces torch's groups: the next step moves vectors and matrices by the scheduled .9."""
    run = fresh(Torch, LIKE_ADAMW)
    target = run.optimizer if container else run.optimizer.optimizers[0]
    target.load_state_dict(copy.deepcopy(target.state_dict()))
    before = run.step({})
    values = run.step({"a.bias": [1.0, 1.0], "b.weight": np.diag([1.0, 0.0])})
    # the group has counted one step without a gradient: m / (1 - .9^2) over the root of v / (1 - .999^2)
    u = (0.1 / 0.19) / (0.001 / 0.001999) ** 0.5
    np.testing.assert_allclose(before["a.bias"] - values["a.bias"], 0.9 * u, atol=FLOAT32)
    moved = 0.9 * 0.2 * 2**0.5 * PHI_1
    np.testing.assert_allclose(before["b.weight"] - values["b.weight"], np.diag([moved, 0.0]), atol=FLOAT32)


@SIDES
@EVERY_TYPE
@pytest.mark.parametrize("loaded", [False, True])
def test_saving_before_training_is_no_step(side, options, loaded):
    """p = 1, g = .5, lr .1: the first update has t = 1 and is .1 exactly; with t = 2 it would be .0744."""
    run = side({"a.bias": np.ones(1)}, schedule=LINE, lr=0.1, weight_decay=0.0, **options)
    saved = save(run)
    if loaded:
        load(run, saved)
    assert all(int(count) == 0 for count in run.counts())
    assert run.step({"a.bias": [0.5]})["a.bias"] == pytest.approx(0.9, abs=FLOAT32)
    assert {int(count) for count in run.counts()} == {1}


@pytest.mark.parametrize("options", [ADAMW, LIKE_ADAMW, MUON, {**ADAMW, "capturable": True}])
def test_a_state_that_was_mapped_to_the_cpu_goes_back_to_its_device(options, device):
    """Step counts of fused kernels must lie next to their parameters."""
    model = nn.Linear(2, 2).to(device)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def build():
        return torch_impl.build_optimizer(model, lr=0.1, fused=True, weight_decay=0.0, **options)

    def step(optimizer):
        model.bias.grad = torch.full((2,), 0.5, device=device)
        optimizer.step()

    optimizer = build()
    step(optimizer)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    resumed = build()
    resumed.load_state_dict(torch.load(buffer, map_location="cpu", weights_only=True))
    step(resumed)
    np.testing.assert_allclose((start["bias"] - model.bias.detach()).cpu(), 0.2, atol=FLOAT32)
    (inner,) = resumed
    step_count = inner.param_groups[0].get("step", inner.state[model.bias].get("step"))
    assert (step_count.dtype, step_count.device.type, float(step_count)) == (torch.float32, device, 2.0)


def drop_masters(saved):
    """The same checkpoint without masters, as reference systems write it."""
    states = torch.load(io.BytesIO(saved), weights_only=True)
    kept = {key: value for key, value in states["optimizer"].items() if not key.endswith(".master_param")}
    buffer = io.BytesIO()
    torch.save({**states, "optimizer": kept}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("side", "change", "master"),
    [(Torch, None, 0.989), (Jax, None, 0.989), (Torch, drop_masters, 0.98828125 - 0.001)],
)
def test_masters_are_saved(side, change, master):
    """Ten updates of .001, saved and loaded, one more: .989; rebuilt from the bfloat16 parameter .98728125."""
    constant = ("lambdalinear", {**LINE[1], "f_min": [1.0]})

    def build():
        return side({"a.bias": np.ones(1)}, schedule=constant, dtype="bfloat16", lr=0.001, weight_decay=0.0, **MUON)

    first, run = build(), build()
    for _ in range(10):
        first.step({"a.bias": [1.0]})
    load(run, change(save(first)) if change else save(first))
    run.step({"a.bias": [1.0]})
    np.testing.assert_allclose(run.state("master_param")["a.bias"], master, atol=FLOAT32)


@pytest.mark.parametrize("options", [ADAMW, LIKE_ADAMW], ids=["adamw", "hybrid"])
def test_old_states_do_not_say_whether_decay_is_decoupled(options):
    """A state from before torch had the flag: a zero gradient still leaves 1 - lr wd = .99."""
    run = Torch({"a.bias": np.ones(1)}, lr=0.1, weight_decay=0.1, **options)
    state = {k: v for k, v in run.optimizer.state_dict().items() if not k.endswith(".decoupled_weight_decay")}
    run.optimizer.load_state_dict(state)
    assert run.step({"a.bias": [0.0]})["a.bias"] == pytest.approx(0.99, abs=FLOAT32)


class Mesh:
    mesh_dim_names = ("dp",)


@EVERY_TYPE
def test_a_group_that_another_mesh_emptied(options):
    """lrs .1, .2, .3, the middle one on a mesh of its own: no optimizer keeps an empty group, and all of it loads."""

    def build():
        model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "abc"})
        model["b"].weight.device_mesh = Mesh()
        multipliers = {"b": 2.0, "c": 3.0}
        optimizer = torch_impl.build_optimizer(model, lr=0.1, fused=True, lr_multipliers=multipliers, **options)
        return model, optimizer

    def step(model, optimizer):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    model, optimizer = build()
    step(model, optimizer)
    other_model, other = build()
    other.load_state_dict(optimizer.state_dict())
    step(other_model, other)
    groups = [group for inner in other for group in inner.param_groups]
    assert all(len(group["params"]) == 1 for group in groups)
    assert sorted(float(group["lr"]) for group in groups) == pytest.approx([0.1, 0.2, 0.3])
    state = other.state_dict()
    counts = [value for key, value in state.items() if key.endswith(".step")]
    assert len(counts) == 3
    assert all(float(count) == 2 for count in counts)
