"""One config for both sides: from a file to both builders, into states, and compared when they are loaded."""

from __future__ import annotations

import copy
import hashlib
import json
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import jax_impl
import torch_impl

TOML = """
[optimizer]
optimizer_type = "MuonWithAuxAdamW"
lr = 1
fused = true
weight_decay = 0.05
adam_betas = [0.9, 0.99]
ns_dtype = "float32"
ns_coefficients = [[3, -5, 2], [3.4445, -4.775, 2.0315]]
ns_steps = 2
keys_to_select = ["fc", "head"]
disable_weight_decay_for_1d_params = true

[optimizer.lr_multipliers]
"head." = 0.5
fc = 2

[schedule]
lr_scheduler_type = "wsd"
warm_up_steps = 2
total_steps = 9
decay_steps = 4
f_start = 0.5
f_max = 1.0
f_min = 0.0
"""
IN_FORCE = {
    "optimizer_type": "muonwithauxadamw",
    "lr": 1.0,
    "fused": True,
    "keys_to_select": ["fc", "head"],
    "lr_multipliers": {"head.": 0.5, "fc": 2.0},
    "disable_weight_decay_for_1d_params": True,
    "weight_decay": 0.05,
    "eps": 1e-8,
    "adam_betas": [0.9, 0.99],
    "muon_momentum": 0.95,
    "muon_lr_scale": 0.2,
    "ns_steps": 2,
    "ns_dtype": "float32",
    "ns_coefficients": [[3.0, -5.0, 2.0], [3.4445, -4.775, 2.0315]],
    "nesterov": True,
    "expert_param_keywords": [],
    "adamw_module_keywords": ["lm_head", "embed_out", "output_layer"],
    "orthogonalize_skip_patterns": [],
    "capturable": True,
    "master_weights": True,
}


def torch_side(optimizer_type="adamw", **kwargs):
    model = nn.ModuleDict({"fc": nn.Linear(2, 3), "head": nn.Linear(3, 2)})
    for p in model.parameters():
        nn.init.ones_(p)
    return model, torch_impl.build_optimizer(model, optimizer_type, **{"fused": True, **kwargs})


def jax_side(optimizer_type="adamw", lr_schedule=None, **kwargs):
    params = {
        "fc": {"kernel": jnp.ones((2, 3), jnp.float32), "bias": jnp.ones(3, jnp.float32)},
        "head": {"kernel": jnp.ones((3, 2), jnp.float32), "bias": jnp.ones(2, jnp.float32)},
    }
    return params, jax_impl.build_optimizer(params, optimizer_type, lr_schedule=lr_schedule, **kwargs)


def ones_step(model, optimizer):
    """One update with gradients of one; how far the bias of fc moved. With AdamW that is its lr without decay."""
    before = float(model["fc"].bias[0].detach())
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    return before - float(model["fc"].bias[0].detach())


@pytest.mark.parametrize("source", ["toml", "omegaconf"])
def test_one_mapping_serves_both_sides(source):
    config = tomllib.loads(TOML)
    if source == "omegaconf":
        config = OmegaConf.create(config)
    _, optimizer = torch_side(**config["optimizer"])
    scheduler = torch_impl.build_lr_scheduler(optimizer, **config["schedule"])
    schedule = jax_impl.build_lr_schedule(**config["schedule"])
    params, transform = jax_side(lr_schedule=schedule, **config["optimizer"])
    assert list(optimizer.effective_config().items()) == list(IN_FORCE.items())
    assert list(transform.effective_config().items()) == list(IN_FORCE.items())
    rates = jax_impl.learning_rates(transform.init(params))
    expected = {0: 0.25, 1: 0.25, 2: 1.0, 3: 1.0}  # half of lr times 0.5 or 2; matrices decay, biases do not
    assert {g: float(x) for g, x in rates.items()} == expected
    assert [float(x) for x in scheduler.get_last_lr()] == list(expected.values())


def test_the_hash_is_that_of_the_json():
    """Written into the states of both sides; a copy of the config cannot change it."""
    expected = hashlib.sha256(json.dumps(IN_FORCE).encode()).hexdigest()
    kwargs = tomllib.loads(TOML)["optimizer"]
    _, optimizer = torch_side(**kwargs)
    assert optimizer.state_dict()["config_hash"] == expected
    params, transform = jax_side(**kwargs)
    words = np.asarray(transform.init(params).config_hash)
    assert words.astype(">u4").tobytes().hex() == expected
    for built in (optimizer, transform):
        built.effective_config()["lr_multipliers"]["x"] = 1.0
        assert built.effective_config() == IN_FORCE


