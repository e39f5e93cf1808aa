"""The optimizer-and-schedule stack in PyTorch; jax_impl computes the same."""

from torch_impl.build import build_lr_scheduler, build_optimizer, route_parameters
from torch_impl.checkpoints import load_checkpoint, save_checkpoint
from torch_impl.containers import LRSchedulersContainer, OptimizersContainer
from torch_impl.fused_adam import FusedAdam
from torch_impl.muon import MuonWithAuxAdamW
from torch_impl.newton_schulz import NS_COEFFICIENTS, newton_schulz
from torch_impl.param_scheduler import OptimizerParamScheduler
from torch_impl.routing import MatrixAxes, ParameterRoute, RoutingTable
from torch_impl.schedules import LambdaLinearScheduler, LambdaWarmUpCosineScheduler, WSDScheduler, WSFDScheduler

__all__ = [
    "NS_COEFFICIENTS",
    "FusedAdam",
    "LRSchedulersContainer",
    "LambdaLinearScheduler",
    "LambdaWarmUpCosineScheduler",
    "MatrixAxes",
    "MuonWithAuxAdamW",
    "OptimizerParamScheduler",
    "OptimizersContainer",
    "ParameterRoute",
    "RoutingTable",
    "WSDScheduler",
    "WSFDScheduler",
    "build_lr_scheduler",
    "build_optimizer",
    "load_checkpoint",
    "newton_schulz",
    "route_parameters",
    "save_checkpoint",
]
