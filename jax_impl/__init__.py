"""The optimizer-and-schedule stack as optax transforms; torch_impl computes the same."""

from jax_impl.build import (
    build_lr_schedule,
    build_optimizer,
    describe,
    fused_adam,
    muon_with_aux_adamw,
    route_parameters,
)
from jax_impl.checkpoints import load_checkpoint, save_checkpoint
from jax_impl.fused_adam import scale_by_fused_adam
from jax_impl.group_state import Hyperparameters, hyperparameters, learning_rates
from jax_impl.muon import scale_by_muon
from jax_impl.newton_schulz import NS_COEFFICIENTS, newton_schulz
from jax_impl.param_scheduler import OptimizerParamScheduler
from jax_impl.routing import MatrixAxes, ParameterRoute, RoutingTable
from jax_impl.schedules import lambda_linear_schedule, lambda_warmup_cosine_schedule, wsd_schedule, wsfd_schedule
from jax_impl.transform import OptimizerTransform

__all__ = [
    "NS_COEFFICIENTS",
    "Hyperparameters",
    "MatrixAxes",
    "OptimizerParamScheduler",
    "OptimizerTransform",
    "ParameterRoute",
    "RoutingTable",
    "build_lr_schedule",
    "build_optimizer",
    "describe",
    "fused_adam",
    "hyperparameters",
    "lambda_linear_schedule",
    "lambda_warmup_cosine_schedule",
    "learning_rates",
    "load_checkpoint",
    "muon_with_aux_adamw",
    "newton_schulz",
    "route_parameters",
    "save_checkpoint",
    "scale_by_fused_adam",
    "scale_by_muon",
    "wsd_schedule",
    "wsfd_schedule",
]
