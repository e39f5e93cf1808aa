"""A real training run in both frameworks at once: a small language model on English text, step by step.

Each framework runs in a process of its own (``parity_tests.backends.torch_training`` and ``jax_training``) on one
compute thread. Both start from the same weights and see the same batches; nothing else passes between them.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from parity_tests.processes import BACKENDS, Progress, run_processes
from parity_tests.tolerances import TRAINING_FLOAT32_START, TRAINING_FLOAT64, Tolerance

DTYPES = ("float64", "float32")
MOMENTUM_OF = ("blocks.0.attn.q.weight", "blocks.1.mlp.up.weight")


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with learned positions and an untied head."""

    vocab: int
    """Number of token ids."""
    width: int = 64
    """Size of the residual stream; a multiple of ``heads``."""
    heads: int = 4
    blocks: int = 2
    context: int = 64
    """Tokens that one prediction can see."""
    mlp_ratio: int = 4
    """Hidden units of the MLP per unit of ``width``."""


@dataclass(frozen=True)
class TrainingRun:
    """One optimizer with one schedule, as build_optimizer and the schedule builders of both sides take them."""

    name: str
    optimizer_type: str
    optimizer_kwargs: Mapping[str, Any]
    """Keywords of build_optimizer, without ``ns_dtype``: that is the dtype of the run."""
    schedule_type: str
    schedule_kwargs: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """What two trainings did: S snapshots, N parameter tensors, G groups. "Both" stands for {"torch": _, "jax": _}."""

    run: TrainingRun
    dtype: str
    """Of parameters, moments and Newton-Schulz: "float64" or "float32"."""
    shape: ModelShape
    devices: dict[str, str]
    """Both: what it computed on."""
    losses: dict[str, np.ndarray]
    """Both: float64 [steps], mean cross entropy before each update, nats per token."""
    loss_difference: np.ndarray
    """float64 [steps], |torch - jax|."""
    learning_rates: dict[str, np.ndarray]
    """Both: float64 [steps, G], lr that each update used; groups in the order of the routing table."""
    snapshot_steps: np.ndarray
    """int [S], updates done at each snapshot; the first is 0, the last is the number of steps."""
    names: tuple[str, ...]
    """Names of the N tensors in torch's naming."""
    tensor_distances: np.ndarray
    """float64 [S, N], ||torch - jax|| / max(||torch||, ||jax||), Frobenius; 0 where both are zero."""
    worst_distance: np.ndarray
    """float64 [S], the largest of ``tensor_distances``."""
    total_distance: np.ndarray
    """float64 [S], the same distance of all parameters taken as one vector."""
    routing: dict[str, str]
    """Both: the printed routing table."""
    momentum: dict[str, np.ndarray]
    """{name: float64 (out, in)}, torch's final ``momentum_buffer`` of MOMENTUM_OF; empty without Muon."""
    seconds_per_step: dict[str, float]
    """Both: median wall time of a step, the two side by side; information only."""
    wall_seconds: float
    """From the start of the processes to the end of both, imports and compilation included."""

    @property
    def final_distance(self) -> float:
        """Relative distance of all parameters after the last step."""
        return float(self.total_distance[-1])

    @property
    def tolerance(self) -> Tolerance:
        """float64 must end at the same place; float32 must start there, and may show its chaos later."""
        return TRAINING_FLOAT64 if self.dtype == "float64" else TRAINING_FLOAT32_START

    @property
    def limits(self) -> np.ndarray:
        """float64 [S], allowed ``total_distance`` at every snapshot; infinite where float32 may drift."""
        limits = np.full(len(self.snapshot_steps), self.tolerance.value)
        if self.dtype != "float64":
            limits[2:] = np.inf
        return limits

    @property
    def passed(self) -> bool:
        return bool((np.isfinite(self.total_distance) & (self.total_distance <= self.limits)).all())


def corpus() -> np.ndarray:
    """Python's own help texts as token ids, int32 [characters]: the rank of each character among those that occur.

    The text is English prose and code, about 460,000 characters of about 100 kinds; it differs between Python
    versions, so compare only runs of one interpreter.
    """
    text = "".join(topics[topic] for topic in sorted(topics))
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return np.unique(points, return_inverse=True)[1].astype(np.int32)


