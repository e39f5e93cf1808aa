"""Single updates whose result is known by hand, through build_optimizer on both sides."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import jax_impl
import torch_impl

PHI_1 = 0.6964364  # five Newton-Schulz steps on the singular value 1: what a rank-1 gradient becomes
FLOAT32 = 2e-6  # absolute, values near 1
MUON = {"optimizer_type": "muonwithauxadamw", "ns_dtype": "float32"}
ADAM, ADAMW = {"optimizer_type": "adam"}, {"optimizer_type": "adamw"}
FUSED = {"optimizer_type": "fusedadam"}
FUSED_L2 = {**FUSED, "adam_w_mode": False}
LIKE_ADAMW = {**MUON, "adam_betas": (0.9, 0.999)}  # vectors under the hybrid, with the betas of the other two


class Side:
    """Named parameters, an optimizer and a schedule, stepped with given gradients; values as float64 numpy."""

    def __init__(self, params, optimizer_type, schedule=None, dtype="float32", **kwargs):
        self.params, self.schedule, self.dtype = params, schedule, dtype
        self.start(optimizer_type, kwargs)


class Torch(Side):
    def start(self, optimizer_type, kwargs):
        model = nn.Module()
        for name, value in self.params.items():
            *parents, leaf = name.split(".")
            owner = model
            for k, part in enumerate(parents):
                if part not in dict(owner.named_children()):
                    shape = np.shape(value)
                    is_linear = k == len(parents) - 1 and leaf == "weight" and len(shape) == 2
                    owner.add_module(part, nn.Linear(shape[1], shape[0], bias=False) if is_linear else nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(torch.tensor(value, dtype=getattr(torch, self.dtype))))
        self.named = dict(model.named_parameters())
        self.optimizer = torch_impl.build_optimizer(model, optimizer_type, fused=True, **kwargs)
        self.scheduler = None
        if self.schedule:
            self.scheduler = torch_impl.build_lr_scheduler(self.optimizer, self.schedule[0], **self.schedule[1])

    def step(self, grads):
        for name, p in self.named.items():
            g = grads.get(name)
            p.grad = None if g is None or not p.requires_grad else torch.tensor(g, dtype=p.dtype)
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        return {name: p.detach().double().numpy() for name, p in self.named.items()}

    def set(self, name, value):
        with torch.no_grad():
            self.named[name].copy_(torch.tensor(value))

    def state(self, key):
        optimizer = self.optimizer.optimizers[0]
        return {n: optimizer.state[p][key].double().numpy() for n, p in self.named.items() if key in optimizer.state[p]}

    def counts(self):
        optimizer = self.optimizer.optimizers[0]
        owners = [*optimizer.param_groups, *optimizer.state.values()]
        return [owner["step"] for owner in owners if "step" in owner]

    def rates(self):
        return [float(group["lr"]) for optimizer in self.optimizer for group in optimizer.param_groups]

    def routes(self):
        return self.optimizer.describe()


class Jax(Side):
    def start(self, optimizer_type, kwargs):
        self.params = {name: jnp.asarray(value, self.dtype) for name, value in self.params.items()}
        schedule = jax_impl.build_lr_schedule(self.schedule[0], **self.schedule[1]) if self.schedule else None
        self.tx = jax_impl.build_optimizer(self.params, optimizer_type, lr_schedule=schedule, **kwargs)
        self.table = jax_impl.route_parameters(self.params, optimizer_type, **kwargs)
        self.opt_state = self.tx.init(self.params)

    def step(self, grads):
        def cast(g, p):
            return None if g is None else jnp.asarray(g, p.dtype)

        grads = {name: cast(grads.get(name), p) for name, p in self.params.items()}
        updates, self.opt_state = jax.jit(self.tx.update)(grads, self.opt_state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        return {name: np.asarray(p, np.float64) for name, p in self.params.items()}

    def set(self, name, value):
        self.params = {**self.params, name: jnp.asarray(value, self.params[name].dtype)}

    def state(self, key):
        field = {"momentum_buffer": "mu", "exp_avg": "mu", "exp_avg_sq": "nu", "master_param": "master"}[key]
        found = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(self.opt_state)[0]:
            if any(getattr(k, "name", None) == field for k in path):
                found[path[-1].key] = np.asarray(leaf, np.float64)
        return found

    def counts(self):
        leaves = jax.tree_util.tree_flatten_with_path(self.opt_state)[0]
        return [leaf for path, leaf in leaves if any(getattr(k, "name", None) == "count" for k in path)]

    def rates(self):
        return [float(lr) for lr in jax_impl.learning_rates(self.opt_state).values()]

    def routes(self):
        return self.table


SIDES = pytest.mark.parametrize("side", [Torch, Jax])
VECTOR_RULES = pytest.mark.parametrize(
    "options", [ADAM, ADAMW, FUSED, LIKE_ADAMW], ids=["adam", "adamw", "fusedadam", "hybrid"]
)


@SIDES
def test_a_step_count_per_parameter_or_per_group(side):
    """b has gradients at steps 1 and 3 only. Its second update has t = 2 in adamw, t = 3 where a group counts."""
    start = {"a.bias": np.ones(1), "b.bias": np.ones(1)}
    grads = [{"a.bias": [1.0], "b.bias": [1.0]}, {"a.bias": [1.0]}, {"a.bias": [1.0], "b.bias": [1.0]}]
    for options, b in ((ADAM, 0.8), (ADAMW, 0.8), (FUSED, 0.814154), (LIKE_ADAMW, 0.814154)):
        run = side(start, lr=0.1, weight_decay=0.0, **options)
        values = [run.step(g) for g in grads][-1]
        assert values["a.bias"] == pytest.approx(0.7, abs=FLOAT32)
        assert values["b.bias"] == pytest.approx(b, abs=FLOAT32)


@SIDES
@VECTOR_RULES
def test_no_gradient_is_not_a_zero_gradient(side, options):
    run = side({"a.bias": np.ones(1), "b.bias": np.ones(1)}, lr=0.1, weight_decay=0.0, **options)
    run.step({"a.bias": [1.0], "b.bias": [1.0]})
    values = run.step({"a.bias": None, "b.bias": [0.0]})
    assert values["a.bias"] == pytest.approx(0.9, abs=FLOAT32)
    assert values["b.bias"] == pytest.approx(0.832994, abs=FLOAT32)


@SIDES
@VECTOR_RULES
def test_without_a_gradient_nothing_decays(side, options):
    start = {"a.weight": np.ones((2, 2)), "b.bias": np.ones(2), "c.weight": np.ones((2, 2))}
    run = side(start, lr=0.1, weight_decay=0.1, **options)
    for _ in range(2):
        values = run.step({"c.weight": np.eye(2)})
    assert (values["a.weight"] == 1).all()
    assert (values["b.bias"] == 1).all()
    assert (values["c.weight"] != 1).all()


@SIDES
@pytest.mark.parametrize(
    ("options", "moments", "expected"),
    [
        (ADAM, [0.06, 0.01], [0.9, 0.9]),  # the decay is part of the gradient: both entries have one
        (FUSED_L2, [0.06, 0.01], [0.9, 0.9]),
        (ADAMW, [0.05, 0.0], [0.89, 0.99]),
        (FUSED, [0.05, 0.0], [0.89, 0.99]),
        (LIKE_ADAMW, [0.05, 0.0], [0.89, 0.99]),
    ],
)
def test_the_first_update_may_have_lr_zero(side, options, moments, expected):
    """f(0) = 0: decay is off as well, the moments advance; then 1 (1 - .01) - 0.1."""
    schedule = ("wsd", dict(warm_up_steps=1, total_steps=9, decay_steps=1, f_start=0.0, f_max=1.0, f_min=0.0))
    run = side({"a.bias": np.ones(2)}, schedule=schedule, lr=0.1, weight_decay=0.1, **options)
    assert (run.step({"a.bias": [0.5, 0.0]})["a.bias"] == 1.0).all()
    np.testing.assert_allclose(run.state("exp_avg")["a.bias"], moments, atol=FLOAT32)
    assert {int(count) for count in run.counts()} == {1}
    np.testing.assert_allclose(run.step({"a.bias": [0.5, 0.0]})["a.bias"], expected, atol=FLOAT32)


@SIDES
def test_l2_and_decoupled_decay(side):
    """p = 1, g = 0, lr = wd = 0.1: decoupled decay gives 0.99, L2 becomes a gradient of size one: 0.9."""
    for options, expected in ((ADAMW, 0.99), (FUSED, 0.99), (LIKE_ADAMW, 0.99), (ADAM, 0.9), (FUSED_L2, 0.9)):
        run = side({"a.bias": np.ones(1)}, lr=0.1, weight_decay=0.1, **options)
        assert run.step({"a.bias": [0.0]})["a.bias"] == pytest.approx(expected, abs=FLOAT32)


@SIDES
def test_all_zero_gradients_only_decay(side):
    start = {"a.weight": np.ones((2, 2)), "b.bias": np.ones(2)}
    run = side(start, lr=0.1, weight_decay=0.1, **MUON)
    values = run.step({"a.weight": np.zeros((2, 2)), "b.bias": np.zeros(2)})
    for value in values.values():
        np.testing.assert_allclose(value, 0.99, atol=FLOAT32)
    assert not run.state("momentum_buffer")["a.weight"].any()


@SIDES
@pytest.mark.parametrize(("options", "weight"), [(ADAM, 0.5), (ADAMW, 0.95), (FUSED, 0.95), (MUON, 0.95)])
def test_multiplier_and_no_decay_meet(side, options, weight):
    """lr .1 times 5, decay .1 of the weight alone: .95, or a whole step of .5 where decay is a gradient."""
    start = {"head.weight": np.ones((2, 2)), "head.bias": np.ones(2)}
    groups = dict(lr_multipliers={"head": 5.0}, disable_weight_decay_for_1d_params=True)
    run = side(start, lr=0.1, weight_decay=0.1, **groups, **options)
    values = run.step({"head.weight": np.zeros((2, 2)), "head.bias": np.zeros(2)})
    np.testing.assert_allclose(values["head.weight"], weight, atol=FLOAT32)
    assert (values["head.bias"] == 1).all()


@SIDES
@VECTOR_RULES
def test_frozen_parameters_stay(side, options):
    start = {"body.weight": np.ones((2, 2)), "head.weight": np.ones((2, 2))}
    run = side(start, lr=0.1, weight_decay=0.1, keys_to_select=["head"], **options)
    for _ in range(3):
        values = run.step({"body.weight": np.ones((2, 2)), "head.weight": np.ones((2, 2))})
    assert (values["body.weight"] == 1).all()
    assert (values["head.weight"] < 0.99).all()
    assert len(run.rates()) == 1
    assert "body.weight" not in run.state("exp_avg") | run.state("momentum_buffer")


@SIDES
def test_muon_scale_and_decay(side):
    """A 4x2 matrix of ones, one gradient entry 2.0: untouched entries 1 - lr wd, the other .2 sqrt(4) phi5(1) less."""
    gradient = np.zeros((4, 2))
    gradient[0, 1] = 2.0
    run = side({"a.weight": np.ones((4, 2))}, lr=0.1, weight_decay=0.1, **MUON)
    expected = np.full((4, 2), 0.99)
    expected[0, 1] = 0.962143
    np.testing.assert_allclose(run.step({"a.weight": gradient})["a.weight"], expected, atol=FLOAT32)


def test_muon_on_an_in_out_kernel():
    """The same numbers for Flax's storage order, whose rule by name needs no axes."""
    gradient = np.zeros((2, 4))
    gradient[1, 0] = 2.0
    run = Jax({"a.kernel": np.ones((2, 4))}, lr=0.1, weight_decay=0.1, **MUON)
    expected = np.full((2, 4), 0.99)
    expected[1, 0] = 0.962143
    np.testing.assert_allclose(run.step({"a.kernel": gradient})["a.kernel"], expected, atol=FLOAT32)
    assert jax_impl.route_parameters(run.params, "muonwithauxadamw", lr=0.1)[0].adjusted_lr == pytest.approx(0.04)


