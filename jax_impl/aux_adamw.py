"""What Muon and its relatives share: matrices and experts are orthogonalized, AdamW takes the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import optax

from jax_impl.config import MuonConfig
from jax_impl.fused_adam import scale_by_fused_adam
from jax_impl.momentum import active_slices
from jax_impl.muon import scale_by_muon
from jax_impl.routing import ADAMW, EXPERT, MatrixAxes

Active = Callable[[str, jax.Array], jax.Array]
"""(name, gradient) -> mask of what may move."""


def direction_of_role(
    role: str, config: MuonConfig, axes: Mapping[str, MatrixAxes | None]
) -> tuple[optax.GradientTransformationExtraArgs, Active | None]:
    """The direction of parameters of one role, and for experts the mask that leaves the idle ones alone.

    Args:
        role: "matrix", "expert" or "adamw".
        config: of the hybrid.
        axes: {name: matrix axes}; those of matrices and experts are not None.
    """
    if role == ADAMW:
        return scale_by_fused_adam(betas=config.adam_betas, eps=config.eps), None
    direction = scale_by_muon(
        muon_momentum=config.muon_momentum,
        muon_lr_scale=config.muon_lr_scale,
        ns_steps=config.ns_steps,
        ns_dtype=config.ns_dtype,
        ns_coefficients=config.ns_coefficients,
        nesterov=config.nesterov,
        matrix_axes=lambda name, leaf: axes[name],
        experts=role == EXPERT,
    )

    def active(name: str, grad: jax.Array) -> jax.Array:
        expert_axes = axes[name]
        assert expert_axes is not None
        return active_slices(grad, expert_axes.batch)

    return direction, active if role == EXPERT else None
