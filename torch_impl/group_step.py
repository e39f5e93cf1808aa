"""What fused Adam, Muon and Dion2 share: steps counted per group, float32 state and masters, checked groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_impl.adam_step import AdamRule, AdamTensors, GroupAdam
from torch_impl.flat_state import IMPLEMENTATION, check_count, check_group, check_state, counted_per_group
from torch_impl.master_weights import LOW_PRECISION, compute_dtype
from torch_impl.param_groups import LR_RULE, WD_RULE, assign_


class GroupStepOptimizer(torch.optim.Optimizer, ABC):
    """Base of optimizers that count steps per group, with or without gradients, as fused implementations do.

    A parameter whose gradient is None keeps its value and its state. State is float32 (float64 for float64
    parameters); with "master_weights" bfloat16 and float16 parameters get float32 masters. With "capturable" lr and
    weight decay are tensors on the device, each group's own: schedulers fill them in place, a captured CUDA graph
    reads them live.
    """

    _group_keys: tuple[str, ...] = ("params",)  # what add_param_group takes besides the defaults

    def __init__(self, params: Iterable[Tensor] | Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        self._adam_of_group: dict[int, GroupAdam] = {}
        super().__init__(params, {"step": 0, **defaults})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_adam_of_group": {}, **state})

    @abstractmethod
    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for a value in ``group`` that the rule cannot use."""

    @abstractmethod
    def update_(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update those members of ``group`` that have a gradient; their state is complete, the step counted."""

    def state_keys(self, p: Tensor) -> tuple[str, ...]:
        """Names of the state of ``p``, besides its master."""
        return ("exp_avg", "exp_avg_sq")

    def initial_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Fresh state of a parameter, equivalent to having none: zeros, and the master as a copy."""
        dtype = compute_dtype(p)
        state = {key: torch.zeros_like(p, dtype=dtype, requires_grad=False) for key in self.state_keys(p)}
        if p.dtype in LOW_PRECISION and group["master_weights"]:
            state["master_param"] = p.detach().float()
        return state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: "params" and any of the defaults.

        Raises:
            TypeError: an unknown key, or a value of the wrong type.
            ValueError: no parameters, one given twice, a view with gaps (fused kernels would write into them), a value
                out of range.
        """
        param_group = dict(param_group)
        params = param_group["params"]
        param_group["params"] = [params] if isinstance(params, Tensor) else list(params)
        if not param_group["params"]:
            raise ValueError("a group needs at least one parameter")
        if not all(isinstance(p, Tensor) for p in param_group["params"]):
            raise TypeError("parameters must be given as tensors, without names")
        if len(set(param_group["params"])) != len(param_group["params"]):
            raise ValueError("a group has the same parameter twice")
        valid = {*self._group_keys, *self.defaults}
        unknown = set(param_group) - valid - {"initial_lr", *LR_RULE, WD_RULE}
        if unknown:
            raise TypeError(f"a group has no {sorted(unknown)}; valid: {sorted(valid)}")
        for p in param_group["params"]:
            self.check_parameter(p)
        self.check_hyperparameters({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        device = group["params"][0].device
        dtype = max((compute_dtype(p) for p in group["params"]), key=lambda d: d.itemsize)
        group["step"] = torch.as_tensor(group["step"], dtype=torch.float32).to(device).clone()
        if group["capturable"]:
            for key in ("lr", "weight_decay"):
                group[key] = torch.as_tensor(group[key], dtype=dtype).to(device).clone()

    def check_parameter(self, p: Tensor) -> None:
        """Raise TypeError or ValueError for a parameter that cannot be in a group."""
        if p.dtype not in (torch.float32, torch.float64, *LOW_PRECISION):
            raise TypeError(f"parameters must be float64, float32, bfloat16 or float16, got {p.dtype}")
        if torch.empty_like(p, device="meta").stride() != p.stride():
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is a view with gaps: make it contiguous")

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
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            group["step"] += 1 if found_inf is None else 1 - found_inf.to(group["step"].device).reshape(())
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                self._complete_state(p, group)
            self.update_(params, group)
        return loss

    def _complete_state(self, p: Tensor, group: dict[str, Any]) -> None:
        """Fresh values for what ``p`` needs and its state does not have."""
        state = self.state[p]
        needs_master = p.dtype in LOW_PRECISION and group["master_weights"]
        if any(key not in state for key in (*self.state_keys(p), *(["master_param"] if needs_master else []))):
            for key, value in self.initial_state(p, group).items():
                state.setdefault(key, value)

    def adam_(self, params: list[Tensor], group: dict[str, Any], **mode: bool) -> None:
        """One Adam update of ``params`` with the hyperparameters of ``group``; ``mode`` as in AdamRule."""
        tensors = []
        for p in params:
            state = self.state[p]
            master = state.get("master_param") if group["master_weights"] else None
            own = (p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"], master)
            tensors.append(AdamTensors(*map(_local, own)))  # type: ignore[arg-type]
        rule = AdamRule(group["lr"], group["weight_decay"], group["betas"], group["eps"], **mode)
        adam = self._adam_of_group.setdefault(id(group), GroupAdam())
        adam.update_(tensors, group["step"], rule, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of ``state_dict()``, here or of torch.optim.Adam or AdamW.

        Everything is checked first; tensors are copied and keep their dtype bit for bit (torch's own loader rounds
        float32 moments and masters to the parameter's dtype).

        Raises:
            ValueError: other groups, state of another shape or kind, a value out of range; steps that were counted per
                parameter and differ within a group. Nothing has changed then.
        """
        saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
        groups, states = [], {}
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(f"the state has {len(saved_groups)} groups, the optimizer {len(self.param_groups)}")
        for saved, group in zip(saved_groups, self.param_groups, strict=True):
            if len(saved["params"]) != len(group["params"]):
                raise ValueError(
                    f"a group has {len(saved['params'])} parameters in the state, {len(group['params'])} here"
                )
            values = {key: x for key, x in saved.items() if key not in (*IMPLEMENTATION, "params", "param_names")}
            members = [(str(i), dict(saved_state.get(i, {})), values) for i in saved["params"]]
            members = counted_per_group(members, adam_w_mode=group.get("adam_w_mode", True))
            values = members[0][2]
            for i, p, (name, state, _) in zip(saved["params"], group["params"], members, strict=True):
                check_state(name, p, state, self.initial_state(p, group))
                states[i] = state
            check_group(members[0][0], values, group)
            check_count("step", values.get("step", 0))
            self.check_hyperparameters({**group, **values})
            groups.append({**group, **values, "params": saved["params"]})
        own_groups = self.param_groups
        super().load_state_dict({"state": {}, "param_groups": groups})
        for group, loaded, saved in zip(own_groups, self.param_groups, saved_groups, strict=True):
            for key, value in loaded.items():
                if key != "params":
                    assign_(group, key, value)  # a captured graph goes on reading the same tensors
            for i, p in zip(saved["params"], group["params"], strict=True):
                if states[i]:
                    self.state[p] = {key: loaded_copy(value, p) for key, value in states[i].items()}
        self.param_groups = own_groups


def _local(x: Tensor | None) -> Tensor | None:
    """This rank's shard of a DTensor: Adam is element by element."""
    return x.to_local() if x is not None and hasattr(x, "to_local") else x


def loaded_copy(value: Tensor, p: Tensor) -> Tensor:
    """A copy of a saved state tensor for ``p``: its own dtype, on the parameter's device, with its strides."""
    if value.shape == p.shape:
        return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(p.device, copy=True)
