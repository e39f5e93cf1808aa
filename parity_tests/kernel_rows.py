"""One table for every implementation of the Adam update, and its comparison with the oracle.

As a program, for the Triton kernel: ``TRITON_INTERPRET=1 python -m parity_tests.kernel_rows`` prints one JSON line a
row. Triton decides when it is imported whether kernels are interpreted, so the interpreter needs a process of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity_tests import reference
from torch_impl.kernels.adam import BLOCK, MultiTensorAdam

LR, DECAY, EPS = 0.01, 0.1, 1e-6


@dataclass(frozen=True)
class Row:
    """``steps`` updates from step count ``first`` on of tensors of these sizes."""

    name: str
    sizes: tuple[int, ...] = (5, 64, 2047)
    dtype: str = "float32"
    grad_dtype: str | None = None
    masters: bool = True
    first: int = 1
    steps: int = 3
    unaligned: bool = False
    changed: bool = False
    """Set the first element from outside before the last step."""
    scale: float | None = None
    found_inf: bool = False
    """A GradScaler found one at every step."""
    nan: bool = False
    """The first element of every gradient is NaN."""
    rule: dict[str, Any] = field(default_factory=dict)


DTYPES = ("float32", "bfloat16", "float16")
ROWS = (
    *(Row(f"sizes-{dtype}", (1, 2, 3, 7, 127, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 0), dtype) for dtype in DTYPES),
    *(Row(f"l2-{dtype}", dtype=dtype, rule={"adam_w_mode": False}) for dtype in DTYPES),
    *(Row(f"uncorrected-{dtype}", dtype=dtype, rule={"bias_correction": False}) for dtype in DTYPES),
    *(Row(f"unaligned-{dtype}", (1, 100, BLOCK + 3), dtype, unaligned=True) for dtype in DTYPES),
    *(Row(f"late-{dtype}", (33,), dtype, first=1000) for dtype in DTYPES),
    *(Row(f"scaled-{dtype}", dtype=dtype, scale=1024.0) for dtype in DTYPES),
    *(Row(f"changed-{dtype}", dtype=dtype, changed=True) for dtype in DTYPES),
    *(Row(f"skipped-{dtype}", dtype=dtype, scale=8.0, found_inf=True) for dtype in DTYPES),
    *(Row(f"nan-{dtype}", dtype=dtype, nan=True) for dtype in DTYPES),
    *(Row(f"no-master-{dtype}", dtype=dtype, masters=False, steps=1) for dtype in DTYPES[1:]),
    Row("bfloat16-gradients", grad_dtype="bfloat16"),
    Row("float32-gradients", dtype="bfloat16", grad_dtype="float32"),
    Row("betas-zero", rule={"betas": (0.0, 0.0)}),
    Row("two-thousand-tensors", (3,) * 2000, "bfloat16", steps=1),
)


def compare(row: Row, update_: Callable[..., None], device: str) -> dict[str, Any]:
    """Largest absolute errors of parameters (or masters) and moments, and whether parameters are the rounded masters.

    Args:
        row: what is done.
        update_: called as MultiTensorAdam.update_.
        device: where.
    """
    rng = np.random.default_rng(len(row.name))
    dtype, grad_dtype = getattr(torch, row.dtype), getattr(torch, row.grad_dtype or row.dtype)
    rule: dict[str, Any] = {"betas": (0.9, 0.999), "adam_w_mode": True, "bias_correction": True, **row.rule}

    def tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        padded = torch.zeros(len(values) + 1, dtype=dtype, device=device)
        out = padded[1:] if row.unaligned else padded[:-1]
        return out.copy_(torch.tensor(values))

    params = [tensor(rng.normal(size=n), dtype) for n in row.sizes]
    masters = [tensor(p.double().cpu().numpy(), torch.float32) for p in params]
    has_masters = row.masters and row.dtype != "float32"
    exp_avgs, exp_avg_sqs = ([tensor(np.zeros(n), torch.float32) for n in row.sizes] for _ in range(2))
    expected = [p.double().cpu().numpy() for p in params]
    expected_moments = [[np.zeros(n) for n in row.sizes] for _ in range(2)]
    for t in range(row.first, row.first + row.steps):
        if row.changed and t == row.first + row.steps - 1:
            for p, want in zip(params, expected, strict=True):
                p[0] = want[0] = 3.0
        grads = [tensor(rng.normal(size=n) * (row.scale or 1.0), grad_dtype) for n in row.sizes]
        if row.nan:
            for grad in grads:
                grad[0] = torch.nan
        update_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            masters if has_masters else [None] * len(params),
            torch.tensor(float(t), device=device),
            lr=torch.tensor(LR, device=device) if t % 2 else LR,
            weight_decay=DECAY if t % 2 else torch.tensor(DECAY, device=device),
            eps=EPS,
            inverse_scale=None if row.scale is None else torch.tensor(1 / row.scale, device=device),
            found_inf=torch.full((1,), float(row.found_inf), device=device) if row.scale else None,
            **rule,
        )
        if row.found_inf:
            continue
        for i, grad in enumerate(grads):
            g = grad.double().cpu().numpy() / (row.scale or 1.0)
            if not rule["adam_w_mode"]:
                g = g + DECAY * expected[i]
            m = expected_moments[0][i] = reference.first_moment(expected_moments[0][i], g, rule["betas"][0])
            v = expected_moments[1][i] = reference.second_moment(expected_moments[1][i], g, rule["betas"][1])
            u = reference.adam_direction(m, v, t if rule["bias_correction"] else np.inf, rule["betas"], EPS)
            expected[i] = reference.descend(expected[i], u, LR, DECAY if rule["adam_w_mode"] else 0.0)
    found = masters if has_masters else params

    return {
        "name": row.name,
        "parameters": max(map(_error, found, expected)),
        "moments": max(max(map(_error, a, b)) for a, b in zip((exp_avgs, exp_avg_sqs), expected_moments, strict=True)),
        "rounded": not has_masters or all(_error(p, m.to(dtype)) == 0 for p, m in zip(params, masters, strict=True)),
    }


def _error(found: Tensor, expected: Tensor | np.ndarray) -> float:
    """Largest difference; infinite where only one of them is NaN."""
    a, b = found.double().cpu().numpy(), np.asarray(torch.as_tensor(expected).double().cpu())
    difference = np.where(np.isnan(a) & np.isnan(b), 0.0, np.abs(a - b))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for row in ROWS:
        print(json.dumps(compare(row, MultiTensorAdam().update_, parser.parse_args().device)), flush=True)


if __name__ == "__main__":
    main()
