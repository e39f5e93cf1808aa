"""The calls a user makes: an optimizer from a model, a scheduler from an optimizer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from torch_impl.adam import build_adam
from torch_impl.aux_adamw import adjusted_lr_scale
from torch_impl.config import (
    AdamConfig,
    FusedAdamConfig,
    MuonConfig,
    OptimizerConfig,
    check_keywords,
    effective_config,
    parse_config,
    plain,
)
from torch_impl.containers import LRSchedulersContainer, OptimizersContainer
from torch_impl.fused_adam import FusedAdam
from torch_impl.master_weights import LOW_PRECISION
from torch_impl.muon import MuonWithAuxAdamW
from torch_impl.param_groups import (
    ParameterGroup,
    group_parameters,
    optimized_module,
    select_parameters,
    trainable_parameters,
)
from torch_impl.routing import EXPERT, FROZEN, MATRIX, MatrixAxes, ParameterRoute, RoutingTable, parameter_roles
from torch_impl.schedules import SCHEDULERS

_AXES = {MATRIX: MatrixAxes(fan_out=(0,), fan_in=(1,)), EXPERT: MatrixAxes(fan_out=(1,), fan_in=(2,), batch=(0,))}


def build_optimizer(model: nn.Module, optimizer_type: str, **kwargs: Any) -> OptimizersContainer:
    """Optimizers over the trainable parameters of ``model`` (of its child ``net``, if it has one).

    Args:
        model: parameters outside ``keys_to_select`` get ``requires_grad=False`` and lose their gradient.
        optimizer_type: "adam", "adamw", "fusedadam" or "muonwithauxadamw", in any case.
        **kwargs: see torch_impl.config; ``lr`` and ``fused=True`` are required.

    Returns:
        A container; adam, adamw and fusedadam are split into one optimizer a device mesh.

    Raises:
        NotImplementedError: unknown ``optimizer_type``.
        TypeError: unknown keyword (the nearest valid one is named), or a value of the wrong type.
        ValueError: a value out of range, or nothing selected. Nothing has changed then.
    """
    config = parse_config(optimizer_type, kwargs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    params = trainable_parameters(model)
    routes, groups = _route(model, optimizer_type, config)
    if isinstance(config, MuonConfig):
        roles: dict[Tensor, str] = {params[route.name]: route.role for route in routes if route.role != FROZEN}
        optimizers = [_build_muon(_torch_groups(groups, params), roles, config)]
    else:
        meshes = dict.fromkeys(_mesh(params[name]) for group in groups for name in group.names)
        optimizers = []
        for mesh in meshes:
            members = {name: p for name, p in params.items() if _mesh(p) == mesh}
            optimizers.append(_build_adam(_torch_groups(groups, members), config))
    for route in routes:
        if route.role == FROZEN:
            params[route.name].requires_grad_(False)
            params[route.name].grad = None  # else gradient clipping would count it for ever
    return OptimizersContainer(model, optimizers, routes, effective_config(optimizer_type, config))


def route_parameters(model: nn.Module, optimizer_type: str, **kwargs: Any) -> RoutingTable:
    """The table of roles, groups and learning rates that build_optimizer would use; changes nothing.

    Arguments and errors are those of build_optimizer.
    """
    return _route(model, optimizer_type, parse_config(optimizer_type, kwargs))[0]


def build_lr_scheduler(
    optimizer: OptimizersContainer, lr_scheduler_type: str, *, start_step: int = 0, **kwargs: Any
) -> LRSchedulersContainer:
    """Drive the lr of every group by one schedule.

    Args:
        optimizer: what build_optimizer returned.
        lr_scheduler_type: "lambdalinear", "lambdacosine", "wsd" or "wsfd", in any case.
        start_step: number of updates done already, >= 0.
        **kwargs: arguments of the schedule, see torch_impl.schedules.

    Raises:
        NotImplementedError: unknown ``lr_scheduler_type``.
        TypeError: unknown or missing keyword, or a value of the wrong type.
        ValueError: a value out of range.
    """
    if not isinstance(optimizer, OptimizersContainer):
        raise TypeError(f"optimizer must come from build_optimizer, got {type(optimizer).__name__}")
    if not isinstance(lr_scheduler_type, str):
        raise TypeError(f"lr_scheduler_type must be a string, got {lr_scheduler_type!r}")
    scheduler_class = SCHEDULERS.get(lr_scheduler_type.lower())
    if scheduler_class is None:
        raise NotImplementedError(f"lr_scheduler_type must be one of {sorted(SCHEDULERS)}, got {lr_scheduler_type!r}")
    check_keywords(lr_scheduler_type, kwargs, inspect.signature(scheduler_class).parameters)
    if isinstance(start_step, bool) or not isinstance(start_step, int):
        raise TypeError(f"start_step must be an integer, got {start_step!r}")
    if start_step < 0:
        raise ValueError(f"start_step must be >= 0, got {start_step}")
    scheduler = scheduler_class(**{name: plain(value) for name, value in kwargs.items()})
    return LRSchedulersContainer(optimizer, scheduler.schedule, start_step)


def _route(model: nn.Module, optimizer_type: str, config: OptimizerConfig) -> tuple[RoutingTable, list[ParameterGroup]]:
    params = trainable_parameters(model)
    for name, p in params.items():
        if p.dtype not in (torch.float64, torch.float32, *LOW_PRECISION):
            raise TypeError(f"parameter {name!r} must be float64, float32, bfloat16 or float16, got {p.dtype}")
    selected = select_parameters(params, config.keys_to_select)
    if isinstance(config, MuonConfig):
        roles = parameter_roles(
            optimized_module(model),
            selected,
            expert_param_keywords=config.expert_param_keywords,
            adamw_module_keywords=config.adamw_module_keywords,
            orthogonalize_skip_patterns=config.orthogonalize_skip_patterns,
        )
    else:
        roles = dict.fromkeys(selected, optimizer_type.lower())
    groups = group_parameters(
        {name: params[name].ndim for name in selected},
        lr=config.lr,
        weight_decay=config.weight_decay,
        lr_multipliers=config.lr_multipliers,
        disable_weight_decay_for_1d_params=config.disable_weight_decay_for_1d_params,
    )
    index = {name: i for i, group in enumerate(groups) for name in group.names}
    routes = []
    for name, p in params.items():
        if name not in index:
            routes.append(ParameterRoute(name, tuple(p.shape), FROZEN, None, None, None, None, None))
            continue
        group, axes = groups[index[name]], _AXES.get(roles[name])
        scale = adjusted_lr_scale(p.shape, config.muon_lr_scale) if axes and isinstance(config, MuonConfig) else 1.0
        routes.append(
            ParameterRoute(
                name, tuple(p.shape), roles[name], index[name], group.lr, group.weight_decay, axes, group.lr * scale
            )
        )
    return RoutingTable(routes), groups


def _torch_groups(groups: list[ParameterGroup], params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """The groups as torch takes them, restricted to ``params``; no group is empty."""
    members = [(group, [params[name] for name in group.names if name in params]) for group in groups]
    return [{"params": ps, "lr": group.lr, "weight_decay": group.weight_decay} for group, ps in members if ps]


def _mesh(param: Tensor) -> tuple[str, ...] | str:
    """What separates optimizers: the names of the device mesh's dimensions."""
    mesh = getattr(param, "device_mesh", None)
    return getattr(mesh, "mesh_dim_names", None) or "default"


def _build_adam(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    if not isinstance(config, FusedAdamConfig):
        assert isinstance(config, AdamConfig)
        return build_adam(groups, config)
    return FusedAdam(
        groups,
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=config.betas,
        eps=config.eps,
        adam_w_mode=config.adam_w_mode,
        bias_correction=config.bias_correction,
        capturable=config.capturable,
        master_weights=config.master_weights,
    )


def _build_muon(groups: list[dict[str, Any]], roles: dict[Tensor, str], config: MuonConfig) -> torch.optim.Optimizer:
    return MuonWithAuxAdamW(
        groups,
        roles,
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_betas=config.adam_betas,
        eps=config.eps,
        muon_momentum=config.muon_momentum,
        muon_lr_scale=config.muon_lr_scale,
        ns_steps=config.ns_steps,
        ns_dtype=config.ns_dtype,
        ns_coefficients=config.ns_coefficients,
        nesterov=config.nesterov,
        capturable=config.capturable,
        master_weights=config.master_weights,
    )
