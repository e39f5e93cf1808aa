"""What Muon and its relatives share: a matrix rule for some parameters, AdamW for the rest, one set of groups."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_impl.group_step import GroupStepOptimizer
from torch_impl.master_weights import working_copy, write_back_
from torch_impl.routing import ADAMW, EXPERT, MATRIX

ORTHOGONALIZED = (MATRIX, EXPERT)


class MatrixOptimizerWithAuxAdamW(GroupStepOptimizer):
    """Base of optimizers that treat matrices by their own rule and everything else by AdamW."""

    _group_keys = ("params", "roles")

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        roles: Mapping[Tensor, str],
        defaults: dict[str, Any],
    ) -> None:
        self._roles = dict(roles)
        super().__init__(params, defaults)

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

    def state_keys(self, p: Tensor) -> tuple[str, ...]:
        return ("momentum_buffer",) if self._roles[p] in ORTHOGONALIZED else super().state_keys(p)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: "params", any of the defaults, and under "roles" {parameter: role} of those that are new.

        Raises:
            TypeError, ValueError: as in GroupStepOptimizer; a parameter without a role, an orthogonalized one of the
                wrong number of dimensions.
        """
        param_group = dict(param_group)
        if not isinstance(param_group["params"], Tensor):
            param_group["params"] = list(param_group["params"])
        known = self._roles
        self._roles = {**known, **param_group.pop("roles", {})}
        try:
            super().add_param_group(param_group)
        except (TypeError, ValueError):
            self._roles = known
            raise

    def check_parameter(self, p: Tensor) -> None:
        super().check_parameter(p)
        role = self._roles.get(p)
        if role not in (ADAMW, *ORTHOGONALIZED):
            raise ValueError(f"a parameter of shape {tuple(p.shape)} has no role; roles must cover every parameter")
        if role in ORTHOGONALIZED and p.ndim != (2 if role == MATRIX else 3):
            raise ValueError(f"role {role!r} does not fit a parameter of shape {tuple(p.shape)}")

    def update_(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if self._roles[p] != ADAMW:
                state = self.state[p]
                working = working_copy(p, state.get("master_param") if group["master_weights"] else None)
                self.matrix_update_(working, p.grad.to(working.dtype), state, group, self._roles[p])  # type: ignore[union-attr]
                write_back_(p, working)
        self.adam_([p for p in params if self._roles[p] == ADAMW], group)


def adjusted_lr_scale(shape: Sequence[int], muon_lr_scale: float) -> float:
    """``muon_lr_scale * sqrt(max(fan_out, fan_in))`` of a whole matrix (..., fan_out, fan_in).

    Source: Liu et al. 2025, Muon is Scalable for LLM Training (the update RMS of AdamW for every shape).
    """
    return muon_lr_scale * math.sqrt(max(shape[-2:]))