CHANGES = [
    ("adamw", {"lr": 0.2}, "lr is 0.1 there and 0.2 here"),
    ("adamw", {"betas": (0.9, 0.95)}, r"betas is \[0.9, 0.999\] there and \[0.9, 0.95\] here"),
    ("adamw", {"weight_decay": 0.0}, "weight_decay is 0.01 there and 0.0 here"),
    ("adam", {"eps": 1e-6}, "eps is 1e-08 there and 1e-06 here"),
    ("muonwithauxadamw", {"ns_steps": 4, "nesterov": False}, "ns_steps is 5 there and 4 here; nesterov is True there"),
    ("muonwithauxadamw", {"lr_multipliers": {"x": 1.0, "y": 2.0}}, "lr_multipliers is {} there and {'x': 1.0"),
]


@pytest.mark.parametrize(("optimizer_type", "change", "message"), CHANGES)
def test_another_config_is_refused_unless_it_is_wanted(optimizer_type, change, message):
    kwargs = {"lr": 0.1, "optimizer_type": optimizer_type}
    model, optimizer = torch_side(**kwargs)
    ones_step(model, optimizer)
    _, other = torch_side(**kwargs | change)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=f"another config: {message}.*override=True"):
        other.load_state_dict(optimizer.state_dict())
    assert str(other.state_dict()) == str(before)
    other.load_state_dict(optimizer.state_dict(), override=True)
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "step")} for group in other.optimizers[0].param_groups
    ]
    fresh = torch_side(**kwargs | change)[1].optimizers[0].param_groups
    assert str(groups) == str([{k: v for k, v in group.items() if k not in ("params", "step")} for group in fresh])
    moments = {k: v for k, v in optimizer.state_dict().items() if k.startswith("state.")}
    assert moments
    for key, value in moments.items():
        assert torch.equal(other.state_dict()[key], value)

    params, transform = jax_side(**kwargs)
    state = jax.jit(transform.update)(params, transform.init(params), params)[1]
    _, new = jax_side(**kwargs | change)
    for target in (new.init(params), jax.eval_shape(new.init, params)):
        with pytest.raises(ValueError, match=r"another config.*override=True"):
            new.restore(target, state)
    restored = new.restore(new.init(params), state, override=True)
    for found, wanted in zip(
        jax_impl.hyperparameters(restored).values(), jax_impl.hyperparameters(new.init(params)).values(), strict=True
    ):
        assert int(found.step) == 1
        assert found[1:] == wanted[1:]
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(restored), jax.tree.leaves(state), strict=True):
        if any(getattr(key, "name", "") in ("mu", "nu", "count") for key in path):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="must come from init"):
        new.restore(jax.eval_shape(new.init, params), state, override=True)


def test_the_type_cannot_be_overridden():
    _, saved = torch_side("adam", lr=0.1)
    _, other = torch_side("adamw", lr=0.1)
    with pytest.raises(ValueError, match="optimizer_type is 'adam' there and 'adamw' here"):
        other.load_state_dict(saved.state_dict(), override=True)
    params, saved = jax_side("adam", lr=0.1)
    _, other = jax_side("adamw", lr=0.1)
    with pytest.raises(ValueError, match="the state belongs to another tree"):
        other.restore(other.init(params), saved.init(params), override=True)


def test_damaged_configs_are_refused():
    _, optimizer = torch_side(lr=0.1)
    state = optimizer.state_dict()
    for change in ({"config": state["config"].replace("0.1", "0.2")}, {"config": "{"}, {"config_hash": None}):
        with pytest.raises(ValueError, match="do not belong together"):
            optimizer.load_state_dict({**state, **change})
    optimizer.load_state_dict({k: v for k, v in state.items() if not k.startswith("config")})  # of another system
    newer = {**json.loads(state["config"]), "sorcery": 1}
    digest = hashlib.sha256(json.dumps(newer).encode()).hexdigest()
    with pytest.raises(ValueError, match=r"\['sorcery'\] unknown here"):
        optimizer.load_state_dict({**state, "config": json.dumps(newer), "config_hash": digest})
