"""Wrong input: the same exception on both sides, with the argument, the allowed set and the value; nothing changes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import jax_impl
import torch_impl

NAN = float("nan")

# (optimizer_type, change of the keywords, error, message); the keywords are lr=0.1, fused=True
ROWS = [
    ("sgd", {}, NotImplementedError, r"must be one of \['adam', 'adamw', 'fusedadam', 'muonwithauxadamw'\], got 'sgd'"),
    (None, {}, TypeError, "optimizer_type must be a string"),
    (
        "adamw",
        {"weight_decy": 0.1},
        TypeError,
        "no argument 'weight_decy'; did you mean 'weight_decay'.*Valid: .*betas",
    ),
    ("adamw", {"muon_momentum": 0.9}, TypeError, "no argument 'muon_momentum'"),
    ("adamw", {"amsgrad": True}, TypeError, "no argument 'amsgrad'"),
    ("fusedadam", {"amsgrad": True}, TypeError, "no argument 'amsgrad'"),
    ("fusedadam", {"adamw_mode": False}, TypeError, "no argument 'adamw_mode'; did you mean 'adam_w_mode'"),
    ("fusedadam", {"bias_correction": 1}, TypeError, "bias_correction must be True or False, got 1"),
    ("fusedadam", {"adam_w_mode": None}, TypeError, "adam_w_mode must be True or False, got None"),
    ("fusedadam", {"master_weights": "yes"}, TypeError, "master_weights must be True or False, got 'yes'"),
    ("fusedadam", {"betas": (0.9, 1.0)}, ValueError, r"betas must be in \[0, 1\), got 1.0"),
    ("muonwithauxadamw", {"betas": (0.9, 0.95)}, TypeError, "no argument 'betas'; did you mean 'adam_betas'"),
    ("adamw", {"fused": False}, ValueError, "fused must be True.*got False"),
    ("adamw", {"lr": None}, TypeError, "lr must be a number, got None"),
    ("adamw", {"lr": -0.1}, ValueError, "lr must be finite and >= 0, got -0.1"),
    ("adamw", {"lr": NAN}, ValueError, "lr must be finite and >= 0, got nan"),
    ("adamw", {"lr": "0.1"}, TypeError, "lr must be a number, got '0.1'"),
    ("adam", {"weight_decay": -1.0}, ValueError, "weight_decay must be finite and >= 0"),
    ("adam", {"eps": NAN}, ValueError, "eps must be finite and >= 0"),
    ("adamw", {"betas": (0.9, 1.0)}, ValueError, r"betas must be in \[0, 1\), got 1.0"),
    ("adamw", {"betas": (-0.1, 0.9)}, ValueError, "betas must be finite and >= 0, got -0.1"),
    ("adamw", {"betas": 0.9}, TypeError, "betas must be a pair of numbers"),
    ("muonwithauxadamw", {"adam_betas": (0.9,)}, TypeError, "adam_betas must be a pair of numbers"),
    ("muonwithauxadamw", {"muon_momentum": 1.0}, ValueError, r"muon_momentum must be in \[0, 1\)"),
    ("muonwithauxadamw", {"muon_lr_scale": -0.2}, ValueError, "muon_lr_scale must be finite and >= 0"),
    ("muonwithauxadamw", {"ns_steps": 0}, ValueError, "ns_steps must be at least 1"),
    ("muonwithauxadamw", {"ns_dtype": "fp8"}, ValueError, "ns_dtype must be one of"),
    ("muonwithauxadamw", {"nesterov": 1}, TypeError, "nesterov must be True or False"),
    ("muonwithauxadamw", {"expert_param_keywords": "experts"}, TypeError, "expert_param_keywords must be a list"),
    ("muonwithauxadamw", {"orthogonalize_skip_patterns": ["("]}, ValueError, "no regular expression"),
    ("muonwithauxadamw", {"expert_param_keywords": ["deep"]}, ValueError, r"'deep' must be \(E, M, N\)"),
    ("adamw", {"keys_to_select": "fc"}, TypeError, "keys_to_select must be a list of strings, got 'fc'"),
    ("adamw", {"keys_to_select": None}, TypeError, "keys_to_select must be a list of strings"),
    ("adamw", {"keys_to_select": ["nothing"]}, ValueError, r"keys_to_select=\['nothing'\] selects none of the 3"),
    ("muonwithauxadamw", {"keys_to_select": ["nothing"]}, ValueError, "selects none"),
    ("adamw", {"lr_multipliers": [("fc", 2.0)]}, TypeError, "lr_multipliers must be a mapping"),
    ("adamw", {"lr_multipliers": {"fc": -2.0}}, ValueError, r"lr_multipliers\['fc'\] must be finite and >= 0"),
    ("adamw", {"lr_multipliers": {"fc": "2"}}, TypeError, r"lr_multipliers\['fc'\] must be a number"),
    ("adamw", {"disable_weight_decay_for_1d_params": "yes"}, TypeError, "must be True or False, got 'yes'"),
]


def torch_model():
    model = nn.ModuleDict({"fc": nn.Linear(2, 3)})
    model.register_parameter("deep", nn.Parameter(model["fc"].weight.detach().new_zeros(2, 2, 3, 4)))
    return model


def jax_params():
    return {"fc": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}, "deep": jnp.zeros((2, 2, 3, 4))}


@pytest.mark.parametrize("side", ["torch", "jax"])
@pytest.mark.parametrize(("optimizer_type", "change", "error", "message"), ROWS)
def test_wrong_arguments(optimizer_type, change, error, message, side):
    kwargs = {"lr": 0.1, "fused": True, **change}
    if side == "jax":
        with pytest.raises(error, match=message):
            jax_impl.build_optimizer(jax_params(), optimizer_type, **kwargs)
        return
    model = torch_model()
    before = {name: (p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(error, match=message):
        torch_impl.build_optimizer(model, optimizer_type, **kwargs)
    for name, p in model.named_parameters():
        assert p.requires_grad == before[name][0]
        assert (p == before[name][1]).all()


def test_what_must_be_given():
    """fused has one value, and eager optimizers exist on one side only: torch wants it said."""
    with pytest.raises(ValueError, match="needs lr="):
        torch_impl.build_optimizer(torch_model(), "adamw", fused=True)
    with pytest.raises(ValueError, match="needs fused="):
        torch_impl.build_optimizer(torch_model(), "adamw", lr=0.1)
    with pytest.raises(ValueError, match="needs lr="):
        jax_impl.build_optimizer(jax_params(), "adamw")
    assert jax_impl.build_optimizer(jax_params(), "adamw", lr=0.1).init(jax_params())


@pytest.mark.parametrize(
    ("kind", "kwargs", "error", "message"),
    [
        (
            "cosine",
            {},
            NotImplementedError,
            r"must be one of \['lambdacosine', 'lambdalinear', 'wsd', 'wsfd'\], got 'cosine'",
        ),
        (3, {}, TypeError, "must be a string, got 3"),
        ("wsd", {"warmup_steps": 3}, TypeError, "no argument 'warmup_steps'; did you mean 'warm_up_steps'"),
        ("wsd", {"warm_up_steps": 3}, TypeError, "wsd needs total_steps, decay_steps, f_start, f_max, f_min$"),
    ],
)
def test_wrong_schedules(kind, kwargs, error, message):
    optimizer = torch_impl.build_optimizer(torch_model(), "adamw", lr=0.1, fused=True)
    with pytest.raises(error, match=message):
        torch_impl.build_lr_scheduler(optimizer, kind, **kwargs)
    assert [group["lr"] for group in optimizer.optimizers[0].param_groups] == [0.1]
    with pytest.raises(error, match=message):
        jax_impl.build_lr_schedule(kind, **kwargs)


def test_jax_only():
    params = jax_params()
    transform = jax_impl.build_optimizer(params, "adamw", lr=0.1)
    state = transform.init(params)
    with pytest.raises(ValueError, match="needs the parameters"):
        transform.update(params, state)
    with pytest.raises(ValueError, match=r"parameters that are missing: \['fc.bias'\]"):
        transform.init({**params, "fc": {"kernel": params["fc"]["kernel"]}})
    with pytest.raises(ValueError, match="without a parameter 'new'"):
        transform.init({**params, "new": jnp.zeros(2)})
    with pytest.raises(TypeError, match="lr_schedule must be a function"):
        jax_impl.build_optimizer(params, "adamw", lr=0.1, lr_schedule=0.5)
    with pytest.raises(TypeError, match="'count' must be float64, float32, bfloat16 or float16, got int64"):
        jax_impl.build_optimizer({**params, "count": jnp.zeros((), int)}, "adamw", lr=0.1)
    with pytest.raises(ValueError, match="does not name every axis"):
        jax_impl.build_optimizer(params, "muonwithauxadamw", lr=0.1, matrix_axes=lambda n, x: jax_impl.MatrixAxes(0, 0))
    with pytest.raises(TypeError, match="must be MatrixAxes or None"):
        jax_impl.build_optimizer(params, "muonwithauxadamw", lr=0.1, matrix_axes=lambda name, leaf: (0, 1))
    with pytest.raises(ValueError, match=r"no matrix axes for \['fc.bias'"):
        jax_impl.scale_by_muon().init({"fc": params["fc"]})
    with pytest.raises(ValueError, match="one jax_impl optimizer, found 0"):
        jax_impl.learning_rates({"a": jnp.zeros(2)})


def test_jax_names_and_shapes():
    with pytest.raises(ValueError, match=r"two parameters are called 'a\.b'"):
        jax_impl.build_optimizer({"a.b": jnp.zeros(2), "a": {"b": jnp.zeros(2)}}, "adamw", lr=0.1)
    params = {"a": jnp.zeros(4)}
    transform = jax_impl.build_optimizer(params, "adamw", lr=0.1)
    with pytest.raises(ValueError, match=r"gradient of 'a' has shape \(1,\), the parameter \(4,\)"):
        transform.update({"a": jnp.zeros(1)}, transform.init(params), params)
    for options, message in (
        ({"ns_dtype": "fp8"}, "ns_dtype must be one of"),
        ({"muon_momentum": 5.0}, r"must be in \[0, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_impl.scale_by_muon(**options)


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn", "int32"])
def test_parameters_of_other_kinds(dtype):
    with pytest.raises(TypeError, match="must be float64, float32, bfloat16 or float16"):
        jax_impl.build_optimizer({"a": jnp.zeros(2, dtype)}, "adamw", lr=0.1)
    if dtype != "int32":  # torch trains no integers
        model = nn.Module()
        model.register_parameter("a", nn.Parameter(torch.zeros(2, dtype=getattr(torch, dtype))))
        with pytest.raises(TypeError, match="must be float64, float32, bfloat16 or float16"):
            torch_impl.build_optimizer(model, "adamw", lr=0.1, fused=True)


def test_torch_only():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got list"):
        torch_impl.build_optimizer(list(model.parameters()), "adamw", lr=0.1, fused=True)
    with pytest.raises(TypeError, match="must come from build_optimizer, got SGD"):
        torch_impl.build_lr_scheduler(torch.optim.SGD(model.parameters(), lr=0.1), "wsd")
    roles = {model.weight: "matrix", model.bias: "adamw"}
    for options, error in (
        ({"ns_dtype": "fp8"}, ValueError),
        ({"lr": -1.0}, ValueError),
        ({"adam_betas": 1}, TypeError),
    ):
        with pytest.raises(error):
            torch_impl.MuonWithAuxAdamW(model.parameters(), roles, **{"lr": 0.1, **options})
    with pytest.raises(TypeError, match=r"a group has no \['adam_betas'\]"):
        torch_impl.MuonWithAuxAdamW([{"params": [model.bias], "adam_betas": (0.9, 0.9)}], roles, lr=0.1)
    with pytest.raises(ValueError, match="has no role"):
        torch_impl.MuonWithAuxAdamW(model.parameters(), {model.weight: "matrix"}, lr=0.1)
    with pytest.raises(ValueError, match="'expert' does not fit a parameter of shape"):
        torch_impl.MuonWithAuxAdamW([model.weight], {model.weight: "expert"}, lr=0.1)


def test_no_parameters_and_parameters_given_twice():
    for build in (
        lambda: torch_impl.build_optimizer(nn.Module(), "adamw", lr=0.1, fused=True),
        lambda: jax_impl.build_optimizer({}, "adamw", lr=0.1),
    ):
        with pytest.raises(ValueError, match="selects none of the 0"):
            build()
    bias = nn.Parameter(torch.ones(2))
    for params, message in (
        ([bias, bias], "a group has the same parameter twice"),
        ([{"params": [bias]}, {"params": [bias]}], "more than one parameter group"),
        ([{"params": [bias]}, {"params": []}], "a group needs at least one parameter"),
    ):
        with pytest.raises(ValueError, match=message):
            torch_impl.MuonWithAuxAdamW(params, {bias: "adamw"}, lr=0.1)


@pytest.mark.parametrize(("start_step", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_wrong_start_steps(start_step, error):
    optimizer = torch_impl.build_optimizer(torch_model(), "adamw", lr=0.1, fused=True)
    schedule = dict(warm_up_steps=1, total_steps=9, decay_steps=1, f_start=0.0, f_max=1.0, f_min=0.0)
    with pytest.raises(error, match="start_step must be"):
        torch_impl.build_lr_scheduler(optimizer, "wsd", start_step=start_step, **schedule)
    assert [group["lr"] for group in optimizer.optimizers[0].param_groups] == [0.1]


def test_numpy_scalars_are_numbers():
    kwargs = dict(lr=np.float32(0.5), fused=True, weight_decay=np.float64(0.25), lr_multipliers={"fc": np.int64(2)})
    for table in (
        torch_impl.route_parameters(torch_model(), "adamw", **kwargs),
        jax_impl.route_parameters(jax_params(), "adamw", **kwargs),
    ):
        assert sorted(route.lr for route in table) == [0.5, 1.0, 1.0]
        assert all(type(route.lr) is float for route in table)


def test_omegaconf_containers_are_plain_values():
    config = OmegaConf.create({"select": ["fc"], "betas": [0.8, 0.9], "multipliers": {"fc": 2.0}})
    kwargs = dict(
        lr=0.1, fused=True, keys_to_select=config.select, betas=config.betas, lr_multipliers=config.multipliers
    )
    table = torch_impl.route_parameters(torch_model(), "adamw", **kwargs)
    assert [route.lr for route in table] == [None, 0.2, 0.2]
    assert len(jax_impl.route_parameters(jax_params(), "adamw", **kwargs)) == 3
