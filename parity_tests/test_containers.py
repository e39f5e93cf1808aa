"""torch containers: what is saved comes back bit for bit, in any order, and shares nothing."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import torch_impl
from parity_tests.backends.torch_backend import build_model
from parity_tests.backends.torch_resume import Training, first_difference, one_process
from parity_tests.resume import SCHEDULE
from parity_tests.test_golden import GOLDEN, RecordedProblem, load_json, unflatten

OPTIMIZERS = ("adam", "adamw", "muonwithauxadamw")


def assert_equal(a, b):
    assert first_difference(a, b) is None


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
        ("optimizer", lambda s: s.pop("state.head.bias.exp_avg_sq"), r"'head.bias' needs the state \['exp_avg', "),
        ("optimizer", lambda s: s.update({"state.head.bias.junk": 1.0}), "another kind of optimizer"),
        (
            "optimizer",
            lambda s: s.update({k.replace(".lr", ".junk"): 1.0 for k in s if k.endswith(".lr")}),
            r"unknown \['junk'\] in the state",
        ),
        (
            "optimizer",
            lambda s: [s.pop(k) for k in list(s) if k.startswith("param_groups.") and k.endswith(".step")],
            "has moments but no step",
        ),
        (
            "optimizer",
            lambda s: s.update({k: torch.tensor(0.1) for k in s if k.endswith(".initial_lr")}),
            "share a group in the state but not here",
        ),
        (
            "optimizer",
            lambda s: s.update({k: torch.zeros(2) for k in s if k.endswith(".step")}),
            "step must be one number, got tensor",
        ),
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
            r"state.head.bias.exp_avg has torch.float32 \(5,\), it must have torch.float32 \(4,\)",
        ),
        (
            "optimizer",
            lambda s: s.update({"param_groups.head.bias.lr": torch.tensor(9.0)}),
            "saved with other lr_multipliers",
        ),
        ("optimizer", lambda s: s.update({"state.head.bias.exp_avg": torch.zeros(4).double()}), "has torch.float64"),
        ("optimizer", lambda s: s.update({k: "x" for k in s if k.endswith(".lr")}), "lr must be one number, got 'x'"),
        ("optimizer", lambda s: s.update({k: None for k in s if k.endswith(".betas")}), "betas must be like"),
        ("optimizer", lambda s: s.update({k: "fp8" for k in s if k.endswith(".ns_dtype")}), "ns_dtype must be one of"),
        ("optimizer", lambda s: [s.pop(k) for k in list(s) if k.endswith(".lr")], "has no lr in the state"),
        ("scheduler", lambda s: s.clear(), "no scheduler state"),
        ("scheduler", lambda s: s.update(last_epoch="x"), "last_epoch must be one number, got 'x'"),
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


@pytest.mark.parametrize("optimizer_type", OPTIMIZERS)
def test_copies_and_pickles_go_on(optimizer_type):
    """A deep copy, and an optimizer that went through pickle with its model, continue bit for bit."""
    whole = Training(optimizer_type).run(0, 8).snapshot()
    first = Training(optimizer_type).run(0, 4)
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert_equal(other.run(4, 8).snapshot(), whole)
    assert_equal(first.run(4, 8).snapshot(), whole)


@pytest.mark.parametrize("optimizer_type", OPTIMIZERS)
def test_strides_do_not_matter(optimizer_type):
    """Gradients and loaded moments may lie in memory in another order than their parameter."""

    def run(transposed):
        weight = nn.Parameter(torch.arange(12.0).reshape(3, 4))
        model = nn.Module()
        model.register_parameter("table", weight)
        optimizer = torch_impl.build_optimizer(model, optimizer_type, lr=0.1, fused=True)
        for t in range(3):
            g = torch.linspace(-1, 1, 12).reshape(3, 4) * (t + 1)
            weight.grad = g.T.contiguous().T if transposed and optimizer_type == "muonwithauxadamw" else g
            optimizer.step()
            if transposed:
                state = optimizer.state_dict()
                odd = {k: v.T.contiguous().T if getattr(v, "ndim", 0) == 2 else v for k, v in state.items()}
                optimizer.load_state_dict(odd)
        return weight.detach()

    assert torch.equal(run(True), run(False))


class Mesh:
    """Stands in for a device mesh: what counts is the names of its dimensions."""

    def __init__(self, *names):
        self.mesh_dim_names = names


@pytest.mark.parametrize("multipliers", [{}, {"fc": 0.0}, {"fc": 0.0, "head": 0.0}])
@pytest.mark.parametrize("optimizer_type", OPTIMIZERS)
def test_its_own_state_is_never_refused(optimizer_type, multipliers):
    """Several meshes, groups of equal lr in different optimizers, multipliers of zero, lr zero at the end."""

    def build():
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("embed", "fc", "head")})
        for p in model["fc"].parameters():
            p.device_mesh = Mesh("dp")
        optimizer = torch_impl.build_optimizer(
            model,
            optimizer_type,
            lr=0.1,
            fused=True,
            lr_multipliers=multipliers,
            disable_weight_decay_for_1d_params=True,
        )
        return model, optimizer, torch_impl.build_lr_scheduler(optimizer, "wsd", **SCHEDULE)

    model, optimizer, scheduler = build()
    for _ in range(15):  # the schedule ends at zero
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        scheduler.step()
    _, fresh, fresh_scheduler = build()
    assert len(fresh) == (1 if optimizer_type == "muonwithauxadamw" else 2)
    fresh.load_state_dict(optimizer.state_dict())
    fresh_scheduler.load_state_dict(scheduler.state_dict())
    assert_equal(fresh.state_dict(), optimizer.state_dict())
    assert {float(lr) for lr in fresh_scheduler.get_last_lr()} == {0.0}


def test_another_grouping_is_refused_without_a_scheduler_too():
    def build(**kwargs):
        model = nn.ModuleDict({"fc": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        return torch_impl.build_optimizer(model, "adamw", lr=0.1, fused=True, **kwargs)

    one, two = build(), build(lr_multipliers={"fc": 0.5})
    with pytest.raises(ValueError, match="share a group in the state but not here"):
        two.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="share a group here but not in the state"):
        one.load_state_dict(two.state_dict())


@pytest.mark.parametrize(("saved", "other"), [("adam", "adamw"), ("adamw", "adam")])
def test_decoupled_and_l2_decay_are_two_rules(saved, other):
    """torch keeps the rule in the groups, where a loaded state could change it."""
    state = Training(saved).run(0, 3).optimizer.state_dict()
    with pytest.raises(ValueError, match="decoupled_weight_decay"):
        Training(other).optimizer.load_state_dict(state)


def test_a_group_without_moments_at_its_front_needs_its_step():
    """The first parameter is a matrix, which has no moments; the bias behind it has."""
    model = nn.Linear(3, 2)
    optimizer = torch_impl.build_optimizer(model, "muonwithauxadamw", lr=0.1, fused=True)
    state = {key: value for key, value in optimizer.state_dict().items() if not key.endswith(".step")}
    with pytest.raises(ValueError, match="moments but no step"):
        optimizer.load_state_dict(state)


def test_groups_override_newton_schulz():
    """Three steps on the identity: phi applied three times to 1/sqrt 2."""
    weights = [nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "ns_steps": 3}]
    roles = dict.fromkeys(weights, "matrix")
    optimizer = torch_impl.MuonWithAuxAdamW(
        groups, roles, lr=1.0, weight_decay=0.0, muon_lr_scale=1.0, ns_dtype="float32"
    )
    for w in weights:
        w.grad = torch.eye(2)
    optimizer.step()
    s = 2**-0.5
    for k in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        if k in (2, 4):
            found = weights[1 if k == 2 else 0]
            np.testing.assert_allclose(found.detach(), -s * 2**0.5 * np.eye(2), atol=1e-5)
    for change, error in (({"ns_steps": 0}, ValueError), ({"lr": -1.0}, ValueError), ({"params": []}, ValueError)):
        with pytest.raises(error):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], "roles": {}, **change})
    gap = nn.Parameter(torch.zeros(2, 4)[:, :2])
    with pytest.raises(ValueError, match="view with gaps"):
        optimizer.add_param_group({"params": [gap], "roles": {gap: "matrix"}})
    assert len(optimizer.param_groups) == 2


def test_own_triples_survive_a_weights_only_file():
    model = nn.Linear(2, 2)
    triples = [[np.float64(1.5), -0.5, 0.0]] * 5
    optimizer = torch_impl.build_optimizer(model, "muonwithauxadamw", lr=0.1, fused=True, ns_coefficients=triples)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert saved["param_groups.weight.ns_coefficients"] == ((1.5, -0.5, 0.0),) * 5
    optimizer.load_state_dict(saved)


def test_new_parameters_may_join():
    training = Training("muonwithauxadamw").run(0, 2)
    late = nn.Linear(4, 4)
    training.model.add_module("late", late)
    roles = {late.weight: "matrix", late.bias: "adamw"}
    optimizer = training.optimizer.optimizers[0]
    optimizer.add_param_group({"params": list(late.parameters()), "roles": roles, "lr": 0.5})
    assert "param_groups.late.weight.lr" in training.optimizer.state_dict()
    before = late.weight.detach().clone()
    late.weight.grad = torch.ones(4, 4)
    training.optimizer.step()
    assert not torch.equal(late.weight, before)


CHECKPOINTS = {c["id"]: c for c in load_json("checkpoints/index.json")["cases"]}


def through_partial_dcp(optimizer, saved, folder):
    """Into a fresh state_dict: the reference writes no config, which ours would look for."""
    fresh = optimizer.state_dict()
    with one_process():
        dcp.save(saved, checkpoint_id=folder)
        with pytest.raises(dcp.api.CheckpointException, match="Missing key in checkpoint state_dict: config"):
            dcp.load(fresh, checkpoint_id=folder)
        dcp.load(fresh, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    return fresh


def through_converted_dcp(optimizer, saved, folder):
    """Its hybrids have a step of shape (1,), which dcp.load refuses to put into ours of shape ()."""
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    with one_process():
        dcp.save(saved, checkpoint_id=folder)
        with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
            dcp.load(optimizer.state_dict(), checkpoint_id=folder, planner=planner)
    dcp_to_torch_save(folder, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


@pytest.mark.parametrize(
    ("checkpoint", "through"),
    [
        ("ckpt_adamw.native", None),
        ("ckpt_fusedadam_bf16.native", None),
        ("ckpt_muon_f32.ns32", None),
        ("ckpt_muon_bf16.ns32", None),
        ("ckpt_adamw.native", through_partial_dcp),
        ("ckpt_muon_f32.ns32", through_converted_dcp),
    ],
)
def test_checkpoints_of_the_reference_system_load(checkpoint, through, tmp_path):
    """And go on as its uninterrupted run does, with matrices that follow the schedule."""
    case_id, _, variant = checkpoint.partition(".")
    golden = CHECKPOINTS[case_id]
    problem = RecordedProblem.load(golden["inputs"])
    dtype = getattr(torch, golden["dtype"])
    model = nn.Module()
    model.add_module("net", build_model(problem))
    model.to(dtype)
    kwargs = {"ns_dtype": "float32"} if variant == "ns32" else {}
    optimizer = torch_impl.build_optimizer(model, golden["optimizer_type"], fused=True, **golden["kwargs"], **kwargs)
    scheduler = torch_impl.build_lr_scheduler(optimizer, golden["scheduler"]["type"], **golden["scheduler"]["kwargs"])
    saved = torch.load(GOLDEN / "checkpoints" / f"{checkpoint}.pt", weights_only=True)
    if through:
        saved["optimizer"] = through(optimizer, saved["optimizer"], tmp_path)
    model.net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    with np.load(GOLDEN / "checkpoints" / f"{case_id}.npz") as arrays:
        expected = unflatten(arrays[f"{variant}_uninterrupted_params"], problem.layout)
    # a bfloat16 run of the reference cannot be continued: its masters are not in the file
    allowed = 2e-6 if dtype == torch.float32 else 2.0**-6
    for step, grads in enumerate(problem.gradient_stream(12)):
        if step < saved["step"]:
            continue
        for name, p in model.net.named_parameters():
            p.grad = None if grads[name] is None else torch.tensor(grads[name], dtype=dtype)
        optimizer.step()
        scheduler.step()
        for name, p in model.net.named_parameters():
            np.testing.assert_allclose(p.detach().double(), expected[name][step], rtol=0, atol=allowed, err_msg=name)
