"""The C kernel beside this file, compiled when it is first needed (a tenth of a second) by the machine's compiler."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
SMALL = 2**16  # elements that one thread updates sooner than another one starts


class _Tensors(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("param", "grad", "exp_avg", "exp_avg_sq", "master")] + [
        ("size", ctypes.c_int64)
    ]


class _Rule(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_float)
        for name in ("lr", "weight_decay", "b1", "a1", "b2", "a2", "c1", "c2", "eps", "grad_factor")
    ]


@functools.cache
def compiled() -> dict[torch.dtype, Any]:
    """{dtype of parameters and gradients: C function}; empty without a compiler whose libraries can be loaded."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "adam_cpu.so"
        command = [compiler, *FLAGS, "-o", str(library), str(Path(__file__).with_suffix(".c")), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True)
            loaded = ctypes.CDLL(str(library))
        except (OSError, subprocess.CalledProcessError):
            return {}
    functions = {torch.float32: loaded.adam_float32, torch.bfloat16: loaded.adam_bfloat16}
    for function in functions.values():
        int64 = ctypes.c_int64
        function.argtypes = [ctypes.POINTER(_Tensors), int64, int64, int64, ctypes.POINTER(_Rule), ctypes.c_int]
        function.restype = None
    return functions


def adam_compiled_(
    tensors: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]],
    step: float,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    adam_w_mode: bool,
    bias_correction: bool,
    grad_factor: float,
) -> None:
    """Update in place; see torch_impl.adam_step.AdamRule for the rule.

    Args:
        tensors: (parameter, gradient, exp_avg, exp_avg_sq, master or None); parameters and gradients of one dtype in
            ``compiled()``, moments and masters float32, all dense with equal strides.
        step: 1-based count.
        grad_factor: multiplies every gradient.
    """
    function = compiled()[tensors[0][0].dtype]
    table = (_Tensors * len(tensors))()
    for row, (param, grad, exp_avg, exp_avg_sq, master) in zip(table, tensors, strict=True):
        row.param, row.grad, row.size = param.data_ptr(), grad.data_ptr(), param.numel()
        row.exp_avg, row.exp_avg_sq = exp_avg.data_ptr(), exp_avg_sq.data_ptr()
        row.master = None if master is None else master.data_ptr()
    (b1, b2), corrections = betas, (1.0, 1.0)
    if bias_correction:
        corrections = (1 - b1**step, 1 - b2**step)
    rule = _Rule(lr, weight_decay, b1, 1 - b1, b2, 1 - b2, *corrections, eps, grad_factor)
    size = sum(row[0].numel() for row in tensors)
    count = 1 if size < SMALL else torch.get_num_threads()
    bounds = [size * i // count for i in range(count + 1)]

    def run(first: int, last: int) -> None:  # ctypes releases the interpreter's lock
        function(table, len(tensors), first, last, ctypes.byref(rule), adam_w_mode)

    threads = [threading.Thread(target=run, args=bounds[i : i + 2]) for i in range(1, count)]
    for thread in threads:
        thread.start()
    run(*bounds[:2])
    for thread in threads:
        thread.join()
