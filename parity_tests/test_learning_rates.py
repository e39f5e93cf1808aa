"""Which lr an update really uses, group by group: read from the updates, and from what is logged before them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import jax_impl
import torch_impl
from parity_tests.test_update_rules import ADAM, ADAMW, FLOAT32, MUON, SIDES, VECTOR_RULES

LINE = ("lambdalinear", dict(warm_up_steps=[0], f_start=[1.0], f_max=[1.0], f_min=[0.0], cycle_lengths=[10]))
HALF = ("lambdalinear", dict(warm_up_steps=[0], f_start=[0.5], f_max=[0.5], f_min=[0.5], cycle_lengths=[10]))
START = {"a.bias": np.zeros(2), "b.bias": np.zeros(2), "c.bias": np.zeros(2)}
CONSTANT = {name: [1.0, -1.0] for name in START}  # Adam moves by the lr
CAPTURABLE = pytest.mark.parametrize(
    "options", [{**ADAM, "capturable": True}, {**ADAMW, "capturable": True}, MUON], ids=["adam", "adamw", "hybrid"]
)


@SIDES
@VECTOR_RULES
def test_the_logged_lr_is_the_one_of_the_next_update(side, options):
    """f(n) = 1 - n / 10: three updates of 1, .9, .8; logged after the scheduler's step they would be .9, .8, .7."""
    run = side(START, schedule=LINE, lr=1.0, weight_decay=0.0, **options)
    before, logged, moved = np.zeros(2), [], []
    for _ in range(3):
        logged += run.rates()
        after = run.step(CONSTANT)["a.bias"]
        moved.append(before - after)
        before = after
    np.testing.assert_allclose(logged, [1.0, 0.9, 0.8], rtol=1e-6)
    np.testing.assert_allclose(moved, np.outer([1.0, 0.9, 0.8], [1, -1]), atol=FLOAT32)


@SIDES
@VECTOR_RULES
def test_every_group_keeps_its_own_base_lr(side, options):
    """Bases 1, .1, .01 under a constant f = .5: the same in every update, nothing compounds."""
    run = side(START, schedule=HALF, lr=1.0, weight_decay=0.0, lr_multipliers={"b.": 0.1, "c.": 0.01}, **options)
    before = START
    for _ in range(4):
        assert sorted(run.rates()) == pytest.approx([0.005, 0.05, 0.5])
        after = run.step(CONSTANT)
        for name, lr in (("a.bias", 0.5), ("b.bias", 0.05), ("c.bias", 0.005)):
            np.testing.assert_allclose(before[name] - after[name], [lr, -lr], atol=FLOAT32)
        before = after


@CAPTURABLE
def test_lr_tensors_do_not_compound(options):
    """LambdaLR once multiplied the tensor that was its own base: .5, .25, .125."""
    model = nn.Linear(2, 2)
    optimizer = torch_impl.build_optimizer(model, lr=1.0, fused=True, **options)
    scheduler = torch_impl.build_lr_scheduler(optimizer, HALF[0], **HALF[1])
    (group,) = optimizer.optimizers[0].param_groups
    lr = group["lr"]
    assert isinstance(lr, torch.Tensor)
    for _ in range(4):
        assert float(lr) == 0.5
        assert [float(base) for base in scheduler.schedulers[0].base_lrs] == [1.0]
        optimizer.step()
        scheduler.step()
    assert group["lr"] is lr


@CAPTURABLE
def test_lr_tensors_are_not_shared(options):
    """Bases .1 and .01, f(1) = .5: every group has a tensor of its own, apart from its base, filled in place."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = torch_impl.build_optimizer(model, lr=0.1, fused=True, lr_multipliers={"b": 0.1}, **options)
    groups = optimizer.optimizers[0].param_groups
    held = [group["lr"] for group in groups]
    falling = {**LINE[1], "cycle_lengths": [2]}
    scheduler = torch_impl.build_lr_scheduler(optimizer, LINE[0], **falling)
    optimizer.step()
    scheduler.step()
    assert [float(lr) for lr in held] == pytest.approx([0.005, 0.05])
    assert [float(group["initial_lr"]) for group in groups] == pytest.approx([0.01, 0.1])
    assert [group["lr"] is lr for group, lr in zip(groups, held, strict=True)] == [True, True]
    assert held[0].data_ptr() != held[1].data_ptr()


def test_a_given_lr_tensor_stays_the_callers():
    """One tensor for two groups of the class that torch users build themselves."""
    given = torch.tensor(0.1)
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": given}, {"params": [weights[1]], "lr": given}]
    optimizer = torch_impl.MuonWithAuxAdamW(groups, dict.fromkeys(weights, "adamw"), lr=given, weight_decay=0.0)
    first, second = (group["lr"] for group in optimizer.param_groups)
    first.fill_(0.05)
    assert float(second) == float(given) == pytest.approx(0.1)
    for w in weights:
        w.grad = torch.ones(2)
    optimizer.step()
    np.testing.assert_allclose(weights[0].detach(), -0.05, atol=FLOAT32)
    np.testing.assert_allclose(weights[1].detach(), -0.1, atol=FLOAT32)


@pytest.mark.parametrize("warm_up", [0, 4])
def test_the_cosine_is_optax_s(warm_up):
    """Another library: its decay_steps include the warm-up as well, and its end value is held too."""
    kwargs = dict(warm_up_steps=[warm_up], f_start=[0.0], f_max=[1.0], f_min=[0.1], cycle_lengths=[10])
    ours = jax_impl.build_lr_schedule("lambdacosine", **kwargs)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=warm_up, decay_steps=10, end_value=0.1)
    n = jnp.arange(13)
    np.testing.assert_allclose(ours(n), theirs(n), atol=FLOAT32)
