"""What both sides must share: file names, public names, argument names, their order and their defaults."""

import dataclasses
import inspect
from pathlib import Path

import pytest

import jax_impl
import jax_impl.annealing
import jax_impl.build
import jax_impl.config
import jax_impl.schedules
import torch_impl
import torch_impl.annealing
import torch_impl.build
import torch_impl.config
import torch_impl.schedules

WSD_LENGTHS = ("warm_up_steps", "total_steps", "decay_steps", "f_start", "f_max", "f_min")
ROOT = Path(__file__).parents[1]

# public names that only one side has, by nature: (reason)
TORCH_ONLY = {
    "FusedAdam": "fused_adam",
    "LRSchedulersContainer": "a schedule is part of the transform in JAX",
    "LambdaLinearScheduler": "lambda_linear_schedule",
    "LambdaWarmUpCosineScheduler": "lambda_warmup_cosine_schedule",
    "MuonWithAuxAdamW": "muon_with_aux_adamw",
    "OptimizersContainer": "OptimizerTransform",
    "WSDScheduler": "wsd_schedule",
    "WSFDScheduler": "wsfd_schedule",
    "build_lr_scheduler": "build_lr_schedule",
}
JAX_ONLY = {
    "build_lr_schedule": "build_lr_scheduler",
    "Hyperparameters": "param_groups hold them",
    "OptimizerTransform": "OptimizersContainer",
    "describe": "OptimizersContainer.describe",
    "fused_adam": "FusedAdam",
    "hyperparameters": "param_groups hold them",
    "lambda_linear_schedule": "LambdaLinearScheduler",
    "lambda_warmup_cosine_schedule": "LambdaWarmUpCosineScheduler",
    "learning_rates": "param_groups hold the lr",
    "muon_with_aux_adamw": "MuonWithAuxAdamW",
    "scale_by_fused_adam": "a transform without lr and decay is optax's notion",
    "scale_by_muon": "a transform without lr and decay is optax's notion",
    "wsd_schedule": "WSDScheduler",
    "wsfd_schedule": "WSFDScheduler",
}
# counterparts under another name, by nature
FILES_ONLY = {
    "torch": {"adam_step.py", "containers.py", "flat_state.py", "group_step.py"},
    "jax": {"combine.py", "group_schedules.py", "group_state.py", "transform.py", "tree.py"},
}


def test_files_mirror():
    files = {side: {p.name for p in (ROOT / f"{side}_impl").glob("*.py")} for side in ("torch", "jax")}
    assert files["torch"] - files["jax"] == FILES_ONLY["torch"]
    assert files["jax"] - files["torch"] == FILES_ONLY["jax"]


def test_public_names_mirror():
    torch_names, jax_names = set(torch_impl.__all__), set(jax_impl.__all__)
    assert torch_names - jax_names == set(TORCH_ONLY)
    assert jax_names - torch_names == set(JAX_ONLY)
    for module in (torch_impl, jax_impl):
        for name in module.__all__:
            assert inspect.getdoc(getattr(module, name)), f"{module.__name__}.{name} has no docstring"


def arguments(callable_, *without):
    return [
        (p.name, p.kind, p.default) for p in inspect.signature(callable_).parameters.values() if p.name not in without
    ]


@pytest.mark.parametrize(
    ("torch_callable", "jax_callable"),
    [
        (torch_impl.schedules.SCHEDULERS[key], jax_impl.schedules.SCHEDULES[key])
        for key in torch_impl.schedules.SCHEDULERS
    ]
    + [(getattr(torch_impl, name), getattr(jax_impl, name)) for name in ("newton_schulz", "save_checkpoint")],
    ids=lambda c: c.__name__,
)
def test_arguments_mirror(torch_callable, jax_callable):
    assert arguments(torch_callable) == arguments(jax_callable)


def test_builders_mirror():
    """JAX has no model to inspect, so params and the axes come in; its schedule is part of the transform."""
    extra = ("model", "params", "lr_schedule", "weight_decay_schedule", "matrix_axes")
    assert arguments(torch_impl.build_optimizer, *extra) == arguments(jax_impl.build_optimizer, *extra)
    assert arguments(torch_impl.route_parameters, *extra) == arguments(jax_impl.route_parameters, *extra)
    assert list(torch_impl.schedules.SCHEDULERS) == list(jax_impl.schedules.SCHEDULES)


