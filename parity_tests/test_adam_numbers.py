"""Adam on vectors, number by number: the plain types and the AdamW side of the hybrid, on both sides."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from parity_tests.test_update_rules import FLOAT32, FUSED, FUSED_L2, LIKE_ADAMW, SIDES, VECTOR_RULES
from torch_impl.adam_step import AdamRule, AdamTensors, adam_on_cpu_, adam_unfused_


@SIDES
@VECTOR_RULES
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_three_updates_by_hand(side, options, dtype):
    """g = .5, -.25, .125: .9, .8733662987, .8393233849. Nesterov moments, as in optax's muon, would start at .8526."""
    run = side({"a.bias": np.ones(1, dtype)}, lr=0.1, weight_decay=0.0, dtype=dtype, **options)
    for g, expected, printed in ((0.5, 0.9, 2.1e-9), (-0.25, 0.8733662987, 5e-11), (0.125, 0.8393233849, 5e-11)):
        allowed = FLOAT32 if dtype == "float32" else printed  # half a unit of the digits above; the first: lr eps / g
        assert run.step({"a.bias": [g]})["a.bias"] == pytest.approx(expected, abs=allowed)


FUSED_NUMBERS = {
    # name: (options, parameter after each of three updates with g = .5, -.25, .125, from p = 1 with lr .1)
    # m / sqrt(v) = .05 / .0158114, .02 / .0176706, .0305 / .0180987
    "no bias correction": ({**FUSED, "bias_correction": False, "weight_decay": 0.0}, (0.6837722, 0.5705899, 0.4020694)),
    # 1 - .1 - .01, .89 - .0266337 - .0089, .8544663 - .0340429 - .0085447: decay of the old p, beside the step
    "decoupled decay": ({**FUSED, "weight_decay": 0.1}, (0.89, 0.8544663, 0.8118787)),
    # u = g / sqrt(v / (1 - b2^t)) = .5 / .5, -.25 / .3952254, .125 / .3306007
    "beta1 zero": ({**FUSED, "betas": (0.0, 0.999), "weight_decay": 0.0}, (0.9, 0.9632550, 0.9254451)),
    # gradients .5 + .1, -.25 + .09, .125 + .0854441; steps of 1, .2 / .4389947, .2038540 / .3784050
    "l2": ({**FUSED_L2, "weight_decay": 0.1}, (0.9, 0.8544414, 0.8005695)),
}


@SIDES
@pytest.mark.parametrize("name", FUSED_NUMBERS)
def test_flags_of_fused_adam_by_hand(side, name):
    options, expected = FUSED_NUMBERS[name]
    run = side({"a.bias": np.ones(1)}, lr=0.1, **options)
    for g, value in zip((0.5, -0.25, 0.125), expected, strict=True):
        assert run.step({"a.bias": [g]})["a.bias"] == pytest.approx(value, abs=FLOAT32)


def test_optax_muon_has_another_adam_side():
    """Its nesterov=True reaches the vectors too: first update .147 instead of .1."""
    peer = optax.contrib.muon(0.1, adam_b2=0.999)
    params = {"a.bias": jnp.ones(1)}
    state = peer.init(params)
    for g, theirs, ours in ((0.5, 0.8526326, 0.9), (-0.25, 0.8691188, 0.8733672)):
        updates, state = peer.update({"a.bias": jnp.array([g])}, state, params)
        params = optax.apply_updates(params, updates)
        assert float(params["a.bias"][0]) == pytest.approx(theirs, abs=FLOAT32)
        assert abs(theirs - ours) > 1000 * FLOAT32


@SIDES
@VECTOR_RULES
def test_lr_zero_divides_nothing_by_zero(side, options):
    """A zero entry under lr 0: with a denominator scaled by lr it would be 0 / 0."""
    run = side(
        {"a.bias": np.ones(2), "b.weight": np.ones((2, 2))}, lr=0.0, weight_decay=0.1, capturable=True, **options
    )
    values = run.step({"a.bias": [0.0, 1.0], "b.weight": [[0.0, 0.0], [0.0, 1.0]]})
    assert (values["a.bias"] == 1).all()
    assert (values["b.weight"] == 1).all()


@pytest.mark.parametrize("update_", [adam_on_cpu_, adam_unfused_])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rules_divide_nothing_by_an_lr_of_zero(update_, dtype):
    """The same for both ways in which torch_impl updates vectors."""
    p, m, v = torch.ones(2, dtype=dtype), *(torch.zeros(2, 2, dtype=dtype))
    g = torch.tensor([0.0, 1.0], dtype=dtype)
    rule = AdamRule(torch.zeros((), dtype=dtype), 0.1, (0.9, 0.999), 1e-8)
    update_([AdamTensors(p, g, m, v, None)], torch.ones(()), rule, None)
    assert (p == 1).all()
    np.testing.assert_allclose(m, [0.0, 0.1], rtol=1e-6)


@pytest.fixture(params=["float32", "bfloat16"])
def default_dtype(request):
    """torch's default dtype, which reaches every tensor made without one."""
    torch.set_default_dtype(getattr(torch, request.param))
    yield request.param
    torch.set_default_dtype(torch.float32)


@SIDES
@VECTOR_RULES
def test_the_step_count_passes_256(side, options, default_dtype):
    """A bfloat16 counter would stop at 256; with a constant gradient every update is exactly lr."""
    run = side({"a.bias": np.ones(1)}, lr=0.001, weight_decay=0.0, **options)
    for _ in range(300):
        values = run.step({"a.bias": [1.0]})
    assert {int(count) for count in run.counts()} == {300}
    assert {str(count.dtype).removeprefix("torch.") for count in run.counts()} <= {"float32", "int32"}
    assert values["a.bias"] == pytest.approx(0.7, abs=1e-5)  # 300 roundings of float32


@SIDES
def test_the_step_count_of_bfloat16_parameters_passes_256(side):
    run = side({"a.bias": np.ones(1)}, lr=0.001, weight_decay=0.0, dtype="bfloat16", **LIKE_ADAMW)
    for _ in range(300):
        run.step({"a.bias": [1.0]})
    assert {int(count) for count in run.counts()} == {300}
    assert run.state("master_param")["a.bias"] == pytest.approx(0.7, abs=1e-5)
