"""float32 masters of low-precision parameters: updates accumulate there, the parameter is the rounded master."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)


def compute_dtype(param: Tensor) -> torch.dtype:
    """Dtype of moments, masters and arithmetic: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def matching(x: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype`` on the device and with the strides of ``param``; a copy only where it must be.

    torch's fused kernels walk the storage of all their tensors in step, whatever the strides say.
    """
    if x.dtype == dtype and x.device == param.device and x.stride() == param.stride():
        return x
    return torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(x)


def working_copy(param: Tensor, state: dict[str, Any], master_weights: bool) -> Tensor:
    """The tensor that the update rule modifies in place: the parameter itself, or its float32 master.

    The master lives in ``state["master_param"]``; a state without one gets it from the parameter. Elements of the
    parameter that are no longer the rounded master were changed from outside (weights loaded, an average swapped
    in): they win.
    """
    if param.dtype not in LOW_PRECISION:
        return param.detach()
    if not master_weights:
        return param.detach().float()
    master: Tensor | None = state.get("master_param")
    if master is None:
        master = state["master_param"] = param.detach().float()
    else:
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
    return master


def write_back_(param: Tensor, working: Tensor) -> None:
    """Round the working copy into ``param`` (modified in place)."""
    if working.data_ptr() != param.data_ptr():
        param.detach().copy_(working)
