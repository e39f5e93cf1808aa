"""The annealer in torch on real optimizers: resume in any order, factors of groups, bounds, tensors."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn

import jax_impl
import torch_impl
from parity_tests.test_annealing import STYLES, annealing
from torch_impl.containers import OptimizersContainer

RISING = dict(start_wd=0.02, end_wd=0.3, wd_incr_steps=10, wd_incr_style="linear")
HAND = annealing("cosine", 0.0, 1.0, 0.1, 2, 10, start_wd=0.0, end_wd=0.1, wd_incr_steps=10, wd_incr_style="linear")
LENGTH = 24


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"trunk": nn.Linear(3, 4), "head": nn.Linear(4, 2)})


def container(**kwargs):
    """Four groups: two base lrs, with and without decay."""
    return torch_impl.build_optimizer(
        model(),
        "muonwithauxadamw",
        lr=1e-3,
        fused=True,
        weight_decay=0.1,
        lr_multipliers={"head": 5.0},
        disable_weight_decay_for_1d_params=True,
        **kwargs,
    )


def several():
    """One container over two optimizers of different kinds."""
    net = model()
    first = torch.optim.SGD([{"params": net["trunk"].parameters(), "lr": 1e-3, "weight_decay": 0.1}])
    second = torch.optim.AdamW([{"params": net["head"].parameters(), "lr": 5e-3, "weight_decay": 0.0}])
    return OptimizersContainer(net, [first, second], torch_impl.RoutingTable([]), {})


def plain_optimizer():
    net = model()
    groups = [
        {"params": net["trunk"].parameters(), "lr": 1e-3, "weight_decay": 0.1},
        {"params": [net["head"].weight], "lr": 5e-3, "weight_decay": 0.0, "max_lr": 2e-3},
        {"params": [net["head"].bias], "lr": 2e-4, "weight_decay": 0.2},
    ]
    return torch.optim.SGD(groups, momentum=0.9)


OPTIMIZERS = {
    "SGD": plain_optimizer,
    "container": container,
    "container without tensors": lambda: container(capturable=False),
    "two optimizers": several,
}


def groups_of(optimizer):
    inner = optimizer if isinstance(optimizer, OptimizersContainer) else [optimizer]
    return [group for one in inner for group in one.param_groups]


def values(optimizer):
    return [(float(group["lr"]), float(group["weight_decay"])) for group in groups_of(optimizer)]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


ORDERS = {
    "annealer": ("build", "annealer"),
    "annealer twice": ("build", "annealer", "annealer"),
    "after steps of its own": ("build", "step", "annealer"),
    "optimizer, annealer": ("build", "optimizer", "annealer"),
    "annealer, optimizer": ("build", "annealer", "optimizer"),
    "all of it twice": ("build", "annealer", "optimizer", "optimizer", "annealer"),
    "optimizer before the annealer is built": ("optimizer", "build", "annealer"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("style", STYLES)
def test_resume_at_every_step(style, kind, order):
    """lr and decay of every group, at every later step, exactly as in the run that was not interrupted."""
    name, wsd_style = (*STYLES[style], None)[:2]
    kwargs = annealing(name, 0.0, 1e-3, 1e-5, 4, 16, 6, wsd_style, **RISING)
    optimizer = OPTIMIZERS[kind]()
    scheduler = torch_impl.OptimizerParamScheduler(optimizer, **kwargs)
    trace, states = [], []
    for _ in range(LENGTH + 1):
        trace.append(values(optimizer))
        states.append(copy.deepcopy((optimizer.state_dict(), scheduler.state_dict())))
        scheduler.step()
    assert len({lr for lr, _ in trace[5]}) > 1  # the groups do differ
    for at in range(0, LENGTH + 1, 1 if kind == "SGD" else 5):
        optimizer_state, state = through_a_file(states[at])
        resumed = OPTIMIZERS[kind]()
        for call in ORDERS[order]:
            if call == "build":
                again = torch_impl.OptimizerParamScheduler(resumed, **kwargs)
            elif call == "optimizer":
                resumed.load_state_dict(optimizer_state)
            elif call == "annealer":
                again.load_state_dict(state)
            else:
                again.step(3)
        for expected in trace[at:]:
            assert values(resumed) == expected
            again.step()


def anneal_two_groups(kwargs=HAND, **group):
    """Groups as in the rows below: decay 0.1 and a factor of 1; no decay and a factor of one half."""
    net = model()
    groups = [
        {"params": net["trunk"].parameters(), "lr": 1.0, "weight_decay": 0.1},
        {"params": net["head"].parameters(), "lr": 1.0, "weight_decay": 0.0, "lr_mult": 0.5, **group},
    ]
    optimizer = torch.optim.SGD(groups)
    return optimizer, torch_impl.OptimizerParamScheduler(optimizer, **kwargs)


def test_no_decay_stays_no_decay_and_factors_hold_to_the_end():
    optimizer, scheduler = anneal_two_groups()
    lrs = [0, 0.5, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1, 0.1, 0.1]
    for n, lr in enumerate(lrs):
        (first_lr, first_wd), second = values(optimizer)
        assert (first_lr, first_wd) == pytest.approx((lr, min(0.01 * n, 0.1)), abs=5e-7)
        assert second == (first_lr / 2, 0.0)
        scheduler.step()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_decay_is_set_by_the_load(times):
    """Half of a cosine from 1 to 0.1 and half of a decay to 0.1, at once and however often it is loaded."""
    kwargs = {**HAND, "lr_warmup_steps": 0}
    _, scheduler = anneal_two_groups(kwargs)
    scheduler.step(5)
    constant = dict(start_wd=0.2, end_wd=0.2, wd_incr_steps=1, wd_incr_style="constant")
    optimizer, resumed = anneal_two_groups({**kwargs, **constant})
    resumed.step(3)
    for _ in range(times):
        resumed.load_state_dict(scheduler.state_dict())
    assert resumed.num_steps == 5
    assert values(optimizer) == [pytest.approx((0.55, 0.05)), pytest.approx((0.275, 0.0))]


@pytest.mark.parametrize("calls", [*itertools.permutations(("optimizer", "annealer"))])
def test_factors_that_a_state_lacks_stay(calls):
    """A checkpoint whose groups were stripped of their factors; the rebuilt groups have them."""
    optimizer, scheduler = anneal_two_groups()
    scheduler.step(6)
    saved = copy.deepcopy({"optimizer": optimizer.state_dict(), "annealer": scheduler.state_dict()})
    for group in saved["optimizer"]["param_groups"]:
        del group["lr_mult"], group["wd_mult"]
    resumed, again = anneal_two_groups()
    for call in calls:
        {"optimizer": resumed, "annealer": again}[call].load_state_dict(saved[call])
    again.step(0)
    assert values(resumed) == [pytest.approx((0.55, 0.06)), pytest.approx((0.275, 0.0))]


OVERRIDE = dict(use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)


@pytest.mark.parametrize(
    "calls", [*itertools.permutations(("optimizer", "annealer")), ("optimizer", "build", "annealer")]
)
def test_override_wins_over_bounds_in_restored_groups(calls):
    """The restored group carries the old annealer's max_lr; half of the way down from the new one is 0.25."""
    kwargs = annealing("linear", 0.0, 1.0, 0.0, 0, 10)
    net = model()
    optimizer = torch.optim.SGD([{"params": net.parameters(), "lr": 1.0, "max_lr": 1.0}])
    scheduler = torch_impl.OptimizerParamScheduler(optimizer, **kwargs)
    scheduler.step(5)
    assert values(optimizer)[0][0] == 0.5
    saved = {"optimizer": optimizer.state_dict(), "annealer": scheduler.state_dict()}

    resumed = torch.optim.SGD(model().parameters(), lr=1.0)
    again = None
    for call in calls if "build" in calls else ("build", *calls):
        if call == "build":
            again = torch_impl.OptimizerParamScheduler(resumed, **{**kwargs, "max_lr": 0.5}, **OVERRIDE)
        else:
            {"optimizer": resumed, "annealer": again}[call].load_state_dict(copy.deepcopy(saved[call]))
    again.step(0)
    assert values(resumed)[0][0] == 0.25


