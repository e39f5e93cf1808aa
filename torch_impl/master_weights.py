"""float32 masters of low-precision parameters: updates accumulate there, the parameter is the rounded master."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)


def compute_dtype(param: Tensor) -> torch.dtype:
    """Dtype of moments, masters and arithmetic: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def working_copy(param: Tensor, state: dict[str, Any], master_weights: bool) -> Tensor:
    """The tensor that the update rule modifies in place: the parameter itself, or its float32 master.

    A master is made at first use and kept in ``state["master_param"]``. Elements of the parameter that are no longer
    the rounded master were changed from outside (weights loaded, an average swapped in): they win.
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