@SIDES
def test_momentum_is_a_sum(side):
    """g = e00, then e11: M = diag(.95, 1), candidate diag(.9025, 1.95), second update diag(1.126131, .686749)."""
    run = side({"a.weight": np.zeros((2, 2))}, lr=1.0, weight_decay=0.0, muon_lr_scale=0.5**0.5, **MUON)  # scale 1
    first = run.step({"a.weight": np.diag([1.0, 0.0])})["a.weight"]
    second = run.step({"a.weight": np.diag([0.0, 1.0])})["a.weight"]
    np.testing.assert_allclose(run.state("momentum_buffer")["a.weight"], np.diag([0.95, 1.0]), atol=FLOAT32)
    np.testing.assert_allclose(first - second, np.diag([1.126131, 0.686749]), atol=1e-5)


def test_optax_muon_is_another_muon():
    """optax.contrib bias-corrects the two Nesterov terms with different counts: 10 % off at step 2."""
    run = Jax({"a.weight": np.zeros((2, 2))}, lr=1.0, weight_decay=0.0, muon_lr_scale=0.5**0.5, **MUON)
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    peer = optax.contrib.scale_by_muon(weight_dimension_numbers={"a.weight": axes})
    params = {"a.weight": jnp.zeros((2, 2))}
    state = peer.init(params)
    gradients = [np.diag([1.0, 0.0]), np.diag([0.0, 1.0])]
    values = [np.zeros((2, 2))] + [run.step({"a.weight": g})["a.weight"] for g in gradients]
    ours = -np.diff(values, axis=0)
    theirs = []
    for g in gradients:
        update, state = peer.update({"a.weight": jnp.asarray(g)}, state, params)
        theirs.append(np.asarray(update["a.weight"]))
    np.testing.assert_allclose(theirs[0], ours[0], atol=1e-4)
    np.testing.assert_allclose(theirs[1], np.diag([1.074009, 0.744826]), atol=1e-3)
    assert np.abs(theirs[1] - ours[1]).max() > 0.04


