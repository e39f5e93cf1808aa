"""Adam of many tensors in one launch that reads and writes every element once.

Bytes an element for bfloat16 parameters and gradients with masters: gradient 2, moments 8 and master 4 read, moments 8,
master 4 and parameter 2 written, which makes 28; and 2 for reading the parameter, because one that was changed from
outside must win over its master. float32 parameters take 28.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of one program: 8 a thread, whose bfloat16 values are one 16-byte load
NUM_WARPS = 8
ALIGNMENT = 16  # bytes of a vector load

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """float32 to DTYPE, to the nearest, ties to even; on the bits for bfloat16, where the interpreter truncates."""
    if tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        high = tl.where(x != x, 0x7FC0, high)  # the carry would turn some NaN into zero
        return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def _pointer(table, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + column).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _update(
    table, offsets, mask, lr, weight_decay, b1, a1, b2, a2, correction1, correction2, eps, inverse_scale,
    PARAM: tl.constexpr, GRAD: tl.constexpr, MASTER: tl.constexpr, ADAM_W: tl.constexpr, SCALE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    param = _pointer(table, 0, PARAM, ALIGNED) + offsets
    grad = _pointer(table, 1, GRAD, ALIGNED) + offsets
    exp_avg = _pointer(table, 2, tl.float32, ALIGNED) + offsets
    exp_avg_sq = _pointer(table, 3, tl.float32, ALIGNED) + offsets
    p = tl.load(param, mask=mask).to(tl.float32)
    g = tl.load(grad, mask=mask).to(tl.float32)
    m = tl.load(exp_avg, mask=mask)
    v = tl.load(exp_avg_sq, mask=mask)
    if MASTER:
        master = _pointer(table, 4, tl.float32, ALIGNED) + offsets
        kept = tl.load(master, mask=mask)
        p = tl.where(_rounded(kept, PARAM).to(tl.float32) == p, kept, p)
    if SCALE:
        g = g * inverse_scale
    if not ADAM_W:
        g = g + weight_decay * p
    m = b1 * m + a1 * g
    v = b2 * v + a2 * g * g
    u = tl.div_rn(tl.div_rn(m, correction1), tl.sqrt_rn(tl.div_rn(v, correction2)) + eps)
    if ADAM_W:
        u = u + weight_decay * p
    p = p - lr * u
    tl.store(exp_avg, m, mask=mask)
    tl.store(exp_avg_sq, v, mask=mask)
    if MASTER:
        tl.store(master, p, mask=mask)
    tl.store(param, _rounded(p, PARAM), mask=mask)


@triton.jit
def adam_kernel(
    pointers, sizes, blocks, constants, lr, weight_decay, step, inverse_scale, found_inf,
    PARAM: tl.constexpr, GRAD: tl.constexpr, MASTER: tl.constexpr, ADAM_W: tl.constexpr, CORRECT: tl.constexpr,
    SCALE: tl.constexpr, SKIP: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program updates one block of one tensor.

    Args:
        pointers: int64 [tensors, 5], addresses of parameter, gradient, both moments and master.
        sizes: int64 [tensors], elements.
        blocks: int32 [programs, 2], tensor and position in units of BLOCK.
        constants: float64 [7]: b1, 1 - b1, b2, 1 - b2, log b1, log b2, eps.
        lr, weight_decay, step, inverse_scale, found_inf: one float32 each, read now: a captured graph sees new values.
    """
    program = tl.program_id(0)
    tensor = tl.load(blocks + 2 * program).to(tl.int64)
    start = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
    size = tl.load(sizes + tensor)
    if SKIP:
        size = tl.where(tl.load(found_inf) == 0, size, 0)
    b1 = tl.load(constants).to(tl.float32)
    a1 = tl.load(constants + 1).to(tl.float32)
    b2 = tl.load(constants + 2).to(tl.float32)
    a2 = tl.load(constants + 3).to(tl.float32)
    eps = tl.load(constants + 6).to(tl.float32)
    correction1 = 1.0
    correction2 = 1.0
    if CORRECT:
        # in float64: 1 - b2^1 has three digits left of float32's seven
        t = tl.load(step).to(tl.float64)
        correction1 = (1.0 - tl.exp(t * tl.load(constants + 4))).to(tl.float32)
        correction2 = (1.0 - tl.exp(t * tl.load(constants + 5))).to(tl.float32)
    scale = 1.0
    if SCALE:
        scale = tl.load(inverse_scale)
    rate = tl.load(lr)
    decay = tl.load(weight_decay)
    table = pointers + 5 * tensor
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:  # without a mask, which would break vector loads up
        _update(
            table, offsets, None, rate, decay, b1, a1, b2, a2, correction1, correction2, eps, scale,
            PARAM, GRAD, MASTER, ADAM_W, SCALE, ALIGNED,
        )  # fmt: skip
    else:
        _update(
            table, offsets, offsets < size, rate, decay, b1, a1, b2, a2, correction1, correction2, eps, scale,
            PARAM, GRAD, MASTER, ADAM_W, SCALE, ALIGNED,
        )  # fmt: skip


