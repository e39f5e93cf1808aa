"""torch containers: what is saved comes back bit for bit, in any order, and shares nothing."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn

import torch_impl

OPTIMIZERS = {
    "adam": {"weight_decay": 0.1},
    "adamw": {"weight_decay": 0.1},
    "muonwithauxadamw": {"expert_param_keywords": ["experts"]},
}
SCHEDULE = dict(warm_up_steps=3, total_steps=14, decay_steps=6, f_start=0.1, f_max=1.0, f_min=0.0)


class Training:
    """A model with its optimizer and scheduler, stepped with seeded gradients that depend on the step alone."""

    def __init__(self, optimizer_type, dtype=torch.float32, **kwargs):
        torch.manual_seed(0)
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "fc": nn.Linear(4, 6), "head": nn.Linear(6, 4)})
        model["fc"].register_parameter("experts", nn.Parameter(torch.randn(2, 4, 3)))
        self.model = model.to(dtype)
        kwargs = {**OPTIMIZERS[optimizer_type], "lr_multipliers": {"fc": 0.5}, **kwargs}
        self.optimizer = torch_impl.build_optimizer(self.model, optimizer_type, lr=0.05, fused=True, **kwargs)
        self.scheduler = torch_impl.build_lr_scheduler(self.optimizer, "wsd", **SCHEDULE)

    def run(self, start, stop):
        for t in range(start, stop):
            generator = torch.Generator().manual_seed(t)
            for k, p in enumerate(self.model.parameters()):
                gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
                p.grad = None if (t + k) % 5 == 0 else gradient
            self.optimizer.step()
            self.scheduler.step()
        return self

    def snapshot(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[key].dtype, key
            assert torch.equal(value, b[key]), key
        elif isinstance(value, dict):
            assert_equal(value, b[key])
        else:
            assert value == b[key], key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("optimizer_type", OPTIMIZERS)
def test_resume_is_bit_equal_in_every_order(optimizer_type, dtype):
    whole = Training(optimizer_type, dtype).run(0, 12).snapshot()
    buffer = io.BytesIO()
    torch.save(Training(optimizer_type, dtype).run(0, 6).snapshot(), buffer)
    for order in itertools.permutations(("model", "optimizer", "scheduler")):
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        resumed = Training(optimizer_type, dtype)
        for part in order:
            getattr(resumed, part).load_state_dict(saved[part])
        assert_equal(resumed.run(6, 12).snapshot(), whole)


@pytest.mark.parametrize("optimizer_type", OPTIMIZERS)
def test_scheduler_built_after_the_optimizer_was_loaded(optimizer_type):
    """LambdaLR's constructor takes an initial step, which sets the lr back; loading its state must repair that."""
    saved = Training(optimizer_type).run(0, 6).snapshot()
    whole = Training(optimizer_type).run(0, 12).snapshot()
    resumed = Training(optimizer_type)
    resumed.model.load_state_dict(saved["model"])
    resumed.optimizer.load_state_dict(saved["optimizer"])
    resumed.scheduler = torch_impl.build_lr_scheduler(resumed.optimizer, "wsd", **SCHEDULE)
    resumed.scheduler.load_state_dict(saved["scheduler"])
    assert_equal(resumed.run(6, 12).snapshot(), whole)


def test_torch_style_state_dict_of_a_hybrid():
    """Without a container: bfloat16 parameters, float32 state that torch's own loader would round."""
    whole = Training("muonwithauxadamw", torch.bfloat16).run(0, 12).snapshot()
    first = Training("muonwithauxadamw", torch.bfloat16).run(0, 6)
    resumed = Training("muonwithauxadamw", torch.bfloat16)
    resumed.model.load_state_dict(first.model.state_dict())
    resumed.optimizer.optimizers[0].load_state_dict(copy.deepcopy(first.optimizer.optimizers[0].state_dict()))
    resumed.scheduler.load_state_dict(first.scheduler.state_dict())
    assert_equal(resumed.run(6, 12).snapshot(), whole)


