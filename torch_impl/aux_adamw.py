"""What Muon and its relatives share: a matrix rule for some parameters, AdamW for the rest, one set of groups."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_impl.master_weights import LOW_PRECISION, compute_dtype, matching, working_copy, write_back_
from torch_impl.param_groups import LR_RULE, WD_RULE
from torch_impl.routing import ADAMW, EXPERT, MATRIX

ORTHOGONALIZED = (MATRIX, EXPERT)


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step: Tensor,
    *,
    lr: float | Tensor,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One AdamW update of tensors of one device and dtype, by torch's fused kernel (one pass over memory).

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        p = p - lr (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + eps) + weight_decay p)

    Args:
        params, exp_avgs, exp_avg_sqs: modified in place.
        grads: same shapes, strides and dtype as ``params``.
        step: 0-D float32, 1-based count of this update, shared by all.
        lr: float or 0-D tensor.
    """
    if isinstance(lr, Tensor) and lr.dtype == torch.float64 and lr.is_cuda:
        # the fused CUDA kernel reads an lr tensor as float32
        adamw_unfused_(
            params, grads, exp_avgs, exp_avg_sqs, step, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps
        )
        return
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(params),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def adamw_unfused_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step: Tensor,
    *,
    lr: float | Tensor,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """adamw_ in separate operations, for what the fused kernel cannot do; arguments as there."""
    t = step.double()
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        m.mul_(betas[0]).add_(g, alpha=1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        denominator = (v / (1 - betas[1] ** t)).sqrt_().add_(eps)
        p.mul_(1 - lr * weight_decay).sub_(m / (1 - betas[0] ** t) / denominator * lr)


class MatrixOptimizerWithAuxAdamW(torch.optim.Optimizer, ABC):
    """Base of optimizers that treat matrices by their own rule and everything else by AdamW.

    AdamW here counts steps per group, with or without gradients, as fused implementations do. A parameter whose
    gradient is None keeps its value and its state. Moments are float32 (float64 for float64 parameters);
    bfloat16 and float16 parameters get float32 masters.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        roles: Mapping[Tensor, str],
        defaults: dict[str, Any],
    ) -> None:
        self._roles = dict(roles)
        super().__init__(params, {"step": 0, **defaults})

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps defaults, state and groups only; roles go by position, as tensors change under pickle
        roles = [[self._roles[p] for p in group["params"]] for group in self.param_groups]
        return {**super().__getstate__(), "roles": roles}

    def __setstate__(self, state: dict[str, Any]) -> None:
        roles = state.pop("roles", None)
        super().__setstate__(state)
        if roles is not None:
            groups = zip(self.param_groups, roles, strict=True)
            self._roles = {p: role for group, own in groups for p, role in zip(group["params"], own, strict=True)}

    @abstractmethod
    def matrix_update_(
        self, working: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], role: str
    ) -> None:
        """Update one matrix (M, N) or stack of experts (E, M, N).

        Args:
            working: parameter or master, modified in place.
            grad: in the dtype of ``working``, not modified.
            state: holds "momentum_buffer", modified in place.
            group: the live group with "lr" and "weight_decay".
            role: "matrix" or "expert".
        """

    @abstractmethod
    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for a value in ``group`` that the rule cannot use."""

    def _state_keys(self, p: Tensor) -> tuple[str, ...]:
        return ("momentum_buffer",) if self._roles[p] in ORTHOGONALIZED else ("exp_avg", "exp_avg_sq")

    def initial_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Fresh state of a parameter, equivalent to having none: zeros, and the master as a copy."""
        dtype = compute_dtype(p)
        state = {key: torch.zeros_like(p, dtype=dtype, requires_grad=False) for key in self._state_keys(p)}
        if p.dtype in LOW_PRECISION and group["master_weights"]:
            state["master_param"] = p.detach().float()
        return state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: "params", any of the defaults, and under "roles" {parameter: role} of those that are new.

        Raises:
            TypeError: an unknown key, or a value of the wrong type.
            ValueError: no parameters, one given twice, one without a role, an orthogonalized one of the wrong number
                of dimensions, a view with gaps (the fused kernel would write into them), a value out of range.
        """
        param_group = dict(param_group)
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        roles = {**self._roles, **param_group.pop("roles", {})}
        if not param_group["params"]:
            raise ValueError("a group needs at least one parameter")
        if not all(isinstance(p, Tensor) for p in param_group["params"]):
            raise TypeError("parameters must be given as tensors, without names")
        if len(set(param_group["params"])) != len(param_group["params"]):
            raise ValueError("a group has the same parameter twice")
        unknown = set(param_group) - {"params", "initial_lr", *LR_RULE, WD_RULE, *self.defaults}
        if unknown:
            raise TypeError(f"a group has no {sorted(unknown)}; valid: {sorted({'params', 'roles', *self.defaults})}")
        for p in param_group["params"]:
            role = roles.get(p)
            if role not in (ADAMW, *ORTHOGONALIZED):
                raise ValueError(f"a parameter of shape {tuple(p.shape)} has no role; roles must cover every parameter")
            if role in ORTHOGONALIZED and p.ndim != (2 if role == MATRIX else 3):
                raise ValueError(f"role {role!r} does not fit a parameter of shape {tuple(p.shape)}")
            if torch.empty_like(p, device="meta").stride() != p.stride():
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is a view with gaps: make it contiguous")
        self.check_hyperparameters({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._roles = roles
        group = self.param_groups[-1]
        device = group["params"][0].device
        dtype = max((compute_dtype(p) for p in group["params"]), key=lambda d: d.itemsize)
        group["step"] = torch.as_tensor(group["step"], dtype=torch.float32).to(device).clone()
        if group["capturable"]:
            # a tensor of its own for every group: schedulers fill it in place, a captured graph reads it live
            group["lr"] = torch.as_tensor(group["lr"], dtype=dtype).to(device).clone()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient and advance every group's step count.

        Raises:
            RuntimeError: a gradient is sparse; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p.grad.is_sparse for group in self.param_groups for p in group["params"]):
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        for group in self.param_groups:
            group["step"] += 1
            adamw: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                self._complete_state(p, group)
                working = working_copy(p, self.state[p], group["master_weights"])
                if self._roles[p] == ADAMW:
                    adamw.setdefault((working.device, working.dtype), []).append((p, working))
                else:
                    grad = p.grad.to(working.dtype)
                    self.matrix_update_(working, grad, self.state[p], group, self._roles[p])
                    write_back_(p, working)
            for pairs in adamw.values():
                self._adamw_step(pairs, group)
        return loss

    def _complete_state(self, p: Tensor, group: dict[str, Any]) -> None:
        """Fresh values for what the role of ``p`` needs and its state does not have."""
        state = self.state[p]
        if any(key not in state for key in self._state_keys(p)):
            for key, value in self.initial_state(p, group).items():
                state.setdefault(key, value)

    def _adamw_step(self, pairs: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
        adamw_(
            [working for _, working in pairs],
            [matching(p.grad, working, working.dtype) for p, working in pairs],  # type: ignore[arg-type]
            [self.state[p]["exp_avg"] for p, _ in pairs],
            [self.state[p]["exp_avg_sq"] for p, _ in pairs],
            group["step"],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            betas=group["betas"],
            eps=group["eps"],
        )
        for p, working in pairs:
            write_back_(p, working)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state written by ``state_dict()``; tensors are copied and keep their dtype bit for bit.

        torch's own loader rounds float32 moments and masters to the parameter's dtype, so they are put back here.
        """
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved_ids, params, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                self.state[p][key] = loaded_copy(value, p)
        for group in self.param_groups:
            for key, default in self.defaults.items():
                if key != "differentiable":  # torch's loader puts it into the defaults of every optimizer
                    group.setdefault(key, default)
            for key in ("lr", "step", "initial_lr"):
                if isinstance(group.get(key), Tensor):
                    group[key] = group[key].to(group["params"][0].device).clone()


def loaded_copy(value: Tensor, p: Tensor) -> Tensor:
    """A copy of a saved state tensor for ``p``: its own dtype, on the parameter's device, with its strides."""
    if value.shape == p.shape:
        return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(p.device, copy=True)


def adjusted_lr_scale(shape: Sequence[int], muon_lr_scale: float) -> float:
    """``muon_lr_scale * sqrt(max(fan_out, fan_in))`` of a whole matrix (..., fan_out, fan_in).

    Source: Liu et al. 2025, Muon is Scalable for LLM Training (the update RMS of AdamW for every shape).
    """
    return muon_lr_scale * math.sqrt(max(shape[-2:]))
