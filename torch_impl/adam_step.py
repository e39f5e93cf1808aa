"""One Adam update of many tensors that share a step count, each read and written once: torch's kernels and our own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_impl.kernels import adam_cpu
from torch_impl.master_weights import adopt_changes_, matching

if TYPE_CHECKING:
    from torch_impl.kernels.adam import MultiTensorAdam

# elements that are cast, updated and rounded together: their float32 gradients and masters stay in the cache
CHUNK = 2**19


class AdamRule(NamedTuple):
    """Hyperparameters of one update.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        p = p - lr (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + eps) + weight_decay p)

    Attributes:
        lr, weight_decay: numbers, or 0-D tensors that are read on the device.
        betas: (b1, b2).
        eps: stands outside the root.
        adam_w_mode: False adds ``weight_decay p`` to g instead.
        bias_correction: False leaves out the divisions of m and v.
    """

    lr: float | Tensor
    weight_decay: float | Tensor
    betas: tuple[float, float]
    eps: float
    adam_w_mode: bool = True
    bias_correction: bool = True


class AdamTensors(NamedTuple):
    """What an update of one parameter reads and writes; all of one shape, dense, with the strides of ``param``.

    Attributes:
        param: modified in place.
        grad: not modified.
        exp_avg, exp_avg_sq: float32 (float64 for a float64 parameter), modified in place.
        master: float32, modified in place; None for float32 and float64 parameters, and for low-precision ones that
            lose what rounding takes.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None


