"""Random models, groups, schedules, save points and orders: what must hold for all of them."""

from __future__ import annotations

import copy
import io
import itertools
import json
import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import serialization
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import jax_impl
import torch_impl
from jax_impl.tree import named_leaves
from parity_tests.backends import jax_resume, torch_resume
from parity_tests.strategies import Setup, neighbours, setups, values

PARTS = ("model", "optimizer", "scheduler")


def examples(share: float) -> settings:
    """A share of the profile's examples; see conftest."""
    total = settings.default.max_examples if settings.default else 0
    return settings(
        max_examples=max(round(share * total), 1),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


MODULES = {"fc": nn.Linear, "wide": nn.Linear, "embed": nn.Embedding}


class Torch:
    """A training in torch; modules are real ones, as their types decide the roles."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        self.model = nn.Module()
        for name, value in values(setup, seed).items():
            owner = self.model
            *modules, leaf = name.split(".")
            for part in modules:
                if part not in owner._modules:
                    make = MODULES.get(part)
                    rows, columns = setup.shapes[name.replace(leaf, "weight")] if make else (1, 1)
                    new = make(rows, columns) if make is nn.Embedding else nn.Module()
                    if make is nn.Linear:
                        new = nn.Linear(columns, rows, bias=part == "fc")
                    owner.add_module(part, new)
                owner = owner._modules[part]
            p = nn.Parameter(torch.tensor(value).to(getattr(torch, setup.dtype)), name not in setup.frozen)
            p.device_mesh = SimpleNamespace(mesh_dim_names=(f"mesh{setup.meshes[name]}",))
            owner.register_parameter(leaf, p)
        self.optimizer = torch_impl.build_optimizer(self.model, setup.optimizer_type, **setup.options)
        self.build_scheduler()

    def build_scheduler(self) -> None:
        kind, keywords = self.setup.schedule
        self.scheduler = torch_impl.build_lr_scheduler(self.optimizer, kind, **keywords)

    def run(self, start: int, stop: int) -> Torch:
        for t in range(start, stop):
            gradients = values(self.setup, 100 + t)
            for k, (name, p) in enumerate(self.model.named_parameters()):
                absent = self.setup.missing >> ((5 * t + k) % 30) & 1
                p.grad = torch.tensor(gradients[name]).to(p) if p.requires_grad and not absent else None
            self.optimizer.step()
            self.scheduler.step()
        return self

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy({part: getattr(self, part).state_dict() for part in PARTS})


def through_torch(fmt: str, state: Any) -> Any:
    if fmt == "state_dict":
        return copy.deepcopy(state)
    if fmt == "torch.save":
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)
    with tempfile.TemporaryDirectory() as folder:
        torch_impl.save_checkpoint(Path(folder, "state"), state)
        return torch_impl.load_checkpoint(Path(folder, "state"))


ORDERS = [*itertools.permutations(PARTS), ("model", "optimizer", "build", "scheduler")]


@examples(0.3)
@given(
    setups(),
    st.integers(0, 5),
    st.integers(1, 3),
    st.sampled_from(["state_dict", "torch.save", "save_checkpoint"]),
    st.sampled_from(ORDERS),
)
def test_torch_goes_on_bit_for_bit(setup, before, after, fmt, order):
    whole = Torch(setup).run(0, before + after).snapshot()
    saved = through_torch(fmt, Torch(setup).run(0, before).snapshot())
    resumed = Torch(setup, seed=1)
    for part in order:
        if part == "build":
            resumed.build_scheduler()
        else:
            getattr(resumed, part).load_state_dict(saved[part])
    assert torch_resume.first_difference(whole, resumed.run(before, before + after).snapshot()) is None


def jax_params(setup: Setup, seed: int) -> Any:
    tree: dict[str, Any] = {}
    for name, value in values(setup, seed).items():
        if name in setup.trainable:
            *parts, leaf = name.split(".")
            owner = tree
            for part in parts:
                owner = owner.setdefault(part, {})
            owner[leaf] = jnp.asarray(value, setup.dtype)
    return tree


def jax_transform(setup: Setup, params: Any) -> jax_impl.OptimizerTransform:
    kind, keywords = setup.schedule
    schedule = jax_impl.build_lr_schedule(kind, **keywords)
    return jax_impl.build_optimizer(params, setup.optimizer_type, lr_schedule=schedule, **setup.options)


def jax_run(setup: Setup, transform: Any, trees: Any, start: int, stop: int) -> Any:
    for t in range(start, stop):
        names = list(setup.trainable)

        def gradient(path: Any, g: Any, t: int = t, names: list[str] = names) -> Any:
            name = ".".join(str(key.key) for key in path)
            return None if setup.missing >> ((5 * t + names.index(name)) % 30) & 1 else g

        grads = jax.tree_util.tree_map_with_path(gradient, jax_params(setup, 100 + t))
        updates, state = transform.update(grads, trees["opt_state"], trees["params"])
        trees = {"params": optax.apply_updates(trees["params"], updates), "opt_state": state}
    return trees


def through_jax(fmt: str, fresh: Any, trees: Any, transform: Any) -> Any:
    if fmt == "tree":
        return jax.tree.map(jnp.copy, trees)
    if fmt == "msgpack":
        return serialization.from_bytes(fresh, serialization.to_bytes(trees))
    with tempfile.TemporaryDirectory() as folder:
        jax_impl.save_checkpoint(Path(folder, "state"), trees)
        return transform.restore(fresh, jax_impl.load_checkpoint(Path(folder, "state")))


@examples(0.1)
@given(setups(), st.integers(0, 4), st.integers(1, 2), st.sampled_from(["tree", "msgpack", "save_checkpoint"]))
def test_jax_goes_on_bit_for_bit(setup, before, after, fmt):
    params = jax_params(setup, 0)
    transform = jax_transform(setup, params)
    half = jax_run(setup, transform, {"params": params, "opt_state": transform.init(params)}, 0, before)
    whole = jax_run(setup, transform, half, before, before + after)
    other = jax_params(setup, 1)
    again = jax_transform(setup, other)
    loaded = through_jax(fmt, {"params": other, "opt_state": again.init(other)}, half, again)
    assert jax.tree.structure(loaded) == jax.tree.structure(half)
    resumed = jax_run(setup, again, loaded, before, before + after)
    assert jax_resume.first_difference(named_leaves(whole), named_leaves(resumed)) is None


def expected_groups(setup: Setup) -> dict[str, tuple[float, float]]:
    """{name: (lr, decay)} of what is optimized, by the rules as they are documented."""
    config = torch_impl.config.CONFIGS[setup.optimizer_type]
    decay = setup.options.get(
        "weight_decay", {f: x.default for f, x in config.__dataclass_fields__.items()}["weight_decay"]
    )
    keys = setup.options.get("keys_to_select") or [""]
    table = {}
    for name, shape in setup.trainable.items():
        if any(key in name for key in keys):
            matches = [m for key, m in setup.options.get("lr_multipliers", {}).items() if key in name]
            no_decay = setup.options.get("disable_weight_decay_for_1d_params", False) and len(shape) < 2
            table[name] = (setup.options["lr"] * (matches[0] if matches else 1.0), 0.0 if no_decay else decay)
    return table


@examples(0.2)
@given(setups())
def test_every_parameter_is_in_exactly_one_group(setup):
    expected = expected_groups(setup)
    numbers = {pair: i for i, pair in enumerate(sorted(set(expected.values())))}
    training = Torch(setup)
    params = jax_params(setup, 0)
    tables = (
        training.optimizer.describe(),
        jax_impl.route_parameters(params, setup.optimizer_type, **setup.options),
    )
    by_name = [{route.name: route for route in table} for table in tables]
    assert by_name[0].keys() == by_name[1].keys() == setup.trainable.keys()
    for name in setup.trainable:
        ours, theirs = (table[name] for table in by_name)
        assert (ours.role, ours.group, ours.lr, ours.weight_decay, ours.adjusted_lr) == (
            theirs.role,
            theirs.group,
            theirs.lr,
            theirs.weight_decay,
            theirs.adjusted_lr,
        )
        assert (ours.lr, ours.weight_decay) == expected.get(name, (None, None))
        assert ours.group == numbers.get(expected.get(name))
    found: list[str] = []
    names = {p: name for name, p in training.model.named_parameters()}
    factor = training.scheduler.schedulers[0].lr_lambdas[0](0)
    for optimizer in training.optimizer:
        pairs = []
        for group in optimizer.param_groups:
            inside = [names[p] for p in group["params"]]
            assert inside
            pairs += {expected[name] for name in inside}
            assert float(group["lr"]) == pytest.approx(pairs[-1][0] * factor, rel=1e-6)
            found += inside
        assert pairs == sorted(set(pairs))
    assert sorted(found) == sorted(expected)
    assert {name for name, p in training.model.named_parameters() if p.requires_grad} == set(expected)


def state_fits(optimizer_type: str, saved: str, here: str) -> bool:
    """Moments have the dtype of the parameter (adam), or float32 and masters, which may be missing, below it."""
    if optimizer_type in ("adam", "adamw"):
        return saved == here
    return saved == here or (saved, here) == ("float32", "bfloat16")


@examples(0.2)
@given(neighbours(), st.integers(0, 3))
def test_a_refused_load_changes_nothing(pair, steps):
    """Accepted is exactly what has the same parameters, config and dtypes of state; then all of it is taken."""
    saved_setup, setup = pair
    training = Torch(setup).run(0, 2)
    before = training.snapshot()
    saved = Torch(saved_setup).run(0, steps).snapshot()["optimizer"]
    shapes = [{name: s.shapes[name] for name in expected_groups(s)} for s in pair]
    same = saved["config"] == before["optimizer"]["config"] and shapes[0] == shapes[1]
    same = same and state_fits(setup.optimizer_type, saved_setup.dtype, setup.dtype)
    try:
        training.optimizer.load_state_dict(saved)
    except ValueError:
        assert torch_resume.first_difference(before, training.snapshot()) is None
        assert not same
    else:
        assert same
        found = training.optimizer.state_dict()
        rebuilt = {key for key in found if key.endswith(".master_param")} - set(saved)
        assert torch_resume.first_difference(saved, {key: found[key] for key in found if key not in rebuilt}) is None


def to_toml(config: dict[str, Any]) -> str:
    """Numbers, booleans, strings, lists and one level of tables, as a user writes them."""
    lines, tables = [], []
    for key, value in config.items():
        if isinstance(value, dict):
            tables += [f"[{key}]"] + [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items()]
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines + tables)


CHANGES: dict[str, Any] = {
    "lr": 0.7,
    "weight_decay": 0.123,
    "eps": 1e-3,
    "lr_multipliers": {"tail": 2.0},
    "keys_to_select": ["0."],
    "betas": [0.5, 0.5],
    "adam_betas": [0.5, 0.5],
    "muon_momentum": 0.123,
    "ns_steps": 4,
}


@examples(0.2)
@given(setups(), st.data())
def test_one_config_on_both_sides(setup, data):
    params = jax_params(setup, 0)
    ours = Torch(setup).optimizer
    theirs = jax_impl.build_optimizer(params, setup.optimizer_type, **setup.options)
    config = ours.effective_config()
    assert config == theirs.effective_config()
    sha = torch_impl.config.config_hash(config)
    assert sha == jax_impl.config.config_hash(theirs.effective_config()) == ours.state_dict()["config_hash"]
    assert bytes(np.asarray(theirs.init(params).config_hash).astype(">u4")).hex() == sha
    for again in (json.loads(json.dumps(config)), tomllib.loads(to_toml(config))):
        optimizer_type = again.pop("optimizer_type")
        for module in (torch_impl, jax_impl):
            parsed = module.config.parse_config(optimizer_type, again)
            assert module.config.config_hash(module.config.effective_config(optimizer_type, parsed)) == sha
    changed = data.draw(st.sampled_from([name for name in CHANGES if name in config]))
    assume(config[changed] != CHANGES[changed])
    given_options = {**config, changed: CHANGES[changed]}
    optimizer_type = given_options.pop("optimizer_type")
    parsed = torch_impl.config.parse_config(optimizer_type, given_options)
    assert torch_impl.config.config_hash(torch_impl.config.effective_config(optimizer_type, parsed)) != sha