class _Tables(NamedTuple):
    """pointers, sizes and blocks as adam_kernel takes them, for tensors of these addresses and sizes."""

    addresses: list[list[int]]
    pointers: Tensor
    sizes: Tensor
    blocks: Tensor
    aligned: bool
    hosts: list[Tensor]  # what a captured copy to the device reads again at every replay


class MultiTensorAdam:
    """The kernel over lists of tensors: one launch for each combination of dtypes, one as a rule.

    Tables of addresses and blocks are built once and kept until an address changes.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[Any, ...], _Tables] = {}
        self._replaced: list[_Tables] = []  # a captured graph may still read them
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self._values: dict[str, tuple[float, Tensor]] = {}

    def update_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        masters: Sequence[Tensor | None],
        step: Tensor,
        *,
        lr: float | Tensor,
        weight_decay: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        inverse_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update in place; see torch_impl.adam_step.AdamRule for the rule.

        Args:
            params: float32, bfloat16 or float16, of any sizes, dense, on one device.
            grads: the same shapes and strides; any of these dtypes.
            exp_avgs, exp_avg_sqs: float32.
            masters: float32, or None.
            step: 0-D float32, 1-based.
            lr, weight_decay: numbers, or float32 tensors of one element that a captured graph reads live.
            inverse_scale: None, or one float32 that multiplies every gradient.
            found_inf: None, or one float32; nothing changes where it is not 0.
        """
        rows: dict[tuple[Any, ...], list[tuple[Tensor | None, ...]]] = {}
        for p, g, m, v, master in zip(params, grads, exp_avgs, exp_avg_sqs, masters, strict=True):
            if p.numel():
                rows.setdefault((p.dtype, g.dtype, master is not None), []).append((p, g, m, v, master))
        device = params[0].device
        for (param_dtype, grad_dtype, has_master), members in rows.items():
            tables = self._lookup((param_dtype, grad_dtype, has_master), members)
            adam_kernel[(len(tables.blocks),)](
                tables.pointers,
                tables.sizes,
                tables.blocks,
                self._constant((*betas, eps), device),
                self._value("lr", lr, device),
                self._value("weight_decay", weight_decay, device),
                step,
                step if inverse_scale is None else inverse_scale,
                step if found_inf is None else found_inf,
                PARAM=_DTYPES[param_dtype],
                GRAD=_DTYPES[grad_dtype],
                MASTER=has_master,
                ADAM_W=adam_w_mode,
                CORRECT=bias_correction,
                SCALE=inverse_scale is not None,
                SKIP=found_inf is not None,
                ALIGNED=tables.aligned,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
                enable_fp_fusion=False,  # every operation rounds once, as on CPU; memory is the limit
            )

    def _lookup(self, key: tuple[Any, ...], members: list[tuple[Tensor | None, ...]]) -> _Tables:
        param = [row[0] for row in members if row[0] is not None]
        sizes = [p.numel() for p in param]
        addresses = [[0 if x is None else x.data_ptr() for x in row] for row in members]
        tables = self._tables.get(key)
        if tables is not None and tables.addresses == [*addresses, sizes]:
            return tables
        device = param[0].device
        if tables is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._replaced.append(tables)
        counts = torch.tensor([-(-size // BLOCK) for size in sizes])
        tensor = torch.repeat_interleave(torch.arange(len(counts)), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        blocks = torch.stack([tensor, torch.arange(len(first)) - first], dim=1).int()
        hosts = [torch.tensor(addresses), torch.tensor(sizes), blocks]
        if device.type == "cuda":
            hosts = [host.pin_memory() for host in hosts]
        pointers, lengths, blocks = (host.to(device, non_blocking=True) for host in hosts)
        aligned = all(address % ALIGNMENT == 0 for row in addresses for address in row)
        self._tables[key] = _Tables([*addresses, sizes], pointers, lengths, blocks, aligned, hosts)
        return self._tables[key]

    def _constant(self, key: tuple[float, ...], device: torch.device) -> Tensor:
        if key not in self._constants:
            b1, b2, eps = key
            logs = [math.log(b) if b else -math.inf for b in (b1, b2)]
            values = [b1, 1 - b1, b2, 1 - b2, *logs, eps]
            self._constants[key] = torch.tensor(values, dtype=torch.float64, device=device)
        return self._constants[key]

    def _value(self, name: str, value: float | Tensor, device: torch.device) -> Tensor:
        if isinstance(value, Tensor):
            return value
        known, tensor = self._values.get(name, (None, None))
        if tensor is None:
            tensor = torch.empty((), dtype=torch.float32, device=device)
        if known != value:
            self._values[name] = (value, tensor.fill_(value))
        return tensor