# a vector, and a (1, 1) matrix whose scale makes every update lr as well
BOTH_ROLES = pytest.mark.parametrize(
    ("name", "gradient", "options"),
    [
        ("a.bias", [1.0], MUON),
        ("a.weight", [[1.0]], {**MUON, "muon_lr_scale": 1 / PHI_1}),
        ("a.bias", [1.0], FUSED),
        ("a.weight", [[1.0]], FUSED_L2),
    ],
    ids=["vector", "matrix", "fusedadam", "fusedadam-l2"],
)


@SIDES
@BOTH_ROLES
def test_masters_keep_what_bfloat16_loses(side, name, gradient, options):
    """Ten updates of 0.001: each alone would round to nothing; the master is 0.99 and the parameter its rounding."""
    run = side({name: np.ones_like(gradient)}, lr=0.001, weight_decay=0.0, dtype="bfloat16", **options)
    for _ in range(10):
        values = run.step({name: gradient})
    np.testing.assert_allclose(run.state("master_param")[name], 0.99, atol=FLOAT32)
    assert (values[name] == 0.98828125).all()


@SIDES
@pytest.mark.parametrize(
    "options", [ADAM, ADAMW, {**FUSED, "master_weights": False}, {**MUON, "master_weights": False}]
)
def test_without_masters_bfloat16_loses_it(side, options):
    run = side({"a.bias": np.ones(3)}, lr=0.001, weight_decay=0.0, dtype="bfloat16", **options)
    for _ in range(10):
        values = run.step({"a.bias": np.ones(3)})
    assert (values["a.bias"] == 1.0).all()