def test_annealers_mirror():
    """JAX has no optimizer to drive, and evaluates any step; torch sets what its groups hold."""
    torch_class, jax_class = torch_impl.OptimizerParamScheduler, jax_impl.OptimizerParamScheduler
    assert arguments(torch_class, "optimizer") == arguments(jax_class, "step_size")
    assert next(iter(inspect.signature(torch_class).parameters)) == "optimizer"
    methods = {side: {name for name in vars(cls) if name[0] != "_"} for side, cls in ((0, torch_class), (1, jax_class))}
    assert methods[0] - methods[1] == {"get_lr", "get_wd"}
    assert methods[1] - methods[0] == {"learning_rate", "weight_decay"}
    for name in methods[0] & methods[1]:
        assert arguments(getattr(torch_class, name)) == arguments(getattr(jax_class, name)), name
    assert [(f.name, f.default) for f in dataclasses.fields(torch_impl.annealing.Annealing)] == [
        (f.name, f.default) for f in dataclasses.fields(jax_impl.annealing.Annealing)
    ]
    torch_wsd, jax_wsd = torch_impl.WSDScheduler, type(jax_impl.wsd_schedule(**dict.fromkeys(WSD_LENGTHS, 1)))
    assert arguments(torch_wsd.branch_from) == arguments(jax_wsd.branch_from)
    assert arguments(torch_wsd.branch_from) == arguments(torch_class.branch_from)
    for styles in ("LR_DECAY_STYLES", "LR_WSD_DECAY_STYLES", "WD_INCR_STYLES"):
        assert getattr(torch_impl.annealing, styles) == getattr(jax_impl.annealing, styles)


@pytest.mark.parametrize("optimizer_type", torch_impl.config.CONFIGS)
def test_keywords_and_defaults_mirror(optimizer_type):
    """``fused`` is required by torch, where eager optimizers exist, and optional in JAX."""

    def keywords(config):
        return [(f.name, f.default) for f in dataclasses.fields(config.CONFIGS[optimizer_type]) if f.name != "fused"]

    assert list(torch_impl.config.CONFIGS) == list(jax_impl.config.CONFIGS)
    assert keywords(torch_impl.config) == keywords(jax_impl.config)


def test_defaults_are_the_documented_ones():
    """The table of the README and of the reference systems, written out."""

    def defaults(optimizer_type):
        config = torch_impl.config.parse_config(optimizer_type, {"lr": 1.0, "fused": True})
        return {k: v for k, v in dataclasses.asdict(config).items() if k not in ("lr", "fused")}

    shared = {"keys_to_select": (), "lr_multipliers": {}, "disable_weight_decay_for_1d_params": False, "eps": 1e-8}
    adam = {**shared, "betas": (0.9, 0.999), "capturable": False}
    assert defaults("adam") == {**adam, "weight_decay": 0.0}
    assert defaults("AdamW") == {**adam, "weight_decay": 0.01}
    assert defaults("FusedAdam") == {
        **adam,
        "capturable": True,
        "weight_decay": 0.0,
        "adam_w_mode": True,
        "bias_correction": True,
        "master_weights": True,
    }
    assert defaults("MuonWithAuxAdamW") == {
        **shared,
        "weight_decay": 0.1,
        "adam_betas": (0.9, 0.95),
        "muon_momentum": 0.95,
        "muon_lr_scale": 0.2,
        "ns_steps": 5,
        "ns_dtype": "bfloat16",
        "ns_coefficients": "jordan",
        "nesterov": True,
        "expert_param_keywords": (),
        "adamw_module_keywords": ("lm_head", "embed_out", "output_layer"),
        "orthogonalize_skip_patterns": (),
        "capturable": True,
        "master_weights": True,
    }


def test_coefficients_mirror():
    torch_sets = {name: tuple(value) for name, value in torch_impl.NS_COEFFICIENTS.items()}
    jax_sets = {name: tuple(value) for name, value in jax_impl.NS_COEFFICIENTS.items()}
    assert torch_sets == jax_sets
    assert torch_sets["jordan"][0] == ((3.4445, -4.7750, 2.0315),)
