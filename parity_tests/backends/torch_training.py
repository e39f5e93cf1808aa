"""The PyTorch half of a training pair: ``python -m parity_tests.backends.torch_training JOB.json``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_impl import build_lr_scheduler, build_optimizer

NORM_EPS = 1e-5


class Attention(nn.Module):
    """Causal multi-head self-attention without biases, (batch, time, width) to the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # written out: the fused attention kernels differ between devices and dtypes
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a tanh-approximated GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each behind its norm and added to the residual stream."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Token ids (batch, time) to logits (batch, time, vocab); arguments as in parity_tests.training.ModelShape."""

    def __init__(self, *, vocab: int, width: int, heads: int, blocks: int, context: int, mlp_ratio: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, mlp_ratio * width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def train(job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Train on the batches of ``job["inputs"]`` and return what training.TrainingResult is made of.

    Returns:
        "losses" [steps], "learning_rates" [steps, groups], "seconds" [steps], "snapshot_steps" [S],
        "snapshot/<name>" [S, ...] and "momentum/<name>" in float64, the name of the "device", the "routing" table.
    """
    device, dtype = torch.device(job["device"]), getattr(torch, job["dtype"])
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")  # no TF32
    with np.load(job["inputs"], allow_pickle=False) as inputs:
        weights = {name.removeprefix("weights/"): torch.from_numpy(inputs[name]) for name in inputs if "/" in name}
        batches = torch.from_numpy(inputs["batches"]).long().to(device)
    model = LanguageModel(**job["shape"]).to(device, dtype)
    model.load_state_dict(weights)
    optimizer = build_optimizer(model, job["optimizer_type"], **job["optimizer_kwargs"])
    scheduler = build_lr_scheduler(optimizer, job["schedule_type"], **job["schedule_kwargs"])

    losses, learning_rates, seconds, snapshot_steps = [], [], [], [0]
    snapshots = {name: [_float64(p)] for name, p in model.named_parameters()}
    parent = os.getppid()
    for step, batch in enumerate(batches, start=1):
        if os.getppid() != parent:
            raise SystemExit("the process that started this training is gone")
        learning_rates.append([float(lr) for lr in scheduler.get_last_lr()])
        started = time.perf_counter()
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        if step % job["snapshot_every"] == 0 or step == len(batches):
            snapshot_steps.append(step)
            for name, p in model.named_parameters():
                snapshots[name].append(_float64(p))
            print(step, flush=True)

    state = optimizer.state_dict()
    momentum = {name: state.get(f"state.{name}.momentum_buffer") for name in job["momentum_of"]}
    return {
        "losses": np.asarray(losses),
        "learning_rates": np.asarray(learning_rates),
        "seconds": np.asarray(seconds),
        "snapshot_steps": np.asarray(snapshot_steps),
        "device": np.asarray(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type),
        "routing": np.asarray(str(optimizer.describe())),
        **{f"snapshot/{name}": np.stack(values) for name, values in snapshots.items()},
        **{f"momentum/{name}": _float64(value) for name, value in momentum.items() if value is not None},
    }


def _float64(value: Tensor) -> np.ndarray:
    return value.detach().to("cpu", torch.float64, copy=True).numpy()


def main() -> None:
    """Read the job named on the command line, train, and write ``job["result"]`` (.npz)."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    np.savez(job["result"], allow_pickle=False, **train(job))


if __name__ == "__main__":
    main()
