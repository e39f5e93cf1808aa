"""The calls a user makes: a transform from a parameter tree, a schedule from its name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_impl.adam import scale_by_adam
from jax_impl.aux_adamw import direction_of_role
from jax_impl.combine import combine, descend, freeze
from jax_impl.config import (
    AdamConfig,
    AdamWConfig,
    FusedAdamConfig,
    MuonConfig,
    OptimizerConfig,
    check_keywords,
    effective_config,
    parse_config,
    plain,
)
from jax_impl.fused_adam import scale_by_fused_adam
from jax_impl.group_schedules import GroupSchedules, Schedules
from jax_impl.master_weights import LOW_PRECISION, keep_master_weights
from jax_impl.muon import adjusted_lr_scale
from jax_impl.param_groups import ParameterGroup, group_parameters, select_parameters
from jax_impl.routing import (
    EXPERT,
    FROZEN,
    AxesSpec,
    MatrixAxes,
    ParameterRoute,
    RoutingTable,
    axes_by_name,
    parameter_roles,
)
from jax_impl.schedules import SCHEDULES
from jax_impl.transform import OptimizerTransform
from jax_impl.tree import named_leaves


def build_optimizer(
    params: Any,
    optimizer_type: str,
    *,
    lr_schedule: GroupSchedules = None,
    weight_decay_schedule: GroupSchedules = None,
    matrix_axes: AxesSpec = None,
    **kwargs: Any,
) -> OptimizerTransform:
    """An optax transform for ``params``: one rule a (group, role), combined by ``multi_transform``.

    Args:
        params: pytree of arrays or shapes (``jax.eval_shape`` output will do): a linen ``params`` dict, an nnx
            ``nnx.state(model, nnx.Param)``, any other. Leaves are named by their path joined by dots.
        optimizer_type: "adam", "adamw", "fusedadam" or "muonwithauxadamw", in any case.
        lr_schedule: multiplier of the base lr as a function of the updates done, see build_lr_schedule; or an
            OptimizerParamScheduler, whose lr replaces ``lr`` and is multiplied by ``lr_multipliers``; constant if None.
            {group of the routing table: schedule} for groups of their own; an annealer then is that group's lr.
        weight_decay_schedule: likewise, of the decay; parameters without decay have none under any annealer.
        matrix_axes: which axes of which leaves are outputs and inputs, see routing.axes_by_name.
        **kwargs: see jax_impl.config; ``lr`` is required.

    Returns:
        A transform whose ``update`` needs the parameters, with ``effective_config``, ``restore`` and
        ``set_hyperparameters``. A None gradient leaves its parameter alone.

    Raises:
        NotImplementedError: unknown ``optimizer_type``.
        TypeError: unknown keyword (the nearest valid one is named), or a value of the wrong type.
        ValueError: a value out of range, or nothing selected.
    """
    config = parse_config(optimizer_type, kwargs)
    schedules = Schedules.check(lr_schedule, weight_decay_schedule)
    transform = _transform(params, optimizer_type, config, schedules, matrix_axes)
    return OptimizerTransform.wrap(transform, effective_config(optimizer_type, config), schedules)


def fused_adam(
    lr: float,
    *,
    lr_schedule: GroupSchedules = None,
    weight_decay_schedule: GroupSchedules = None,
    matrix_axes: AxesSpec = None,
    **kwargs: Any,
) -> OptimizerTransform:
    """Adam with a step count per group and float32 masters, as a transform that needs no parameters up front.

        p = p - lr (u + weight_decay p)     u: see scale_by_fused_adam; with adam_w_mode=False decay is in the gradient

    Arguments and errors are those of ``build_optimizer(params, "fusedadam", ...)``; there is no ``amsgrad``. A loss
    scale and steps whose gradients are not finite are optax's business: divide the gradients before ``update``, and
    wrap this in ``optax.apply_if_finite``, which skips such a step whole, its count included (parameters below
    float32 then need float32 gradients).
    """
    return _without_params("fusedadam", {"lr": lr, **kwargs}, lr_schedule, weight_decay_schedule, matrix_axes)


def muon_with_aux_adamw(
    lr: float,
    *,
    lr_schedule: GroupSchedules = None,
    weight_decay_schedule: GroupSchedules = None,
    matrix_axes: AxesSpec = None,
    **kwargs: Any,
) -> OptimizerTransform:
    """Muon with AdamW as a transform that needs no parameters up front: roles are found in the tree given to ``init``.

    Arguments and errors are those of ``build_optimizer(params, "muonwithauxadamw", ...)``.
    """
    return _without_params("muonwithauxadamw", {"lr": lr, **kwargs}, lr_schedule, weight_decay_schedule, matrix_axes)


def route_parameters(params: Any, optimizer_type: str, *, matrix_axes: AxesSpec = None, **kwargs: Any) -> RoutingTable:
    """The table of roles, groups and learning rates that build_optimizer would use, before any schedule.

    Arguments and errors are those of build_optimizer, without the schedules.
    """
    return _route(params, optimizer_type, parse_config(optimizer_type, kwargs), matrix_axes)[0]


def describe(params: Any, optimizer_type: str, *, matrix_axes: AxesSpec = None, **kwargs: Any) -> str:
    """route_parameters as text: one line a parameter with its role, group, lr, decay, axes and adjusted lr."""
    return str(route_parameters(params, optimizer_type, matrix_axes=matrix_axes, **kwargs))


def build_lr_schedule(lr_scheduler_type: str, **kwargs: Any) -> optax.Schedule:
    """A multiplier of the base lr as a function of the number of updates done.

    Args:
        lr_scheduler_type: "lambdalinear", "lambdacosine", "wsd" or "wsfd", in any case.
        **kwargs: arguments of the schedule, see jax_impl.schedules.

    Raises:
        NotImplementedError: unknown ``lr_scheduler_type``.
        TypeError: unknown or missing keyword, or a value of the wrong type.
        ValueError: a value out of range.
    """
    if not isinstance(lr_scheduler_type, str):
        raise TypeError(f"lr_scheduler_type must be a string, got {lr_scheduler_type!r}")
    make_schedule = SCHEDULES.get(lr_scheduler_type.lower())
    if make_schedule is None:
        raise NotImplementedError(f"lr_scheduler_type must be one of {sorted(SCHEDULES)}, got {lr_scheduler_type!r}")
    check_keywords(lr_scheduler_type, kwargs, inspect.signature(make_schedule).parameters)
    return make_schedule(**{name: plain(value) for name, value in kwargs.items()})


def _without_params(
    optimizer_type: str,
    kwargs: dict[str, Any],
    lr_schedule: GroupSchedules,
    weight_decay_schedule: GroupSchedules,
    matrix_axes: AxesSpec,
) -> OptimizerTransform:
    """build_optimizer, with the transform made anew from the parameters that every call is given."""
    config = parse_config(optimizer_type, kwargs)
    schedules = Schedules.check(lr_schedule, weight_decay_schedule)

    def build(params: Any) -> optax.GradientTransformationExtraArgs:
        return _transform(params, optimizer_type, config, schedules, matrix_axes)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("this optimizer needs the parameters: call update(grads, state, params)")
        return build(params).update(grads, state, params, **extra)

    inner = optax.GradientTransformationExtraArgs(lambda params: build(params).init(params), update)
    return OptimizerTransform.wrap(inner, effective_config(optimizer_type, config), schedules)


def _transform(
    params: Any,
    optimizer_type: str,
    config: OptimizerConfig,
    schedules: Schedules,
    matrix_axes: AxesSpec,
) -> optax.GradientTransformationExtraArgs:
    routes, groups = _route(params, optimizer_type, config, matrix_axes)
    schedules.check_groups(len(groups), config)
    axes = {route.name: route.matrix_axes for route in routes}
    labels = {route.name: _label(route) for route in routes}
    transforms = {}
    for route in routes:
        label = labels[route.name]
        if label not in transforms:
            transforms[label] = freeze()
            if route.group is not None:
                factors = functools.partial(schedules.factors, route.group)
                bases = schedules.bases(route.group, groups[route.group], config)
                transforms[label] = _rule(route.role, bases, config, axes, factors)
    return combine(transforms, labels)


def _route(
    params: Any, optimizer_type: str, config: OptimizerConfig, matrix_axes: AxesSpec
) -> tuple[RoutingTable, list[ParameterGroup]]:
    leaves = named_leaves(params)
    for name, leaf in leaves.items():
        if getattr(leaf, "dtype", None) not in (jnp.float64, jnp.float32, *LOW_PRECISION):
            found = getattr(leaf, "dtype", type(leaf).__name__)
            raise TypeError(f"parameter {name!r} must be float64, float32, bfloat16 or float16, got {found}")
    selected = {name: leaves[name] for name in select_parameters(leaves, config.keys_to_select)}
    axes = axes_by_name(params, matrix_axes)
    if isinstance(config, MuonConfig):
        roles = parameter_roles(
            selected,
            axes,
            expert_param_keywords=config.expert_param_keywords,
            adamw_module_keywords=config.adamw_module_keywords,
            orthogonalize_skip_patterns=config.orthogonalize_skip_patterns,
        )
    else:
        roles = {name: (optimizer_type.lower(), None) for name in selected}
    groups = group_parameters(
        {name: _dims_of_a_layer(leaf, roles[name][0], axes[name]) for name, leaf in selected.items()},
        lr=config.lr,
        weight_decay=config.weight_decay,
        lr_multipliers=config.lr_multipliers,
        disable_weight_decay_for_1d_params=config.disable_weight_decay_for_1d_params,
    )
    index = {name: i for i, group in enumerate(groups) for name in group.names}
    routes = []
    for name, leaf in leaves.items():
        if name not in index:
            routes.append(ParameterRoute(name, tuple(leaf.shape), FROZEN, None, None, None, None, None))
            continue
        group, (role, role_axes) = groups[index[name]], roles[name]
        scale = 1.0
        if role_axes is not None and isinstance(config, MuonConfig):
            scale = adjusted_lr_scale(leaf.shape, role_axes, config.muon_lr_scale)
        routes.append(
            ParameterRoute(
                name, tuple(leaf.shape), role, index[name], group.lr, group.weight_decay, role_axes, group.lr * scale
            )
        )
    return RoutingTable(routes), groups


def _dims_of_a_layer(leaf: Any, role: str, axes: MatrixAxes | None) -> int:
    """Dimensions that the no-decay rule counts: a declared stack of layers is not one, a stack of experts is."""
    stacked = len(axes.batch) if axes is not None and role != EXPERT else 0
    return int(leaf.ndim) - stacked


def _label(route: ParameterRoute) -> str:
    return FROZEN if route.group is None else f"{route.group}.{route.role}"


def _rule(
    role: str,
    bases: tuple[float, float],
    config: OptimizerConfig,
    axes: dict[str, MatrixAxes | None],
    factors: Callable[[jax.Array], tuple[Any, Any]],
) -> optax.GradientTransformationExtraArgs:
    lr, weight_decay = bases
    decoupled, active, masters = True, None, False
    if isinstance(config, AdamConfig):
        direction = scale_by_adam(betas=config.betas, eps=config.eps)
        decoupled = isinstance(config, AdamWConfig)
    elif isinstance(config, FusedAdamConfig):
        direction = scale_by_fused_adam(betas=config.betas, eps=config.eps, bias_correction=config.bias_correction)
        decoupled, masters = config.adam_w_mode, config.master_weights
    else:
        assert isinstance(config, MuonConfig)
        direction, active = direction_of_role(role, config, axes)
        masters = config.master_weights
    rule = descend(direction, lr=lr, weight_decay=weight_decay, factors=factors, decoupled=decoupled, active=active)
    return keep_master_weights(rule) if masters else rule