@SIDES
@BOTH_ROLES
def test_new_weights_win_over_a_stale_master(side, name, gradient, options):
    """Weights are loaded behind the optimizer's back: the next step starts from them."""
    run = side({name: np.ones_like(gradient)}, lr=0.5, weight_decay=0.0, dtype="bfloat16", **options)
    assert run.step({name: gradient})[name] == 0.5
    run.set(name, np.full_like(gradient, 5.0))
    assert run.step({name: gradient})[name] == 4.5


@SIDES
@pytest.mark.parametrize("options", [MUON, FUSED], ids=["hybrid", "fusedadam"])
def test_float32_parameters_have_no_master(side, options):
    run = side({"a.bias": np.ones(1)}, lr=0.5, weight_decay=0.0, **options)
    run.step({"a.bias": [1.0]})
    assert run.state("master_param") == {}


@SIDES
def test_idle_experts_keep_everything(side):
    start = {"experts.up": np.ones((2, 3, 4))}
    run = side(start, lr=0.1, weight_decay=0.1, expert_param_keywords=["experts"], **MUON)
    both, one = np.ones((2, 3, 4)), np.stack([np.ones((3, 4)), np.zeros((3, 4))])
    before = run.step({"experts.up": both})["experts.up"]
    momentum = run.state("momentum_buffer")["experts.up"].copy()
    after = run.step({"experts.up": one})["experts.up"]
    assert (after[1] == before[1]).all()
    assert (run.state("momentum_buffer")["experts.up"][1] == momentum[1]).all()
    assert (after[0] < before[0]).all()
    np.testing.assert_allclose(run.state("momentum_buffer")["experts.up"][0], 1.95, atol=FLOAT32)


@SIDES
@pytest.mark.parametrize("nesterov", [True, False])
def test_gradient_and_momentum_are_left_alone(side, nesterov):
    """bfloat16 parameters once made the momentum buffer the array that is normalized in place."""
    run = side({"a.weight": np.ones((2, 2))}, dtype="bfloat16", lr=0.0, weight_decay=0.0, nesterov=nesterov, **MUON)
    run.step({"a.weight": np.full((2, 2), 4.0)})
    assert (run.state("momentum_buffer")["a.weight"] == 4.0).all()
    if side is Torch:
        assert (run.named["a.weight"].grad == 4.0).all()


def test_torch_rejects_sparse_gradients_before_anything_changes():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "table": nn.Embedding(3, 2, sparse=True)})
    optimizer = torch_impl.build_optimizer(model, "muonwithauxadamw", lr=0.1, fused=True)
    model["table"](torch.tensor([1])).sum().backward()
    model["a"](torch.ones(2)).sum().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert optimizer.optimizers[0].param_groups[0]["step"] == 0