def test_override_keeps_bounds_of_a_group_that_is_built_with_them():
    kwargs = annealing("linear", 0.0, 1.0, 0.0, 0, 10)
    optimizer, scheduler = anneal_two_groups(kwargs, max_lr=3.0)
    scheduler.step(5)
    resumed, again = anneal_two_groups({**kwargs, "max_lr": 0.5, **OVERRIDE}, max_lr=4.0)
    resumed.load_state_dict(optimizer.state_dict())
    again.load_state_dict(scheduler.state_dict())
    assert [lr for lr, _ in values(resumed)] == [0.25, 1.0]  # half of 0.5; half of 4, times one half


def test_a_group_added_later_joins_in():
    optimizer, scheduler = anneal_two_groups()
    scheduler.step(6)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.25, "weight_decay": 0.2})
    scheduler.step(0)
    assert values(optimizer)[2] == pytest.approx((0.25 * 0.55, 2 * 0.06))


@pytest.mark.parametrize("late", [0, 1])
def test_a_group_added_to_any_optimizer_of_a_container_joins_in(late):
    """It keeps its own lr and decay, and so do the groups behind it; relative to the first group, lr 1e-3, decay .1."""
    optimizer = several()
    scheduler = torch_impl.OptimizerParamScheduler(optimizer, **HAND)
    scheduler.step(6)
    before = [[(float(g["lr"]), float(g["weight_decay"])) for g in inner.param_groups] for inner in optimizer]
    group = {"params": [nn.Parameter(torch.ones(2))], "lr": 2e-3, "weight_decay": 0.2}
    optimizer.optimizers[late].add_param_group(group)
    scheduler.step(0)
    after = [[(float(g["lr"]), float(g["weight_decay"])) for g in inner.param_groups] for inner in optimizer]
    before[late].append(pytest.approx((2 * 0.55, 2 * 0.06)))
    assert after == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_are_filled(dtype):
    """lr and decay stay the tensors they were, and a default that all groups share is taken apart."""
    net = model()
    shared, decay = torch.tensor(1.0, dtype=dtype), torch.tensor(0.1, dtype=dtype)
    groups = [{"params": net["trunk"].parameters()}, {"params": net["head"].parameters(), "lr_mult": 0.5}]
    optimizer = torch.optim.Adam(groups, lr=shared, weight_decay=decay, capturable=True, foreach=False)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    scheduler = torch_impl.OptimizerParamScheduler(optimizer, **HAND)
    held = [group[key] for group in optimizer.param_groups for key in ("lr", "weight_decay")]
    assert len({x.data_ptr() for x in held}) == 4
    scheduler.step(6)
    scheduler.load_state_dict(scheduler.state_dict())
    assert [group[key] for group in optimizer.param_groups for key in ("lr", "weight_decay")] == held
    expected = [scheduler.get_lr({}), scheduler.get_wd(), scheduler.get_lr({}) / 2, scheduler.get_wd()]
    assert [x.item() for x in held] == torch.tensor(expected, dtype=dtype).tolist()


