"""Published training configurations, built on both sides, and the lr that their own systems give at some steps.

Sources: cosmos-framework's configurations and examples, microsoft/dion's configs, torchtitan's config registry.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from torch import nn

import jax_impl
import torch_impl
from parity_tests.test_update_rules import SIDES

PRINTED = 1e-7  # relative; the values below have eight digits


def one_cycle(warm_up, length, f_start, f_max, f_min):
    cycle = dict(warm_up_steps=warm_up, cycle_lengths=length, f_start=f_start, f_max=f_max, f_min=f_min)
    return {name: [value] for name, value in cycle.items()}


def wsd(warm_up, total, decay, f_start, f_max, f_min, **options):
    return dict(
        warm_up_steps=warm_up,
        total_steps=total,
        decay_steps=decay,
        f_start=f_start,
        f_max=f_max,
        f_min=f_min,
        **options,
    )


def from_torchtitan(warm_up, steps, decay_steps, f_min, decay_type):
    """torchtitan evaluates its schedule one step later: update n has (n + 1) / warm_up, not n / warm_up.

    The same values come from a ramp that starts at 1 / warm_up and is one step shorter; the decay stays in place.
    """
    return wsd(warm_up - 1, steps, decay_steps, 1 / warm_up, 1.0, f_min, decay_type=decay_type)


ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1}
GENERATION = ["moe_gen", "time_embedder", "vae2llm", "llm2vae"]
ACTION = ["action2llm", "llm2action", "action_modality_embed"]
REST = "everything else"

# id: (optimizer_type, keywords, schedule type, its keywords, {update: lr}, {substring of a name: factor of its lr}).
# Names without a factor are frozen, unless there is one for the rest.
CONFIGS = {
    "cosmos vision_sft_nano": (
        "adamw",
        dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0, keys_to_select=GENERATION),
        "lambdacosine",
        one_cycle(50, 1000, 0.0, 1.0, 0.0),
        {0: 0.0, 1: 2e-6, 25: 5e-5, 50: 1e-4, 500: 5.4128967e-5, 1000: 0.0},
        dict.fromkeys(GENERATION, 1.0),
    ),
    "cosmos vision_sft_super": (
        "adamw",
        dict(lr=5e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0, keys_to_select=["lora_"]),
        "lambdacosine",
        one_cycle(50, 1000, 0.0, 1.0, 0.0),
        {0: 0.0, 1: 1e-5, 25: 2.5e-4, 50: 5e-4, 500: 2.70644835e-4, 1000: 0.0},
        {"lora_": 1.0},
    ),
    "cosmos action_policy_libero_10_nano, as adamw": (
        "adamw",
        dict(
            lr=5e-5,
            betas=(0.9, 0.99),
            eps=1e-8,
            weight_decay=0.05,
            keys_to_select=[*GENERATION, *ACTION],
            lr_multipliers=dict.fromkeys(ACTION, 5.0),
        ),
        "lambdalinear",
        one_cycle(500, 16000, 1e-6, 1.0, 0.0),
        {0: 5e-11, 250: 2.5000025e-5, 500: 5e-5, 2000: 4.516129032e-5},
        {**dict.fromkeys(GENERATION, 1.0), **dict.fromkeys(ACTION, 5.0)},
    ),
    "cosmos reasoner": (
        "adamw",
        dict(lr=2e-6, lr_multipliers={"model.visual": 0.1}, **ADAMW),
        "lambdacosine",
        one_cycle(1000, 10000, 0.01, 1.0, 0.1),
        {0: 2e-8, 1000: 2e-6, 5500: 1.1e-6, 10000: 2e-7},
        {"model.visual": 0.1, REST: 1.0},
    ),
    "cosmos llava_ov, warm-up longer than the cycle": (
        "adamw",
        dict(lr=1e-5, **ADAMW),
        "lambdacosine",
        one_cycle(1000, 500, 0.05, 1.0, 0.5),
        {0: 5e-7, 500: 5.25e-6},
        {"": 1.0},
    ),
    "cosmos wsd": (
        "adamw",
        dict(lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1),
        "wsd",
        wsd(2000, 50000, 5000, 0.01, 1.0, 0.1),
        {
            0: 1e-6,
            1000: 5.05e-5,
            2000: 1e-4,
            45000: 1e-4,
            46250: 8.68198052e-5,
            47500: 5.5e-5,
            49999: 1.000000888e-5,  # 1 - cos x = x^2 / 2 at x = pi / 5000
            50000: 1e-5,
            60000: 1e-5,
        },
        {"": 1.0},
    ),
    "cosmos lambdalinear, a cycle of 1e13": (
        "adamw",
        dict(lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1),
        "lambdalinear",
        one_cycle(1000, 10**13, 1e-6, 1.0, 1.0),
        {0: 1e-10, 500: 5.000005e-5, 1000: 1e-4, 2_000_000_000: 1e-4},
        {"": 1.0},
    ),
    "cosmos Muon": (
        "muonwithauxadamw",
        dict(lr=1e-4, weight_decay=0.1, adam_betas=(0.9, 0.99), eps=1e-8, muon_momentum=0.95, muon_lr_scale=0.2),
        "lambdacosine",
        one_cycle(2000, 100000, 0.0, 1.0, 0.0),
        {0: 0.0, 2000: 1e-4, 51000: 5e-5},
        {"": 1.0},
    ),
    "dion dion2_160m, schedule": (
        "adamw",
        dict(lr=0.02, weight_decay=0.01),
        "wsd",
        wsd(0, 3000, 600, 0.0, 1.0, 0.0, decay_type="linear"),
        {0: 0.02, 2400: 0.02, 2700: 0.01, 2999: 3.33333333e-5, 3000: 0.0},
        {"": 1.0},
    ),
    "torchtitan llama3 debug": (
        "adamw",
        dict(lr=8e-4, **ADAMW),
        "wsd",
        from_torchtitan(2, 10, 8, 0.0, "linear"),
        dict(enumerate([4e-4, 8e-4, 8e-4, 7e-4, 6e-4, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4])),
        {"": 1.0},
    ),
    "torchtitan deepseek_v3 16B": (
        "adamw",
        dict(lr=2.2e-4, **ADAMW),
        "wsd",
        from_torchtitan(200, 1000, 800, 0.1, "cosine"),
        {0: 1.1e-6, 199: 2.2e-4, 200: 2.2e-4, 599: 1.2138877e-4, 999: 2.2000763e-5},
        {"": 1.0},
    ),
    "torchtitan moonlight_16b_a3b": (
        "muonwithauxadamw",
        dict(lr=3e-4, weight_decay=0.1, adam_betas=(0.9, 0.95)),
        "wsd",
        from_torchtitan(2000, 10000, 8000, 0.1, "cosine"),
        {0: 1.5e-7, 1999: 3e-4, 5999: 1.6505301e-4, 9999: 3.000001e-5},
        {"": 1.0},
    ),
    "torchtitan flux_dev, no decay": (
        "adamw",
        dict(lr=1e-4, **ADAMW),
        "wsd",
        from_torchtitan(3000, 30000, 0, 0.0, "linear"),
        {0: 3.33333333e-8, 1499: 5e-5, 2999: 1e-4, 29999: 1e-4},
        {"": 1.0},
    ),
    # its three optimizers as one: the lr of each; that embeddings do not decay cannot be said with multipliers
    "torchtitan qwen3 MoE debug, 8 : 1 : 8": (
        "adamw",
        dict(lr=8e-4, lr_multipliers={"router.gate": 0.125, "router": 1.0, "embed": 1.0}, **ADAMW),
        "wsd",
        from_torchtitan(2, 10, 8, 0.0, "linear"),
        dict(enumerate([4e-4, 8e-4, 8e-4, 7e-4, 6e-4, 5e-4, 4e-4, 3e-4, 2e-4, 1e-4])),
        {"router.gate": 0.125, REST: 1.0},
    ),
    # past the end its lr is zero, ours keeps the last value
    "maxtext base, cosine": (
        "adamw",
        dict(lr=3e-5, eps=1e-8, **ADAMW),
        "lambdacosine",
        one_cycle(15000, 150001, 0.0, 1.0, 0.1),
        {0: 0.0, 7500: 1.5e-5, 15000: 3e-5, 82500: 1.650015708e-5, 150001: 3e-6, 200000: 3e-6},
        {"": 1.0},
    ),
    "maxtext base, wsd": (
        "adamw",
        dict(lr=3e-5, eps=1e-8, **ADAMW),
        "wsd",
        wsd(15000, 150001, 15000, 0.0, 1.0, 0.1, decay_type="linear"),
        {0: 0.0, 7500: 1.5e-5, 15000: 3e-5, 135001: 3e-5, 142501: 1.65e-5, 150001: 3e-6, 200000: 3e-6},
        {"": 1.0},
    ),
    "maxtext base, Muon": (
        "muonwithauxadamw",
        dict(lr=3e-5, weight_decay=0.0, muon_momentum=0.95, adam_betas=(0.9, 0.95)),
        "lambdacosine",
        one_cycle(15000, 150001, 0.0, 1.0, 0.1),
        {0: 0.0, 15000: 3e-5, 82500: 1.650015708e-5, 150001: 3e-6},
        {"": 1.0},
    ),
}
MODULES = (
    "model.visual.patch",
    "blocks.moe_gen.up",
    "blocks.lora_a",
    "blocks.router.gate",
    "time_embedder.in",
    "vae2llm",
    "llm2vae",
    "action2llm",
    "llm2action",
    "action_modality_embed",
)


def torch_model():
    model = nn.Module()
    for path in MODULES:
        *parents, leaf = path.split(".")
        owner = model
        for part in parents:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.add_module(leaf, nn.Linear(2, 4))
    return model


def jax_params():
    params: dict = {}
    for path in MODULES:
        owner = params
        for part in path.split("."):
            owner = owner.setdefault(part, {})
        owner |= {"kernel": jnp.zeros((2, 4)), "bias": jnp.zeros(4)}
    return params


@pytest.mark.parametrize("name", CONFIGS)
def test_learning_rates(name):
    optimizer_type, kwargs, lr_scheduler_type, schedule, expected, factors = CONFIGS[name]
    optimizer = torch_impl.build_optimizer(torch_model(), optimizer_type, fused=True, **kwargs)
    scheduler = torch_impl.build_lr_scheduler(optimizer, lr_scheduler_type, **schedule)
    f = scheduler.schedulers[0].lr_lambdas[0]
    jax_f = jax_impl.build_lr_schedule(lr_scheduler_type, **schedule)
    params = jax_params()
    jax_table = jax_impl.route_parameters(params, optimizer_type, **kwargs)
    for table in (optimizer.describe(), jax_table):
        trained = [route for route in table if route.group is not None]
        for route in trained:
            (factor,) = {value for key, value in factors.items() if key in route.name} or {factors[REST]}
            for n, lr in expected.items():
                for schedule_of_a_side in (f, jax_f):
                    found = route.lr * float(schedule_of_a_side(n))
                    assert found == pytest.approx(factor * lr, rel=PRINTED, abs=1e-20), (route.name, n)
        frozen = {route.name for route in table if route.group is None}
        assert all(REST not in factors and not any(key in name for key in factors) for name in frozen)
        assert len(trained) + len(frozen) == 2 * len(MODULES)
    live = [float(lr) for lr in scheduler.get_last_lr()]
    assert live == pytest.approx(sorted({factor * expected[0] for factor in factors.values()}), rel=1e-6)
    opt_state = jax_impl.build_optimizer(params, optimizer_type, lr_schedule=jax_f, **kwargs).init(params)
    np.testing.assert_allclose(list(jax_impl.learning_rates(opt_state).values()), live, rtol=1e-6)


@SIDES
def test_adjusted_lr_and_decay_of_cosmos_muon(side):
    """A 4x2 matrix at the peak: factor .2 sqrt(4) = .4, and 1 - 1e-5 of its value is left by the decay."""
    _, kwargs, *_ = CONFIGS["cosmos Muon"]
    run = side({"fc.weight": np.ones((4, 2))}, "muonwithauxadamw", **kwargs)
    (route,) = run.routes()
    assert route.adjusted_lr == pytest.approx(4e-5)
    weight = run.step({"fc.weight": np.zeros((4, 2))})["fc.weight"]
    np.testing.assert_allclose(weight, 1 - 1e-5, rtol=0, atol=6e-8)  # half a unit of float32


def rank_one_step(side, kwargs):
    """|change| by the first update of a (4, 2) matrix with one gradient entry, and of a bias."""
    gradient = np.zeros((4, 2))
    gradient[1, 0] = 2.0
    run = side({"fc.weight": np.zeros((4, 2)), "fc.bias": np.zeros(4)}, "muonwithauxadamw", **kwargs)
    values = run.step({"fc.weight": gradient, "fc.bias": np.ones(4)})
    return np.abs(values["fc.weight"]), np.abs(values["fc.bias"])


@SIDES
def test_nemo_automodel_muon(side):
    """qwen2_5_7b_squad_muon: spectral scale sqrt(fan_out / fan_in), which is ours of one shape, and lr 1 : 5.

    At (4, 2) sqrt 2 = (muon_lr_scale = sqrt 2 / 2) sqrt 4. 5e-4 sqrt 2 .6964364 = 4.92455e-4.
    """
    spectral = dict(muon_lr_scale=2**0.5 / 2, nesterov=False, muon_momentum=0.95, ns_dtype="float32")
    rates = dict(lr=5e-4, lr_multipliers={"bias": 0.2}, weight_decay=0.0, adam_betas=(0.9, 0.999))
    weight, bias = rank_one_step(side, {**spectral, **rates})
    expected = np.zeros((4, 2))
    expected[1, 0] = 4.92455e-4
    np.testing.assert_allclose(weight, expected, atol=5e-10)  # the last digit
    np.testing.assert_allclose(bias, 1e-4, atol=1e-10)