def initial_weights(shape: ModelShape, seed: int) -> dict[str, np.ndarray]:
    """Weights in torch's names and layouts, matrices (out, in).

    Returns:
        float64 arrays of float32 values, so that both dtypes start from the same numbers. Matrices and embeddings
        are normal with deviation 0.02, those that write to the residual stream 0.02 / sqrt(2 blocks), as in GPT-2.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}

    def normal(name: str, *size: int, std: float = 0.02) -> None:
        weights[name] = (std * rng.standard_normal(size)).astype(np.float32).astype(np.float64)

    def norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = np.ones(shape.width), np.zeros(shape.width)

    residual_std = 0.02 / math.sqrt(2 * shape.blocks)
    hidden = shape.mlp_ratio * shape.width
    normal("embed.weight", shape.vocab, shape.width)
    normal("position.weight", shape.context, shape.width)
    for block in (f"blocks.{i}" for i in range(shape.blocks)):
        norm(f"{block}.norm1")
        for matrix in "qkv":
            normal(f"{block}.attn.{matrix}.weight", shape.width, shape.width)
        normal(f"{block}.attn.o.weight", shape.width, shape.width, std=residual_std)
        norm(f"{block}.norm2")
        normal(f"{block}.mlp.up.weight", hidden, shape.width)
        weights[f"{block}.mlp.up.bias"] = np.zeros(hidden)
        normal(f"{block}.mlp.down.weight", shape.width, hidden, std=residual_std)
        weights[f"{block}.mlp.down.bias"] = np.zeros(shape.width)
    norm("norm")
    normal("lm_head.weight", shape.vocab, shape.width)
    return weights


def batches(tokens: np.ndarray, shape: ModelShape, batch_size: int, steps: int, seed: int) -> np.ndarray:
    """Random windows of ``tokens``, int32 [steps, batch_size, context + 1]; inputs are [..., :-1], targets [..., 1:].

    Raises:
        ValueError: fewer tokens than one window needs.
    """
    window = shape.context + 1
    if len(tokens) < window:
        raise ValueError(f"a window takes {window} tokens, got {len(tokens)}")
    starts = np.random.default_rng(seed).integers(0, len(tokens) - window + 1, (steps, batch_size, 1))
    return tokens[starts + np.arange(window)].astype(np.int32)


def runs(steps: int) -> tuple[TrainingRun, TrainingRun]:
    """The two trainings, their schedules scaled to ``steps`` updates."""
    optimizer_kwargs = {
        "lr": 5e-3,
        "fused": True,
        "weight_decay": 0.1,
        "disable_weight_decay_for_1d_params": True,
        # with its dot, as Flax ends the name of every table in "embedding" and the positions must not match
        "lr_multipliers": {"embed.": 2.0},
    }
    f = {"f_start": 0.05, "f_max": 1.0, "f_min": 0.02}
    wsd = {"warm_up_steps": steps // 10, "total_steps": steps, "decay_steps": steps // 4, **f}
    cosine = {"warm_up_steps": [steps // 10], "cycle_lengths": [steps], **{name: [value] for name, value in f.items()}}
    return (
        TrainingRun("muonwithauxadamw + wsd", "muonwithauxadamw", optimizer_kwargs, "wsd", wsd),
        TrainingRun(
            "adamw + lambdacosine", "adamw", {**optimizer_kwargs, "betas": [0.9, 0.95]}, "lambdacosine", cosine
        ),
    )


def run_pair(
    run: TrainingRun,
    dtype: str,
    steps: int,
    device: str = "cpu",
    out_dir: str | Path | None = None,
    *,
    shape: ModelShape | None = None,
    batch_size: int = 8,
    snapshot_every: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> TrainingResult:
    """Train the same model in PyTorch and in Flax, at the same time, and compare the two.

    Args:
        run: one of ``runs(steps)``.
        dtype: "float64" or "float32".
        steps: number of updates, at least 1.
        device: "cpu" for both, or "cuda" for PyTorch and JAX's default device.
        out_dir: jobs, inputs, logs and raw results are left here; None for a temporary folder that is removed.
        shape: of the model; None for the defaults of ModelShape with the vocabulary of ``corpus()``.
        batch_size: windows per step.
        snapshot_every: updates between two snapshots of the parameters.
        seed: of weights and batches.
        progress: told whenever a framework has reached another snapshot.

    Raises:
        ValueError: ``dtype``, ``steps`` or ``snapshot_every`` out of range.
        RuntimeError: a training failed; the message ends with the end of its stderr. The other one is killed, as
            both are when the caller is interrupted.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype!r}")
    if steps < 1 or snapshot_every < 1:
        raise ValueError(f"steps and snapshot_every must be at least 1, got {steps!r} and {snapshot_every!r}")
    tokens = corpus()
    shape = shape or ModelShape(vocab=int(tokens.max()) + 1)
    with ExitStack() as stack:
        folder = Path(out_dir or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"{run.optimizer_type}-{dtype}"
        inputs = {f"weights/{name}": value for name, value in initial_weights(shape, seed).items()}
        inputs["batches"] = batches(tokens, shape, batch_size, steps, seed + 1)
        np.savez(f"{stem}-inputs.npz", allow_pickle=False, **inputs)
        job = {
            **asdict(run),
            "shape": asdict(shape),
            "dtype": dtype,
            "device": device,
            "snapshot_every": snapshot_every,
            "momentum_of": MOMENTUM_OF,
            "inputs": f"{stem}-inputs.npz",
        }
        if run.optimizer_type == "muonwithauxadamw":
            job["optimizer_kwargs"] = {**run.optimizer_kwargs, "ns_dtype": dtype}
        started = time.perf_counter()
        run_processes(job, stem, steps, progress)
        wall_seconds = time.perf_counter() - started
        results = {framework: _load(f"{stem}-{framework}.npz") for framework in BACKENDS}
    return _compare(run, dtype, shape, results, wall_seconds)


def _load(path: str) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _compare(
    run: TrainingRun, dtype: str, shape: ModelShape, results: dict[str, dict[str, np.ndarray]], wall_seconds: float
) -> TrainingResult:
    torch, jax = results["torch"], results["jax"]
    keys = [key for key in torch if key.startswith("snapshot/")]
    assert sorted(keys) == sorted(key for key in jax if key.startswith("snapshot/"))

    def squares(value: np.ndarray) -> np.ndarray:
        return np.square(value).reshape(len(value), -1).sum(axis=1)

    # each [S, N]: squared norms of the difference and of both sides
    difference = np.stack([squares(torch[key] - jax[key]) for key in keys], axis=1)
    norms = [np.stack([squares(side[key]) for key in keys], axis=1) for side in (torch, jax)]
    tensor_distances = _relative(difference, *norms)
    return TrainingResult(
        run=run,
        dtype=dtype,
        shape=shape,
        devices={framework: str(result["device"]) for framework, result in results.items()},
        losses={framework: result["losses"] for framework, result in results.items()},
        loss_difference=np.abs(torch["losses"] - jax["losses"]),
        learning_rates={framework: result["learning_rates"] for framework, result in results.items()},
        snapshot_steps=torch["snapshot_steps"],
        names=tuple(key.removeprefix("snapshot/") for key in keys),
        tensor_distances=tensor_distances,
        worst_distance=tensor_distances.max(axis=1),
        total_distance=_relative(difference.sum(axis=1), *(norm.sum(axis=1) for norm in norms)),
        routing={framework: str(result["routing"]) for framework, result in results.items()},
        momentum={key.removeprefix("momentum/"): value for key, value in torch.items() if key.startswith("momentum/")},
        seconds_per_step={framework: float(np.median(result["seconds"])) for framework, result in results.items()},
        wall_seconds=wall_seconds,
    )


def _relative(difference: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """sqrt(difference / max(left, right)) of squared norms; 0 where both sides are zero."""
    largest = np.maximum(left, right)
    return np.sqrt(difference / np.where(largest == 0, 1.0, largest))
