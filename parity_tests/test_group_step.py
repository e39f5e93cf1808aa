"""Optimizers that count steps per group, in torch: foreign states, loss scaling, tensors that are never replaced."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_impl
from torch_impl.fused_adam import FusedAdam

OPTIONS = dict(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.01)


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((3, 5), (7,))]


def run(optimizer, params, steps, missing=()):
    """Gradients that depend on the step alone; ``missing``: steps at which the last parameter has none."""
    for t in steps:
        for p in params:
            p.grad = torch.cos(torch.arange(p.numel()) * 1.3 + t).reshape(p.shape).to(p.dtype)
        if t in missing:
            params[-1].grad = None
        optimizer.step()


FOREIGN = {"adamw": (torch.optim.AdamW, {}), "adam": (torch.optim.Adam, {"adam_w_mode": False})}


@pytest.mark.parametrize("through", ["optimizer", "container"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_state_of_torch_goes_on_as_torch_does(kind, through):
    """All parameters at one step, so that both ways to count are one: three updates there, three here, six there."""
    optimizer_class, mode = FOREIGN[kind]
    theirs = parameters()
    whole = optimizer_class(theirs, fused=True, **OPTIONS)
    run(whole, theirs, range(3))
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    if through == "optimizer":
        optimizer = FusedAdam(ours, lr=0.5, **mode)
        optimizer.load_state_dict(whole.state_dict())
        group = optimizer.param_groups[0]
    else:
        model = nn.ParameterDict({"a": ours[0], "b": ours[1]})
        optimizer = torch_impl.build_optimizer(model, "fusedadam", fused=True, **OPTIONS, **mode)
        flat = {f"state.{n}.{k}": x for n, p in zip("ab", theirs, strict=True) for k, x in whole.state[p].items()}
        groups = {k: v for k, v in whole.param_groups[0].items() if k != "params"}
        optimizer.load_state_dict(flat | {f"param_groups.{n}.{k}": v for n in "ab" for k, v in groups.items()})
        group = optimizer.param_groups[0]
    assert float(group["lr"]) == pytest.approx(0.1)
    run(optimizer, ours, range(3, 6))
    run(whole, theirs, range(3, 6))
    assert group["step"] == 6
    for p, q in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p.detach(), q.detach(), rtol=0, atol=1e-6)  # lr is float32 here, double there


def test_a_bfloat16_state_of_torch_widens():
    params = parameters(torch.bfloat16)
    theirs = torch.optim.AdamW(params, **OPTIONS)
    run(theirs, params, range(2))
    optimizer = FusedAdam(params, **OPTIONS)
    optimizer.load_state_dict(theirs.state_dict())
    for p in params:
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert torch.equal(optimizer.state[p]["exp_avg"], theirs.state[p]["exp_avg"].float())


def test_the_fourth_update_of_a_foreign_state():
    """m = .08 and v = .0003 after three steps; g = .5, lr .1: m = .122, v = .0005497, t = 4, by hand."""
    p = nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([p], lr=0.1)
    state = {"step": torch.tensor(3.0), "exp_avg": torch.tensor([0.08]), "exp_avg_sq": torch.tensor([0.0003])}
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
    p.grad = torch.full((1,), 0.5)
    optimizer.step()
    expected = 1 - 0.1 * (0.122 / (1 - 0.9**4)) / (0.0005497 / (1 - 0.999**4)) ** 0.5
    assert p.item() == pytest.approx(expected, abs=1e-6)


def damaged(change):
    params = parameters()
    theirs = torch.optim.AdamW(params, **OPTIONS)
    run(theirs, params, range(3), missing=(1,) if change == "uneven" else ())
    saved = theirs.state_dict()
    group, state = saved["param_groups"][0], saved["state"]
    if change == "amsgrad":
        group["amsgrad"] = True
    elif change == "l2":
        group["decoupled_weight_decay"] = False
    elif change == "shape":
        state[1]["exp_avg"] = torch.zeros(8)
    elif change == "nan":
        state[0]["step"] = torch.tensor(torch.nan)
    elif change == "unknown":
        group["clip"] = 1.0
    elif change == "lr":
        group["lr"] = -1.0
    elif change == "lost":
        del state[1]["exp_avg_sq"]
    elif change == "members":
        group["params"] = [0]
    elif change == "groups":
        saved["param_groups"].append(group)
    return saved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("uneven", r"a group counts its steps once here.*\{'0': 3, '1': 2\}"),
        ("amsgrad", "amsgrad=True in the state, here it is False"),
        ("l2", "decoupled_weight_decay=False in the state, here it is True"),
        ("shape", r"exp_avg has torch.float32 \(8,\), it must have torch.float32 \(7,\)"),
        ("nan", "must be a whole number >= 0"),
        ("unknown", r"unknown \['clip'\]"),
        ("lr", "lr must be finite and >= 0, got -1.0"),
        ("lost", r"needs the state \['exp_avg', 'exp_avg_sq'\], got \['exp_avg'\]"),
        ("members", "1 parameters in the state, 2 here"),
        ("groups", "the state has 2 groups, the optimizer 1"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(change, message):
    params = parameters()
    optimizer = FusedAdam(params, **OPTIONS)
    run(optimizer, params, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(damaged(change))
    after = optimizer.state_dict()
    assert str(after) == str(before)


@pytest.mark.parametrize("optimizer_type", ["fusedadam", "muonwithauxadamw"])
def test_a_load_fills_the_tensors_of_the_groups(optimizer_type):
    """A captured graph reads lr, decay and step where they were when it was captured."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = torch_impl.build_optimizer(model, optimizer_type, lr=0.1, weight_decay=0.2, fused=True).optimizers[0]
    tensors = {key: x for key, x in optimizer.param_groups[0].items() if isinstance(x, torch.Tensor)}
    assert set(tensors) == {"lr", "weight_decay", "step"}
    saved = copy.deepcopy(optimizer.state_dict())
    for key, value in {"lr": 0.5, "weight_decay": 0.25, "step": 7.0}.items():
        saved["param_groups"][0][key] = torch.tensor(value)
    optimizer.load_state_dict(saved)
    for key, x in tensors.items():
        assert optimizer.param_groups[0][key] is x
    assert [float(x) for x in tensors.values()] == [{"lr": 0.5, "weight_decay": 0.25, "step": 7.0}[k] for k in tensors]