@pytest.mark.parametrize("optimizer_type", OPTIMIZERS)
def test_state_dict_before_training_has_no_effect(optimizer_type):
    touched = Training(optimizer_type)
    touched.optimizer.state_dict()
    assert_equal(touched.run(0, 3).snapshot(), Training(optimizer_type).run(0, 3).snapshot())


@pytest.mark.parametrize("optimizer_type", OPTIMIZERS)
def test_loading_shares_nothing_and_can_be_repeated(optimizer_type):
    saved = Training(optimizer_type).run(0, 6).snapshot()
    untouched = copy.deepcopy(saved)
    resumed = Training(optimizer_type).run(0, 2)
    for _ in range(2):
        resumed.optimizer.load_state_dict(saved["optimizer"])
        resumed.scheduler.load_state_dict(saved["scheduler"])
        assert_equal(resumed.optimizer.state_dict(), untouched["optimizer"])
        assert_equal(resumed.scheduler.state_dict(), untouched["scheduler"])
    resumed.run(6, 8)
    assert_equal(saved, untouched)


@pytest.mark.parametrize("optimizer_type", OPTIMIZERS)
def test_the_live_lr_is_used_after_loading(optimizer_type):
    """Matrices once went on with the lr of the moment in which their groups were recorded."""
    resumed = Training(optimizer_type)
    resumed.optimizer.load_state_dict(Training(optimizer_type).run(0, 6).snapshot()["optimizer"])
    for optimizer in resumed.optimizer:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0
    before = [p.detach().clone() for p in resumed.model.parameters()]
    for p in resumed.model.parameters():
        p.grad = torch.ones_like(p)
    resumed.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(resumed.model.parameters(), before, strict=True))


def damaged(change):
    saved = Training("muonwithauxadamw").run(0, 3).snapshot()
    change(saved)
    return saved


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("optimizer", lambda s: s.pop("param_groups.head.bias.lr"), "share a group here but not in the state: lr"),
        (
            "optimizer",
            lambda s: [s.pop(k) for k in list(s) if k.startswith("param_groups.head.bias.")],
            r"missing from it: \['head.bias'\]",
        ),
        ("optimizer", lambda s: s.update({"param_groups.tail.lr": 0.1}), r"unknown here: \['tail'\]"),
        ("optimizer", lambda s: s.update({"state.tail.exp_avg": 0.1}), r"unknown here: \['tail'\]"),
        ("optimizer", lambda s: s.update({"momentum": 1.0}), "neither state.<name>.<key> nor"),
        (
            "optimizer",
            lambda s: s.update({"state.head.bias.exp_avg": torch.zeros(5)}),
            r"state.head.bias.exp_avg has shape \(5,\), its parameter \(4,\)",
        ),
        (
            "optimizer",
            lambda s: s.update({"param_groups.head.bias.lr": torch.tensor(9.0)}),
            "saved with other lr_multipliers",
        ),
        ("scheduler", lambda s: s.update(schedulers=[s.copy(), s.copy()]), "2 schedulers, this container 1"),
        ("scheduler", lambda s: s.update(base_lrs=[0.1]), "1 parameter groups, the optimizer 2"),
    ],
)
def test_foreign_states_are_refused_whole(part, change, message):
    target = Training("muonwithauxadamw").run(0, 2)
    before = target.snapshot()
    saved = damaged(lambda s: change(s[part]))
    with pytest.raises(ValueError, match=message):
        getattr(target, part).load_state_dict(saved[part])
    assert_equal(target.snapshot(), before)


def test_closures_and_iteration():
    training = Training("adamw")
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        training.optimizer.zero_grad()
        loss = training.model["fc"](torch.ones(4)).square().sum()
        loss.backward()
        return loss

    loss = training.optimizer.step(closure)
    assert calls == [True]
    assert float(loss.detach()) > 0
    assert len(training.optimizer) == 1
    assert list(training.optimizer) == training.optimizer.optimizers
    training.optimizer.zero_grad()
    assert all(p.grad is None for p in training.model.parameters())
