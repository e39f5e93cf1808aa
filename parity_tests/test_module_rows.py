"""Updates of real modules, routed by what they are: norms, stacked layers, tied weights, convolutions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen
from torch import nn

import jax_impl
import torch_impl
from parity_tests.test_update_rules import FLOAT32

TYPES = ("adam", "adamw", "fusedadam", "muonwithauxadamw")
AXES = jax_impl.MatrixAxes
KERNEL_DECAYS = pytest.mark.parametrize(
    ("optimizer_type", "kernel"), [("adam", 0.9), ("adamw", 0.99), ("fusedadam", 0.99), ("muonwithauxadamw", 0.99)]
)


def options_of(optimizer_type, **options):
    return {"lr": 0.1, **({"ns_dtype": "float32"} if optimizer_type == "muonwithauxadamw" else {}), **options}


def torch_update(model, grads, optimizer_type, **options):
    """{name: value} after one update; ``grads`` by name."""
    optimizer = torch_impl.build_optimizer(model, optimizer_type, fused=True, **options_of(optimizer_type, **options))
    for name, p in model.named_parameters():
        p.grad = torch.tensor(np.asarray(grads[name]), dtype=p.dtype)
    optimizer.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def jax_update(params, grads, optimizer_type, **options):
    """The tree after one update."""
    tx = jax_impl.build_optimizer(params, optimizer_type, **options_of(optimizer_type, **options))
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


class Block(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.LayerNorm()(linen.Dense(2)(x))


@KERNEL_DECAYS
def test_only_kernels_decay(optimizer_type, kernel):
    """All ones, no gradient, lr = decay = .1; the norm's weight is called scale in Flax and weight in torch."""
    params = Block().init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    assert set(params) == {"Dense_0", "LayerNorm_0"}
    params = jax.tree.map(jnp.ones_like, params)
    decay = dict(weight_decay=0.1, disable_weight_decay_for_1d_params=True)
    moved = jax_update(params, jax.tree.map(jnp.zeros_like, params), optimizer_type, **decay)
    np.testing.assert_allclose(moved["Dense_0"]["kernel"], kernel, atol=FLOAT32)
    del moved["Dense_0"]["kernel"]
    assert [leaf.tolist() for leaf in jax.tree.leaves(moved)] == [[1.0, 1.0]] * 3

    model = nn.ModuleDict({"Dense_0": nn.Linear(2, 2), "LayerNorm_0": nn.LayerNorm(2)})
    zeros = {}
    for name, p in model.named_parameters():
        nn.init.ones_(p)
        zeros[name] = np.zeros(p.shape)
    values = torch_update(model, zeros, optimizer_type, **decay)
    np.testing.assert_allclose(values.pop("Dense_0.weight"), kernel, atol=FLOAT32)
    assert [value.tolist() for value in values.values()] == [[1.0, 1.0]] * 3


@KERNEL_DECAYS
def test_stacked_layers(optimizer_type, kernel):
    """Scales (2, 3) and kernels (2, 3, 4) of two scanned layers: vectors and matrices, each layer as if alone."""
    axes = {"kernel": AXES(fan_out=2, fan_in=1, batch=0), "scale": AXES(fan_out=1, fan_in=(), batch=0)}
    decay = dict(weight_decay=0.1, disable_weight_decay_for_1d_params=True)
    params = {"kernel": jnp.ones((2, 3, 4)), "scale": jnp.ones((2, 3))}
    still = jax_update(params, jax.tree.map(jnp.zeros_like, params), optimizer_type, matrix_axes=axes, **decay)
    assert (still["scale"] == 1).all()
    np.testing.assert_allclose(still["kernel"], kernel, atol=FLOAT32)

    rng = np.random.default_rng(0)
    grads = {"kernel": jnp.asarray(rng.normal(size=(2, 3, 4))), "scale": jnp.asarray(rng.normal(size=(2, 3)))}
    grads["kernel"] = grads["kernel"] * jnp.array([1.0, 100.0])[:, None, None]  # each layer has its own norm
    moved = jax_update(params, grads, optimizer_type, matrix_axes=axes, **decay)
    for layer in range(2):
        model = nn.Module()
        model.register_module("dense", nn.Linear(3, 4, bias=False))
        model.register_parameter("scale", nn.Parameter(torch.ones(3)))
        nn.init.ones_(model.dense.weight)
        alone = torch_update(
            model, {"dense.weight": grads["kernel"][layer].T, "scale": grads["scale"][layer]}, optimizer_type, **decay
        )
        np.testing.assert_allclose(moved["kernel"][layer], alone["dense.weight"].T, atol=FLOAT32)
        np.testing.assert_allclose(moved["scale"][layer], alone["scale"], atol=FLOAT32)


