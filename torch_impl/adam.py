"""Adam and AdamW: torch's own fused kernels, which are at the memory limit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_impl.config import AdamConfig, AdamWConfig
from torch_impl.master_weights import compute_dtype


def build_adam(param_groups: list[dict[str, Any]], config: AdamConfig) -> torch.optim.Optimizer:
    """``torch.optim.AdamW`` or ``Adam`` with ``fused=True`` over groups that carry "params", "lr" and "weight_decay".

    Steps are counted per parameter: one without a gradient does not advance. With ``capturable`` every group gets
    an lr tensor of its own.
    """
    if config.capturable:
        for group in param_groups:
            first = group["params"][0]
            if first.is_cuda and compute_dtype(first) == torch.float64:
                raise ValueError("capturable=True: torch's fused CUDA Adam reads an lr tensor as float32, not float64")
            group["lr"] = torch.tensor(group["lr"], dtype=compute_dtype(first), device=first.device)
    optimizer_class = torch.optim.AdamW if isinstance(config, AdamWConfig) else torch.optim.Adam
    return optimizer_class(
        param_groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
        capturable=config.capturable,
    )


def check_adam_group(group: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for a hyperparameter in ``group`` that is out of range."""
    values = {name: group[name] for name in ("lr", "weight_decay", "eps", "betas") if name in group}
    numbers: dict[str, Any] = {name: float(x) if isinstance(x, Tensor) else x for name, x in values.items()}
    AdamConfig(fused=True, **numbers)


def initial_adam_state(p: Tensor) -> dict[str, Tensor]:
    """What torch's fused Adam makes at the first step of a parameter, equivalent to having no state."""
    state = {key: torch.zeros_like(p, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=p.device), **state}