def test_an_update_uses_what_was_set():
    """Zero gradients leave the decoupled decay alone: p (1 - lr wd) with the values by hand at step 6."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1.0, weight_decay=0.1)
    scheduler = torch_impl.OptimizerParamScheduler(optimizer, **HAND)
    scheduler.step(6)
    before = net["head"].weight.detach().clone()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(net["head"].weight.detach(), before * (1 - 0.55 * 0.06))


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([], ValueError, "at least one group"),
        ([{"lr": 1.0, "lr_mult": "2"}], TypeError, "lr_mult of group 0 must be a number, got '2'"),
        ([{"lr": 1.0}, {"lr": 1.0, "wd_mult": -1.0}], ValueError, "wd_mult of group 1 must be finite and >= 0"),
        ([{"lr": 1.0, "max_lr": None}], TypeError, "max_lr of group 0 must be a number"),
        ([{"lr": torch.tensor([1.0, 2.0])}], TypeError, "lr of group 0 must be a number or a floating-point tensor"),
        ([{"lr": 1.0, "weight_decay": torch.tensor(1)}], TypeError, "weight_decay of group 0 must be a number or"),
        (None, TypeError, "optimizer must have param_groups, got object"),
    ],
)
def test_bad_groups(groups, error, message):
    class Stub:
        param_groups = groups

    before = copy.deepcopy(groups)
    with pytest.raises(error, match=message):
        torch_impl.OptimizerParamScheduler(object() if groups is None else Stub(), **HAND)
    assert str(groups) == str(before)


def test_multipliers_and_exemptions_of_a_container_hold():
    """By hand, step 1 of the warm-up: lr 5e-4 and five times that, decay .048 and none, whichever group comes first."""
    optimizer = container()
    scheduler = torch_impl.OptimizerParamScheduler(optimizer, **annealing("cosine", 0.0, 1e-3, 1e-5, 2, 16, **RISING))
    scheduler.step()
    expected = {"trunk": 5e-4, "head": 25e-4}
    names = {p: name for name, p in optimizer.model.named_parameters()}
    for group in groups_of(optimizer):
        for p in group["params"]:
            assert float(group["lr"]) == pytest.approx(expected[names[p].split(".")[0]], rel=1e-6)
            assert float(group["weight_decay"]) == pytest.approx(0.0 if p.ndim == 1 else 0.048, rel=1e-6)


def test_exemptions_that_nothing_tells_apart():
    options = dict(lr=1e-3, fused=True, weight_decay=0.0, disable_weight_decay_for_1d_params=True)
    optimizer = torch_impl.build_optimizer(model(), "adamw", **options)
    before = values(optimizer)
    with pytest.raises(ValueError, match="built with weight_decay > 0"):
        torch_impl.OptimizerParamScheduler(optimizer, **annealing("constant", 0.0, 1e-3, 0.0, 2, 16, **RISING))
    assert values(optimizer) == before
    no_decay = annealing("constant", 0.0, 1e-3, 0.0, 2, 16)
    scheduler = torch_impl.OptimizerParamScheduler(optimizer, **no_decay)
    before, state = values(optimizer), scheduler.state_dict()
    with pytest.raises(ValueError, match="built with weight_decay > 0"):
        scheduler.load_state_dict({**state, "num_steps": 3, **RISING})
    assert (values(optimizer), scheduler.state_dict()) == (before, state)


WRONG_STATES = [
    ({"max_lr": "x"}, TypeError, "max_lr must be a number"),
    ({"lr_decay_style": "nope"}, ValueError, "lr_decay_style must be one of"),
    ({"lr_warmup_steps": -3}, ValueError, "lr_warmup_steps must be finite and >= 0"),
    ({"num_steps": 1.5}, TypeError, "num_steps must be an integer"),
]


@pytest.mark.parametrize("mode", [{}, dict(use_checkpoint_opt_param_scheduler=False), OVERRIDE])
@pytest.mark.parametrize(("change", "error", "message"), WRONG_STATES)
def test_wrong_values_in_a_state(change, error, message, mode):
    """Whoever is to win, on both sides."""
    optimizer = plain_optimizer()
    for scheduler in (
        torch_impl.OptimizerParamScheduler(optimizer, **HAND, **mode),
        jax_impl.OptimizerParamScheduler(**HAND, **mode),
    ):
        before, state = values(optimizer), scheduler.state_dict()
        with pytest.raises(error, match=message):
            scheduler.load_state_dict({**state, "num_steps": 5, **change})
        assert (values(optimizer), scheduler.state_dict()) == (before, state)
