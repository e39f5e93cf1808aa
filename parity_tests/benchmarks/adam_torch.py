"""Fused Adam of torch_impl against torch.optim.AdamW(fused=True) on the same work.

Run ``python -m parity_tests.benchmarks.adam_torch [--device cuda]``; on a GPU also as a share of what a copy moves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from parity_tests.benchmarks.rounds import Result, Shapes, arguments, compare, gpt2_small, report
from torch_impl.fused_adam import FusedAdam

LR, WEIGHT_DECAY = 1e-3, 0.1
BYTES = {torch.float32: 28, torch.bfloat16: 30}  # an element of ours: see torch_impl.kernels.adam


def parameters(shapes: Shapes, dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    """Normal values with gradients a hundredth of their size."""
    generator = torch.Generator(device).manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator, device=device).to(dtype))
        for shape in shapes.values()
    ]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device=device).mul_(0.01).to(dtype)
    return params


def fused_adam(shapes: Shapes, dtype: torch.dtype, device: str) -> Callable[[], object]:
    return FusedAdam(parameters(shapes, dtype, device), lr=LR, weight_decay=WEIGHT_DECAY).step


def adamw(kind: str) -> Callable[[Shapes, torch.dtype, str], Callable[[], object]]:
    """torch's fused or foreach AdamW; below float32 on masters, with a copy of the gradients and to the parameters."""

    def make(shapes: Shapes, dtype: torch.dtype, device: str) -> Callable[[], object]:
        params = parameters(shapes, dtype, device)
        masters = params if dtype == torch.float32 else [torch.nn.Parameter(p.detach().float()) for p in params]
        how = {"fused": kind == "fused", "foreach": kind == "foreach"}
        optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, **how)  # type: ignore[arg-type]
        low: list[Tensor] = [p.detach() for p in params]
        grads: list[Tensor] = [torch.empty_like(p) for p in masters]

        def step() -> None:
            if masters is not params:
                torch._foreach_copy_(grads, [p.grad for p in params if p.grad is not None])
                for p, grad in zip(masters, grads, strict=True):
                    p.grad = grad
            optimizer.step()
            if masters is not params:
                torch._foreach_copy_(low, [p.detach() for p in masters])

        return step

    return make


def synchronized(step: Callable[[], object], device: str) -> Callable[[], object]:
    if device == "cpu":
        return step

    def finished() -> None:
        step()
        torch.cuda.synchronize()

    return finished


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a device-to-device copy of 4 GB."""
    source = torch.empty(2**30, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 2 * source.nbytes / float(np.median(times))


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, rounds=60)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of GPT-2 small (default: 12)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    shapes = gpt2_small(args.blocks)
    size = sum(math.prod(shape) for shape in shapes.values())
    results: list[Result] = []
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("fused", "foreach") if args.device == "cuda" else ("fused",):
            work = "" if dtype == torch.float32 else " on masters, and copies"
            name = f"{str(dtype).removeprefix('torch.')}: torch.optim.AdamW({kind}){work}"
            makers = (fused_adam, adamw(kind))
            ours, other = (synchronized(make(shapes, dtype, args.device), args.device) for make in makers)
            results.append(compare(name, ours, other, args.rounds))
    report(f"{size / 1e6:.0f} M parameters on {args.device}, {args.rounds} rounds", results, args.json)
    if args.device == "cuda":
        copy = copy_bandwidth(args.device)
        for dtype, result in zip((torch.float32, torch.bfloat16), results[::2], strict=True):
            achieved = BYTES[dtype] * size / result.ours_ms * 1e3
            print(f"{dtype}: {achieved / 1e12:.2f} TB/s, {achieved / copy:.0%} of a copy's {copy / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