@pytest.mark.parametrize("head_first", [True, False])
@pytest.mark.parametrize("optimizer_type", TYPES)
def test_a_tied_head_is_updated_once(optimizer_type, head_first):
    """One tensor under two names moves by the lr once, and not along an orthogonalized gradient."""
    parts = {"embed": nn.Embedding(4, 2), "decoder": nn.Linear(2, 4, bias=False), "fc": nn.Linear(2, 2, bias=False)}
    model = nn.ModuleDict({name: parts[name] for name in sorted(parts, reverse=not head_first)})
    model["decoder"].weight = model["embed"].weight
    before = {name: p.detach().clone().numpy() for name, p in model.named_parameters()}
    (tied,) = set(before) - {"fc.weight"}
    grads = {tied: np.ones((4, 2)), "fc.weight": np.diag([1.0, 0.0])}
    values = torch_update(model, grads, optimizer_type, weight_decay=0.0)
    np.testing.assert_allclose(values[tied], before[tied] - 0.1, atol=FLOAT32)
    assert model["decoder"].weight is model["embed"].weight

    params = {"embed": {"embedding": jnp.asarray(before[tied])}, "fc": {"kernel": jnp.asarray(before["fc.weight"].T)}}
    tree = {"embed": {"embedding": jnp.ones((4, 2))}, "fc": {"kernel": jnp.diag(jnp.array([1.0, 0.0]))}}
    moved = jax_update(params, tree, optimizer_type, weight_decay=0.0)  # a head that attends to the embedding
    np.testing.assert_allclose(moved["embed"]["embedding"], values[tied], atol=FLOAT32)
    np.testing.assert_allclose(moved["fc"]["kernel"].T, values["fc.weight"], atol=FLOAT32)


@pytest.mark.parametrize("optimizer_type", TYPES)
def test_convolutions_are_adamw_s(optimizer_type):
    """(16, 1, 3, 3) with one gradient entry: a step of lr there, whatever a flattened matrix would be scaled by."""
    model = nn.ModuleDict({"conv": nn.Conv2d(1, 16, 3, bias=False)})
    before = model["conv"].weight.detach().clone().numpy()
    gradient = np.zeros((16, 1, 3, 3))
    gradient[5, 0, 1, 2] = 2.0
    step = np.where(gradient != 0, 0.1, 0.0)
    values = torch_update(model, {"conv.weight": gradient}, optimizer_type, weight_decay=0.0)
    np.testing.assert_allclose(before - values["conv.weight"], step, atol=FLOAT32)

    to_flax = (2, 3, 1, 0)  # (height, width, in, out)
    params = {"conv": {"kernel": jnp.asarray(before.transpose(to_flax))}}
    grads = {"conv": {"kernel": jnp.asarray(gradient.transpose(to_flax), jnp.float32)}}
    moved = jax_update(params, grads, optimizer_type, weight_decay=0.0)
    np.testing.assert_allclose(
        params["conv"]["kernel"] - moved["conv"]["kernel"], step.transpose(to_flax), atol=FLOAT32
    )
