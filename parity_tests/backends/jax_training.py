"""The Flax half of a training pair: ``python -m parity_tests.backends.jax_training JOB.json``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_impl import build_lr_schedule, build_optimizer, describe, learning_rates

NORM_EPSILON = 1e-5
TORCH_LEAF = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


class Attention(nnx.Module):
    """Causal multi-head self-attention without biases, (batch, time, width) to the same shape."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        self.heads = heads
        self.q = nnx.Linear(width, width, use_bias=False, **options)
        self.k = nnx.Linear(width, width, use_bias=False, **options)
        self.v = nnx.Linear(width, width, use_bias=False, **options)
        self.o = nnx.Linear(width, width, use_bias=False, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = self.q(x).reshape(split), self.k(x).reshape(split), self.v(x).reshape(split)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        causal = jnp.tril(jnp.ones((1, 1, *scores.shape[-2:]), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
        return self.o(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


class MLP(nnx.Module):
    """Two linear layers with a tanh-approximated GELU between them."""

    def __init__(self, width: int, hidden: int, **options: Any) -> None:
        self.up = nnx.Linear(width, hidden, **options)
        self.down = nnx.Linear(hidden, width, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """Attention and MLP, each behind its norm and added to the residual stream."""

    def __init__(self, width: int, heads: int, hidden: int, **options: Any) -> None:
        self.norm1 = _layer_norm(width, **options)
        self.attn = Attention(width, heads, **options)
        self.norm2 = _layer_norm(width, **options)
        self.mlp = MLP(width, hidden, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nnx.Module):
    """Token ids (batch, time) to logits (batch, time, vocab); sizes as in parity_tests.training.ModelShape."""

    def __init__(
        self, *, vocab: int, width: int, heads: int, blocks: int, context: int, mlp_ratio: int, **options: Any
    ) -> None:
        self.embed = nnx.Embed(vocab, width, **options)
        self.position = nnx.Embed(context, width, **options)
        self.blocks = nnx.List([Block(width, heads, mlp_ratio * width, **options) for _ in range(blocks)])
        self.norm = _layer_norm(width, **options)
        self.lm_head = nnx.Linear(width, vocab, use_bias=False, **options)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def _layer_norm(width: int, **options: Any) -> nnx.LayerNorm:
    # E[x^2] - E[x]^2, the default, cancels; PyTorch sums squared deviations
    return nnx.LayerNorm(width, epsilon=NORM_EPSILON, use_fast_variance=False, **options)


def _torch_name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, (*path[:-1], TORCH_LEAF[path[-1]])))


def build_model(shape: dict[str, int], weights: dict[str, np.ndarray], dtype: Any) -> LanguageModel:
    """The model with ``weights`` given in torch's names and layouts.

    Raises:
        ValueError: names or shapes that differ from the model's.
    """
    options = {"dtype": dtype, "param_dtype": dtype}
    abstract = nnx.eval_shape(lambda: LanguageModel(**shape, rngs=nnx.Rngs(0), **options))
    graphdef, params = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(params))
    names = {path: _torch_name(path) for path in flat}
    if set(names.values()) != set(weights):
        raise ValueError(f"names that only one side has: {sorted(set(names.values()) ^ set(weights))}")
    for path, variable in flat.items():
        value = weights[names[path]]
        value = value.T if path[-1] == "kernel" else value
        if value.shape != variable.shape:
            raise ValueError(f"{names[path]} has shape {value.shape}, the model needs {variable.shape}")
        flat[path] = variable.replace(jnp.asarray(value, dtype))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def torch_layout(model: LanguageModel) -> dict[str, np.ndarray]:
    """Parameters in torch's names and layouts, float64."""
    arrays = {
        path: np.asarray(variable[...], np.float64) for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    return {_torch_name(path): value.T if path[-1] == "kernel" else value for path, value in arrays.items()}


@nnx.jit
def train_step(model: LanguageModel, optimizer: nnx.Optimizer, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One update on ``batch``, int (batch, context + 1); returns its loss (0-D) and the lr of every group."""

    def loss_fn(model: LanguageModel) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()

    rates = jnp.stack(list(learning_rates(optimizer.opt_state).values()))
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss, rates


def train(job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Train on the batches of ``job["inputs"]`` and return what training.TrainingResult is made of.

    Returns:
        "losses" [steps], "learning_rates" [steps, groups], "seconds" [steps], "snapshot_steps" [S] and
        "snapshot/<name>" [S, ...] in float64, the name of the "device", and the "routing" table.
    """
    jax.config.update("jax_enable_x64", job["dtype"] == "float64")
    jax.config.update("jax_default_matmul_precision", "highest")
    with np.load(job["inputs"], allow_pickle=False) as inputs:
        weights = {name.removeprefix("weights/"): inputs[name] for name in inputs if "/" in name}
        batches = inputs["batches"]
    model = build_model(job["shape"], weights, jnp.dtype(job["dtype"]))
    lr_schedule = build_lr_schedule(job["schedule_type"], **job["schedule_kwargs"])
    params, optimizer_type, kwargs = nnx.state(model, nnx.Param), job["optimizer_type"], job["optimizer_kwargs"]
    tx = build_optimizer(params, optimizer_type, lr_schedule=lr_schedule, **kwargs)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    losses, rates, seconds, snapshot_steps, snapshots = [], [], [], [0], [torch_layout(model)]
    parent = os.getppid()
    for step, batch in enumerate(batches, start=1):
        if os.getppid() != parent:
            raise SystemExit("the process that started this training is gone")
        started = time.perf_counter()
        loss, rate = train_step(model, optimizer, batch)
        losses.append(float(loss))  # waits for the step
        seconds.append(time.perf_counter() - started)
        rates.append(rate)
        if step % job["snapshot_every"] == 0 or step == len(batches):
            snapshot_steps.append(step)
            snapshots.append(torch_layout(model))
            print(step, flush=True)

    return {
        "losses": np.asarray(losses),
        "learning_rates": np.asarray(rates, np.float64),
        "seconds": np.asarray(seconds),
        "snapshot_steps": np.asarray(snapshot_steps),
        "device": np.asarray(jax.devices()[0].device_kind),
        "routing": np.asarray(describe(params, optimizer_type, **kwargs)),
        **{f"snapshot/{name}": np.stack([values[name] for values in snapshots]) for name in weights},
    }


def main() -> None:
    """Read the job named on the command line, train, and write ``job["result"]`` (.npz)."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    np.savez(job["result"], allow_pickle=False, **train(job))


if __name__ == "__main__":
    main()