def test_tensors_of_the_caller_are_copied():
    lr, params = torch.tensor(0.1), parameters()
    optimizer = FusedAdam([{"params": [p]} for p in params], lr=lr)
    lrs = [group["lr"] for group in optimizer.param_groups]
    assert len({x.data_ptr() for x in (*lrs, lr)}) == 3
    assert [float(x) for x in lrs] == pytest.approx([0.1, 0.1])


SCALE = 2.0**10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_a_loss_scale(dtype, bad):
    """Gradients are divided inside the step; a step with one that is not finite is skipped, count and state too."""
    params, others = parameters(dtype), parameters(dtype)
    optimizer, plain = FusedAdam(params, lr=0.1), FusedAdam(others, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    run(optimizer, params, range(1)), run(plain, others, range(1))
    for p, q in zip(params, others, strict=True):
        q.grad = torch.full_like(q, 0.25)
        p.grad = q.grad * SCALE
    if bad is not None:
        params[1].grad[2] = bad
    scaler.scale(torch.zeros(()))  # the scaler is lazy
    scaler.step(optimizer)
    scaler.update()
    if bad is None:
        plain.step()
    assert scaler.get_scale() == (SCALE if bad is None else SCALE / 2)
    assert optimizer.param_groups[0]["step"] == (2 if bad is None else 1)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        for key, x in optimizer.state[p].items():
            assert torch.equal(x, plain.state[q][key]), key


@pytest.mark.parametrize("optimizer_type", ["adamw", "fusedadam", "muonwithauxadamw"])
def test_a_loss_scale_and_a_container(optimizer_type):
    """The container has the groups of all its optimizers, so that a scaler can unscale and skip for all at once."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizer = torch_impl.build_optimizer(model, optimizer_type, lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    before = [p.detach().clone() for p in model.parameters()]
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).square().sum()).backward()
        if bad:
            model[0].bias.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert all(moved) if not bad else not any(moved)


def test_wrong_groups():
    params = parameters()
    optimizer = FusedAdam(params[:1], lr=0.1)
    for group, error, message in [
        ({"params": []}, ValueError, "at least one parameter"),
        ({"params": [params[1], params[1]]}, ValueError, "same parameter twice"),
        ({"params": [params[1]], "momentum": 0.9}, TypeError, r"no \['momentum'\]; valid: \['adam_w_mode'"),
        ({"params": [params[1]], "betas": (0.9, 1.0)}, ValueError, r"betas must be in \[0, 1\), got 1.0"),
        ({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]}, TypeError, "got torch.complex64"),
        ({"params": [nn.Parameter(torch.zeros(4, 4)[:, :2])]}, ValueError, "view with gaps"),
    ]:
        with pytest.raises(error, match=message):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match="amsgrad"):
        FusedAdam(params, lr=0.1, amsgrad=True)
    params[0].grad = torch.zeros(3, 5).to_sparse()
    with pytest.raises(RuntimeError, match="FusedAdam does not support sparse gradients"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 0


def test_a_closure_and_copies():
    """The closure's loss comes back; a deep copy and a pickled one go on alike and alone."""
    params = parameters()
    optimizer = FusedAdam(params, lr=0.1)

    def closure():
        loss = params[0].square().sum()
        loss.backward()
        return loss

    first = params[0].detach().square().sum()
    assert optimizer.step(closure) == first
    twin_params, twin = copy.deepcopy((params, optimizer))
    run(optimizer, params, range(2))
    run(twin, twin_params, range(2))
    for p, q in zip(params, twin_params, strict=True):
        assert torch.equal(p, q)
        assert p.data_ptr() != q.data_ptr()


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_parameters(mesh, dtype):
    """fully_shard makes them DTensors; every rank updates its part, here the whole."""
    ends = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
        if sharded:
            fully_shard(model, mesh=mesh)
        optimizer = torch_impl.build_optimizer(model, "fusedadam", lr=0.1, weight_decay=0.1, fused=True)
        for _ in range(3):
            model(torch.ones(2, 5, dtype=dtype)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
        ends.append([p.full_tensor() if sharded else p.detach() for p in model.parameters()])
    for whole, gathered in zip(*ends, strict=True):
        assert torch.equal(whole, gathered)
