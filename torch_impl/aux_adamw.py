"""What Muon and its relatives share: a matrix rule for some parameters, AdamW for the rest, one set of groups."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_impl.master_weights import compute_dtype, working_copy, write_back_
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
        grads: same shapes and dtype as ``params``.
        step: 0-D float32, 1-based count of this update, shared by all.
        lr: float or 0-D tensor.
    """
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; each of its parameters needs a role.

        Raises:
            ValueError: a parameter has no role, or an orthogonalized one has the wrong number of dimensions.
        """
        if isinstance(param_group["params"], Tensor):
            param_group["params"] = [param_group["params"]]
        param_group["params"] = list(param_group["params"])
        for p in param_group["params"]:
            role = self._roles.get(p)
            if role not in (ADAMW, *ORTHOGONALIZED):
                raise ValueError(f"a parameter of shape {tuple(p.shape)} has no role; roles must cover every parameter")
            if role in ORTHOGONALIZED and p.ndim != (2 if role == MATRIX else 3):
                raise ValueError(f"role {role!r} does not fit a parameter of shape {tuple(p.shape)}")
        super().add_param_group(param_group)
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
                working = working_copy(p, self.state[p], group["master_weights"])
                if self._roles[p] == ADAMW:
                    adamw.setdefault((working.device, working.dtype), []).append((p, working))
                else:
                    self._matrix_step(p, working, group)
            for pairs in adamw.values():
                self._adamw_step(pairs, group)
        return loss

    def _matrix_step(self, p: Tensor, working: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(working)
        assert p.grad is not None
        self.matrix_update_(working, p.grad.to(working.dtype), state, group, self._roles[p])
        write_back_(p, working)

    def _adamw_step(self, pairs: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
        states = [self.state[p] for p, _ in pairs]
        for state, (_, working) in zip(states, pairs, strict=True):
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(working)
                state["exp_avg_sq"] = torch.zeros_like(working)
        adamw_(
            [working for _, working in pairs],
            [p.grad.to(working.dtype) for p, working in pairs],  # type: ignore[union-attr]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
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
                self.state[p][key] = value.to(p.device).clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for group in self.param_groups:
            for key in ("lr", "step", "initial_lr"):
                if isinstance(group.get(key), Tensor):
                    group[key] = group[key].to(group["params"][0].device).clone()


def adjusted_lr_scale(shape: Sequence[int], muon_lr_scale: float) -> float:
    """``muon_lr_scale * sqrt(max(fan_out, fan_in))`` of a whole matrix (..., fan_out, fan_in).

    Source: Liu et al. 2025, Muon is Scalable for LLM Training (the update RMS of AdamW for every shape).
    """
    return muon_lr_scale * math.sqrt(max(shape[-2:]))
