"""Small models and gradient streams, defined once for all sides; names and layouts are torch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]


class Parameter(NamedTuple):
    """One parameter: ``kind`` is "linear", "embedding", "norm", "bias" or "raw" after the module that owns it."""

    name: str
    shape: tuple[int, ...]
    kind: str


def parameters_of(name: str, kind: str, *args: int) -> list[Parameter]:
    """Parameters of one module in definition order.

    ``kind`` and ``args``: Linear(in, out, bias), Embedding(count, width), LayerNorm(width), Param(*shape).
    """
    if kind == "Linear":
        fan_in, fan_out, bias = args
        weight = Parameter(f"{name}.weight", (fan_out, fan_in), "linear")
        return [weight, Parameter(f"{name}.bias", (fan_out,), "bias")] if bias else [weight]
    if kind == "Embedding":
        return [Parameter(f"{name}.weight", (args[0], args[1]), "embedding")]
    if kind == "LayerNorm":
        return [Parameter(f"{name}.weight", (args[0],), "norm"), Parameter(f"{name}.bias", (args[0],), "bias")]
    if kind == "Param":
        return [Parameter(name, tuple(args), "raw")]
    raise ValueError(f"unknown module kind {kind!r}")


@dataclass(frozen=True)
class Problem:
    """A model without a forward pass, and a stream of gradients.

    Attributes:
        modules: (dotted name, kind, *args), see parameters_of.
        gradients: {substring of a name: kind}, kinds see _gradient; the first match, else gaussian.
        none_at: {name: steps (0-based) at which its gradient is None}.
        zero_at: {name: steps at which its gradient is zero}.
        idle_experts: {name: {step: experts whose slice is zero}}.
        tied: {alias: name}, parameters that share a tensor; only ``name`` is listed.
        frozen: names that are not trained; not listed.
        seed: of values and gradients.
    """

    modules: tuple[tuple, ...]
    gradients: Mapping[str, str] = field(default_factory=dict)
    none_at: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    zero_at: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    idle_experts: Mapping[str, Mapping[int, tuple[int, ...]]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    seed: int = 0

    @property
    def parameters(self) -> list[Parameter]:
        """Trainable parameters, each once."""
        every = [parameter for module in self.modules for parameter in parameters_of(*module)]
        return [p for p in every if p.name not in self.tied and p.name not in self.frozen]

    def initial(self) -> Arrays:
        """Start values, float64, exactly representable in bfloat16 so that every tier starts at the same place."""
        rng = np.random.default_rng(self.seed)
        return {p.name: to_bfloat16(rng.normal(0, 0.5, p.shape)) for p in self.parameters}

    def gradient_stream(self, steps: int) -> Iterator[dict[str, np.ndarray | None]]:
        """Gradients of step 0, 1, ..., representable in bfloat16; None where a parameter has none."""
        rng = np.random.default_rng(self.seed + 1)
        for t in range(steps):
            grads: dict[str, np.ndarray | None] = {}
            for p in self.parameters:
                kind = next((kind for key, kind in self.gradients.items() if key in p.name), "gaussian")
                g = to_bfloat16(_gradient(rng, kind, p.shape, t))
                for expert in self.idle_experts.get(p.name, {}).get(t, ()):
                    g[expert] = 0.0
                if t in self.zero_at.get(p.name, ()):
                    g = np.zeros_like(g)
                grads[p.name] = None if t in self.none_at.get(p.name, ()) else g
            yield grads


def _gradient(rng: np.random.Generator, kind: str, shape: tuple[int, ...], t: int) -> np.ndarray:
    match kind:
        case "gaussian":
            return rng.normal(0, 0.1, shape)
        case "rank1":
            return rng.normal(0, 0.3, (*shape[:-1], 1)) * rng.normal(0, 0.3, (*shape[:-2], 1, shape[-1]))
        case "tiny":
            return rng.normal(0, 1e-9, shape)
        case "large":
            return rng.normal(0, 1e3, shape)
        case "growing":
            return rng.normal(0, 0.01 * 1.1**t, shape)
    raise ValueError(f"unknown gradient kind {kind!r}")


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16 (ties to even) and back to float64."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


PROBLEMS: dict[str, Problem] = {
    # every kind of parameter once; wide, tall and odd matrices
    "mlp": Problem(
        modules=(
            ("embed", "Embedding", 11, 6),
            ("up", "Linear", 6, 16, True),
            ("norm", "LayerNorm", 16),
            ("down", "Linear", 16, 6, False),
            ("lm_head", "Linear", 6, 11, False),
        ),
        seed=100,
    ),
    # primes, squares, a row, a column, a scalar, raw matrices
    "shapes": Problem(
        modules=(
            ("square", "Linear", 7, 7, False),
            ("tall", "Linear", 5, 13, False),
            ("wide", "Linear", 13, 5, False),
            ("row", "Linear", 7, 1, True),
            ("column", "Linear", 1, 7, False),
            ("table", "Param", 3, 4),
            ("scale", "Param"),
        ),
        seed=200,
    ),
    # gradients that come late, stop, are zero for a while, are missing in the first steps
    "gaps": Problem(
        modules=(("late", "Linear", 6, 8, True), ("early", "Linear", 8, 6, True), ("norm", "LayerNorm", 6)),
        none_at={
            "late.weight": (0, 1, 2),
            "early.bias": (0, 4, 5),
            "norm.weight": (3, 4),
            "early.weight": (6,),
        },
        zero_at={"late.bias": (0, 1), "early.weight": (2, 3)},
        seed=300,
    ),
    "hard": Problem(
        modules=(
            ("rank1", "Linear", 8, 12, False),
            ("tiny", "Linear", 8, 12, False),
            ("growing", "Linear", 12, 8, False),
            ("tiny_norm", "LayerNorm", 8),
        ),
        gradients={"rank1": "rank1", "tiny": "tiny", "growing": "growing"},
        seed=400,
    ),
    "experts": Problem(
        modules=(
            ("router", "Linear", 6, 4, False),
            ("experts.up", "Param", 4, 6, 10),
            ("experts.down", "Param", 4, 5, 6),
        ),
        idle_experts={"experts.up": {0: (2,), 1: (2,), 4: (0, 1), 6: (0, 1, 2, 3)}, "experts.down": {3: (1, 3)}},
        seed=500,
    ),
}
