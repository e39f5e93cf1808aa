"""Muon: momentum, orthogonalized, for matrices; AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_impl.aux_adamw import MatrixOptimizerWithAuxAdamW, adjusted_lr_scale
from torch_impl.config import MuonConfig
from torch_impl.momentum import active_slices, descent_direction, update_momentum_
from torch_impl.newton_schulz import Triple, newton_schulz
from torch_impl.routing import EXPERT


class MuonWithAuxAdamW(MatrixOptimizerWithAuxAdamW):
    """Muon on matrices and experts, AdamW with a step count per group on the rest.

        M = mu M + g;  G = g + mu M (nesterov) or M;  O = NS(G)
        W = W (1 - lr weight_decay) - lr muon_lr_scale sqrt(max(fan_out, fan_in)) O

    A slice of an expert stack (E, M, N) whose gradient is exactly zero is idle: weight and momentum stay.

    Args:
        params: parameters or groups, as for any torch optimizer.
        roles: "matrix", "expert" or "adamw" for every parameter; see torch_impl.routing.parameter_roles.
        lr: learning rate of matrices before the shape adjustment, and of AdamW.
        weight_decay: decoupled, scaled by the unadjusted lr.
        adam_betas, eps: of the AdamW side.
        muon_momentum: mu in [0, 1).
        muon_lr_scale: factor of the shape adjustment.
        ns_steps, ns_dtype, ns_coefficients: see newton_schulz.
        nesterov: orthogonalize g + mu M instead of M.
        capturable: keep lr on the device as a tensor that schedulers fill in place.
        master_weights: keep float32 masters of bfloat16 and float16 parameters.

    Groups may override every one of them; the key of ``adam_betas`` in a group is "betas", as in torch.

    Raises:
        TypeError, ValueError: a wrong value, see torch_impl.config; a parameter without a role.

    Source: Jordan et al. 2024; shape adjustment of Liu et al. 2025 (arXiv 2502.16982).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        roles: Mapping[Tensor, str],
        *,
        lr: float,
        weight_decay: float = 0.1,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        muon_momentum: float = 0.95,
        muon_lr_scale: float = 0.2,
        ns_steps: int = 5,
        ns_dtype: str = "bfloat16",
        ns_coefficients: str | Sequence[Triple] = "jordan",
        nesterov: bool = True,
        capturable: bool = True,
        master_weights: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": adam_betas,
            "eps": eps,
            "muon_momentum": muon_momentum,
            "muon_lr_scale": muon_lr_scale,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "ns_coefficients": ns_coefficients,
            "nesterov": nesterov,
            "capturable": capturable,
            "master_weights": master_weights,
        }
        self.check_hyperparameters(defaults)
        super().__init__(params, roles, defaults)

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        fields = {name: group[name] for name in MuonConfig.__dataclass_fields__ if name in group}
        numbers = {name: float(x) for name, x in fields.items() if isinstance(x, Tensor)}
        MuonConfig(fused=True, adam_betas=group["betas"], **{**fields, **numbers})

    def matrix_update_(
        self, working: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], role: str
    ) -> None:
        momentum_buffer = state["momentum_buffer"]
        active = active_slices(grad) if role == EXPERT else None
        update_momentum_(momentum_buffer, grad, group["muon_momentum"], active)
        direction = descent_direction(momentum_buffer, grad, group["muon_momentum"], group["nesterov"])
        options = {key: group[key] for key in ("ns_steps", "ns_dtype", "ns_coefficients")}
        update = newton_schulz(direction, **options).to(working.dtype)
        decay = 1.0 - group["lr"] * group["weight_decay"]
        adjusted_lr = group["lr"] * adjusted_lr_scale(working.shape, group["muon_lr_scale"])
        if active is None:
            working.mul_(decay).sub_(update * adjusted_lr)
        else:
            working.copy_((working * decay - update * adjusted_lr).where(active, working))
