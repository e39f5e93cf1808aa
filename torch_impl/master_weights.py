"""float32 masters of low-precision parameters: updates accumulate there, the parameter is the rounded master."""

from __future__ import annotations

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


def working_copy(param: Tensor, master: Tensor | None) -> Tensor:
    """The tensor that the update rule modifies in place: the master if there is one, as it must be at this step.

    Otherwise the parameter itself, or a float32 copy of a low-precision one.
    """
    if master is not None:
        adopt_changes_(master, param)
        return master
    return param.detach().to(compute_dtype(param))


def adopt_changes_(master: Tensor, param: Tensor) -> None:
    """Take over what was changed in ``param`` behind the master's back (weights loaded, an average swapped in).

    Elements of ``param`` that are no longer the rounded master win; ``master`` is modified in place there.
    """
    rounded = master.to(param.dtype)
    if rounded.device.type == "cpu" and _same_bits(rounded, param):
        return
    master.copy_(torch.where(rounded == param, master, param.float()))


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Compare two 16-bit tensors on CPU; in words of eight bytes where they can be, which is three times faster."""
    x, y = x.detach().view(torch.int16), y.detach().view(torch.int16)
    if x.is_contiguous() and y.is_contiguous():
        x, y = x.view(-1), y.view(-1)
        if not (x.numel() % 4 or x.storage_offset() % 4 or y.storage_offset() % 4):
            x, y = x.view(torch.int64), y.view(torch.int64)
    return torch.equal(x, y)


def write_back_(param: Tensor, working: Tensor) -> None:
    """Round the working copy into ``param`` (modified in place)."""
    if working.data_ptr() != param.data_ptr():
        param.detach().copy_(working)