class GroupAdam:
    """Adam updates of the parameters of one group; what CUDA needs from one step to the next is kept here."""

    def __init__(self) -> None:
        self._kernels: dict[torch.device, MultiTensorAdam] = {}

    def update_(
        self,
        tensors: Sequence[AdamTensors],
        step: Tensor,
        rule: AdamRule,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update parameters, moments and masters.

        Args:
            tensors: of any dtypes and sizes, on one device or several.
            step: 0-D float32, 1-based count of this update.
            rule: hyperparameters.
            grad_scale: None, or one element that every gradient is divided by.
            found_inf: None, or one element; nothing changes where it is not 0.
        """
        devices: dict[tuple[torch.device, bool], list[AdamTensors]] = {}
        for t in tensors:
            devices.setdefault((t.param.device, t.exp_avg.dtype == torch.float64), []).append(t)
        for (device, double), own in devices.items():
            inverse_scale = None if grad_scale is None else grad_scale.to(device).double().reciprocal()
            here = step.to(device)
            if device.type == "cuda" and not double:
                self._launch(device, own, here, rule, inverse_scale, found_inf)
            elif found_inf is not None and found_inf.item():
                continue
            elif device.type == "cpu":
                adam_on_cpu_(own, here, rule, inverse_scale)
            else:
                adam_unfused_(own, here, rule, inverse_scale)

    def _launch(
        self,
        device: torch.device,
        tensors: Sequence[AdamTensors],
        step: Tensor,
        rule: AdamRule,
        inverse_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        from torch_impl.kernels.adam import MultiTensorAdam  # needs triton, which only CUDA does

        self._kernels.setdefault(device, MultiTensorAdam()).update_(
            [t.param for t in tensors],
            [matching(t.grad, t.param, t.grad.dtype) for t in tensors],
            [t.exp_avg for t in tensors],
            [t.exp_avg_sq for t in tensors],
            [t.master for t in tensors],
            step,
            inverse_scale=None if inverse_scale is None else inverse_scale.float(),
            found_inf=None if found_inf is None else found_inf.to(device),
            **rule._asdict(),
        )


def adam_on_cpu_(tensors: Sequence[AdamTensors], step: Tensor, rule: AdamRule, inverse_scale: Tensor | None) -> None:
    """float32 and bfloat16 by a kernel of our own, if there is a C compiler; the rest by torch's, in pieces.

    torch's fused kernel multiplies by 1 - lr weight_decay, which float32 rounds by up to 3e-8 in the same direction at
    every step: 1e-4 of the parameter in a few thousand. And it needs all tensors in one dtype.

    Args:
        tensors: of any dtypes and sizes.
        step: 0-D, 1-based count of this update.
        rule: hyperparameters.
        inverse_scale: None, or one element that multiplies every gradient.
    """
    kernels: dict[torch.dtype, list[AdamTensors]] = {}
    rest = []
    for t in tensors:
        dtype = t.param.dtype
        if dtype in adam_cpu.compiled() and t.grad.dtype == dtype:
            kernels.setdefault(dtype, []).append(t._replace(grad=matching(t.grad, t.param, dtype)))
        else:
            rest.append(t)
    for own in kernels.values():
        values = rule._replace(lr=float(rule.lr), weight_decay=float(rule.weight_decay))._asdict()
        factor = 1.0 if inverse_scale is None else float(inverse_scale)
        adam_cpu.adam_compiled_(own, float(step), **values, grad_factor=factor)
    for batch in _batches(rest):
        _cast_and_update_(batch, step, rule, inverse_scale)


def _batches(tensors: Sequence[AdamTensors]) -> Iterator[list[AdamTensors]]:
    """Flat stretches of the tensors, up to CHUNK elements of one dtype in a batch."""
    batch: list[AdamTensors] = []
    room = CHUNK
    for piece in chain.from_iterable(map(_pieces, tensors)):
        room -= piece.param.numel()
        if batch and (room < 0 or piece.exp_avg.dtype != batch[0].exp_avg.dtype):
            yield batch
            batch, room = [], CHUNK - piece.param.numel()
        batch.append(piece)
    if batch:
        yield batch


def _pieces(t: AdamTensors) -> Iterator[AdamTensors]:
    size = t.param.numel()
    whole = t._replace(grad=matching(t.grad, t.param, t.grad.dtype))
    for start in range(0, size, CHUNK):
        length = min(CHUNK, size - start)
        flat = (
            None if x is None else x.as_strided((length,), (1,), storage_offset=x.storage_offset() + start)
            for x in whole
        )
        yield AdamTensors(*flat)  # type: ignore[arg-type]


def _cast_and_update_(batch: list[AdamTensors], step: Tensor, rule: AdamRule, inverse_scale: Tensor | None) -> None:
    dtype = batch[0].exp_avg.dtype
    grads = [t.grad for t in batch]
    if inverse_scale is not None or any(g.dtype != dtype for g in grads):
        grads = _cast(grads, dtype)
    if inverse_scale is not None:
        torch._foreach_mul_(grads, inverse_scale.to(dtype).reshape(()))
    for t in batch:
        if t.master is not None:
            adopt_changes_(t.master, t.param)
    copies = iter(_cast([t.param for t in batch if t.master is None and t.param.dtype != dtype], dtype))
    working = [t.param if t.param.dtype == dtype else next(copies) if t.master is None else t.master for t in batch]
    if rule.adam_w_mode and rule.weight_decay:
        torch._foreach_add_(working, working, alpha=-float(rule.lr) * float(rule.weight_decay))
        rule = rule._replace(weight_decay=0.0)
    _fused_(working, grads, [t.exp_avg for t in batch], [t.exp_avg_sq for t in batch], step, rule)
    low = [(t.param, w) for t, w in zip(batch, working, strict=True) if t.param is not w]
    if low:
        torch._foreach_copy_([p for p, _ in low], [w for _, w in low])


def _cast(xs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies, side by side in one stretch of memory."""
    if not xs:
        return []
    sizes = [x.numel() for x in xs]
    out = list(torch.empty(sum(sizes), dtype=dtype).split(sizes))
    torch._foreach_copy_(out, xs)
    return out


def _fused_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step: Tensor,
    rule: AdamRule,
) -> None:
    kernel = torch._fused_adamw_ if rule.adam_w_mode else torch._fused_adam_
    # 1 - b^inf is 1: the divisions are still there and change nothing
    step = step if rule.bias_correction else torch.full_like(step, math.inf)
    kernel(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(params),
        lr=float(rule.lr),
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        weight_decay=float(rule.weight_decay),
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
    )


def adam_unfused_(tensors: Sequence[AdamTensors], step: Tensor, rule: AdamRule, inverse_scale: Tensor | None) -> None:
    """In separate operations, on any device and for any dtype; arguments as in adam_on_cpu_."""
    b1, b2 = rule.betas
    t = step.double() if rule.bias_correction else torch.full_like(step, math.inf, dtype=torch.float64)
    for param, grad, m, v, master in tensors:
        if master is not None:
            adopt_changes_(master, param)
        p = param.to(m.dtype) if master is None else master
        g = grad.to(m.dtype)
        if inverse_scale is not None:
            g = g * inverse_scale.to(m.dtype)
        if not rule.adam_w_mode:
            g = g + rule.weight_decay * p
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        u = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt_().add_(rule.eps))
        if rule.adam_w_mode:
            u = u + rule.weight_decay * p
        p.sub_(u * rule.lr)
        param.copy_(p)
