"""Every way in which torch_impl computes Adam: on CPU, and its CUDA kernel, interpreted, compiled, and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity_tests.kernel_rows import ROWS, Row, compare
from torch_impl import adam_step
from torch_impl.adam_step import AdamRule, AdamTensors
from torch_impl.fused_adam import FusedAdam
from torch_impl.kernels import adam_cpu
from torch_impl.kernels.adam import MultiTensorAdam

ROOT = Path(__file__).parents[1]
FLOAT32 = 1e-6  # absolute, values of a few units: about ten roundings of 6e-8; 5e-7 is usual
HALF_ULP = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # at 4, which normal numbers reach: without masters one rounding
DTYPES = ("float32", "bfloat16", "float16")


def python(*args: str, **env: str) -> str:
    result = subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env=os.environ | env)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def found(device: str) -> dict[str, dict]:
    if device == "cuda":
        return {row.name: compare(row, MultiTensorAdam().update_, device) for row in ROWS}
    lines = python("-m", "parity_tests.kernel_rows", TRITON_INTERPRET="1").splitlines()
    return {line["name"]: line for line in map(json.loads, lines)}


def check(row: Row, result: dict) -> None:
    has_masters = row.masters or row.dtype == "float32"
    assert result["parameters"] <= (FLOAT32 if has_masters else 2 * HALF_ULP[row.dtype])
    assert result["moments"] <= FLOAT32
    assert result["rounded"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_cuda_kernel_against_the_oracle(row: Row, found: dict[str, dict]):
    check(row, found[row.name])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("way", ["compiled", "pieces", "unfused"])
def test_cpu_against_the_oracle(row: Row, way: str, monkeypatch: pytest.MonkeyPatch):
    """torch's kernels and the C kernel; without a compiler, in pieces that end within tensors; in single operations."""
    rule_ = adam_step.adam_unfused_ if way == "unfused" else adam_step.adam_on_cpu_
    if way == "pieces":
        monkeypatch.setattr(adam_cpu, "compiled", dict)
        monkeypatch.setattr(adam_step, "CHUNK", 100)
    else:
        assert adam_cpu.compiled()
        monkeypatch.setattr(adam_cpu, "SMALL", 100)  # threads, although the tensors are small and CI gives us one
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)

    def update_(params, grads, exp_avgs, exp_avg_sqs, masters, step, *, inverse_scale, found_inf, **rule):
        if found_inf is None or not found_inf:
            tensors = [AdamTensors(*row) for row in zip(params, grads, exp_avgs, exp_avg_sqs, masters, strict=True)]
            rule_(tensors, step, AdamRule(**rule), inverse_scale)

    check(row, compare(row, update_, "cpu"))


COMPILE = """
import json, re
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torch_impl.kernels import adam

pointers = "*i64 *i64 *i32 *fp64 *fp32 *fp32 *fp32 *fp32 *fp32".split()
for param, grad, master in [("float32", "float32", 0), ("float32", "bfloat16", 0), ("bfloat16", "bfloat16", 1),
                            ("bfloat16", "bfloat16", 0), ("float16", "float16", 1), ("float16", "float16", 0)]:
    for aligned in (True, False):
        for flags in (dict(ADAM_W=True, CORRECT=True, SCALE=False, SKIP=False),
                      dict(ADAM_W=False, CORRECT=False, SCALE=True, SKIP=True)):
            constants = dict(PARAM=getattr(tl, param), GRAD=getattr(tl, grad), MASTER=bool(master), ALIGNED=aligned,
                             BLOCK=adam.BLOCK, **flags)
            names = adam.adam_kernel.arg_names
            signature = dict(zip(names, pointers + ["constexpr"] * len(constants)))
            kernel = compile(ASTSource(fn=adam.adam_kernel, signature=signature, constexprs=constants),
                             target=GPUTarget("cuda", 90, 32),
                             options=dict(num_warps=adam.NUM_WARPS, enable_fp_fusion=False))
            ptx = kernel.asm["ptx"]
            print(json.dumps(dict(name=f"{param}-{grad}-{master}-{aligned}-{flags['ADAM_W']}", master=master,
                aligned=aligned, cubin=len(kernel.asm["cubin"]), spills=".local" in ptx,
                loads=ptx.count("ld.global.v4.b32"), stores=ptx.count("st.global.v4.b32"), low=param != "float32")))
"""


def test_compiles_for_sm_90(tmp_path):
    """Every combination that the launcher uses makes machine code, with 16-byte accesses where addresses allow it."""
    lines = [json.loads(line) for line in python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines()]
    assert len(lines) == 24
    for line in lines:
        assert line["cubin"] > 1000, line
        assert not line["spills"], line
        # two loads and two stores a thread for every float32 array of 8 elements, one for 16-bit arrays
        arrays = 2 + (line["master"] or not line["low"])
        assert (line["loads"] >= 2 * arrays) == line["aligned"], line
        assert (line["stores"] >= 2 * arrays) == line["aligned"], line


def parameters(dtype: str, sizes: tuple[int, ...] = (5, 2048, 100_000)) -> list[torch.nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(n, generator=generator, device="cuda").to(getattr(torch, dtype))) for n in sizes
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_graph_is_eager_bit_for_bit(dtype):
    """20 steps with another lr and decay in each."""
    sides = []
    for captured in (False, True):
        params = parameters(dtype)
        optimizer = FusedAdam(params, lr=0.0, weight_decay=0.0)
        group = optimizer.param_groups[0]
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()  # makes state and tables; lr 0 moves nothing
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        generator = torch.Generator("cuda").manual_seed(1)
        for t in range(20):
            for p in params:
                p.grad.normal_(generator=generator)
            group["lr"].fill_(0.01 / (t + 1))
            group["weight_decay"].fill_(0.1 * t)
            graph.replay() if captured else optimizer.step()
        state = [optimizer.state[p] for p in params]
        sides.append([*params, *(x for own in state for x in own.values()), group["step"]])
    assert sides[0][-1] == sides[1][-1] == 21
    for eager, replayed in zip(*sides, strict=True):
        assert torch.equal(eager, replayed)


@pytest.mark.gpu
def test_a_billion_elements():
    """Every element of a constant gradient moves alike, at both ends of the 32-bit range and beyond."""
    p = torch.nn.Parameter(torch.ones(2**31 + 12345, dtype=torch.bfloat16, device="cuda"))
    p.grad = torch.full_like(p, 0.5)
    FusedAdam([p], lr=0.25).step()
    assert p.detach().eq(0.75).all()


@pytest.mark.gpu
def test_a_grad_scaler_skips_a_step_whole():
    params = parameters("float16")
    optimizer, scaler = FusedAdam(params, lr=0.1), torch.amp.GradScaler("cuda", init_scale=8.0)
    before = [p.detach().clone() for p in params]
    scaler.scale(sum((p.float() ** 2).sum() for p in params)).backward()
    params[0].grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert optimizer.param_groups[0]["step"] == 0
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
