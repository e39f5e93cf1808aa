"""Precision tiers, how two values are compared in each, and how far they may be apart and why."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from parity_tests.backends.base import Precision

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}  # spacing of the numbers at 1


class Tolerance(NamedTuple):
    """A bound on an error, and why it is where it is."""

    name: str
    value: float
    reason: str


class Tier(NamedTuple):
    """A precision and the modes in which it is asserted.

    Attributes:
        name: "float64", "float32" or "bfloat16".
        precision: dtypes of the run.
        modes: "free" goes on from its own results; "forced" starts every step from the reference's.
    """

    name: str
    precision: Precision
    modes: tuple[str, ...]


TIERS = {
    "float64": Tier("float64", Precision("float64", "float64"), ("free", "forced")),
    # free-running float32 drifts apart as any two float32 runs do; it would say nothing about the algorithm
    "float32": Tier("float32", Precision("float32", "float32"), ("forced",)),
    "bfloat16": Tier("bfloat16", Precision("bfloat16", "bfloat16"), ("forced",)),
}

FLOAT64 = Tolerance(
    "float64", 1e-10, "the same algorithm in float64; about 1e-14 is usual, 1e-10 allows 100 steps of growth"
)
FLOAT32 = Tolerance(
    "float32", 1e-5, "rounding of float32 through five Newton-Schulz steps on a well-conditioned matrix"
)
FLOAT32_SINGULAR = Tolerance(
    "float32-singular",
    1e-3,
    "five Newton-Schulz steps amplify rounding in null directions by 3.4445^5 = 485; singular values below 1e-3 of "
    "the largest count as null",
)
BFLOAT16_ROUNDING = Tolerance(
    "bfloat16-rounding",
    2.0**-8 + 1e-5,
    "float32 arithmetic (1e-5), rounded once to bfloat16: half a unit is 2^-8 at worst",
)
BFLOAT16_ROUNDING_PAIR = Tolerance(
    "bfloat16-rounding-pair", 2.0**-7 + 2e-5, "both sides within half a bfloat16 unit of float64: a whole unit apart"
)
BFLOAT16_BLOCK = Tolerance(
    "bfloat16-block",
    0.1,
    "bfloat16 Newton-Schulz in the singular basis of its input, where singular values exceed 1e-2 of the largest; "
    "entries outside are rounding noise",
)
BFLOAT16_PAIR = BFLOAT16_BLOCK._replace(name="bfloat16-pair", value=0.2, reason="both sides within 0.1 of float64")
BFLOAT16_RATIO = Tolerance("bfloat16-ratio", 1.5, "neither side's bfloat16 error may exceed 1.5 times the other's")
LR_FLOAT64 = Tolerance("lr-float64", 1e-12, "relative to the peak; one formula in float64")
LR_FLOAT32 = Tolerance(
    "lr-float32", 2e-7, "relative to the peak: 1 + cos cancels near the end, so relative to the value means nothing"
)
TRAINING_FLOAT64 = Tolerance(
    "training-float64",
    1e-9,
    "relative, all parameters after 200 steps of a real model; rounding alone gives about 1e-14",
)
TRAINING_FLOAT32_START = Tolerance(
    "training-float32-start",
    1e-4,
    "relative, all parameters at the first snapshot: drift has only begun, 1e-6 is usual",
)
EXACT = Tolerance("exact", 0.0, "step counts are integers, and what is not optimized does not move")
SAME_PARAMETERS = Tolerance("same-parameters", 0.0, "both sides optimize the same parameters")
ROUNDED_MASTER = Tolerance("rounded-master", 0.0, "a low-precision parameter is its master, rounded, in every entry")

FLOOR_ULPS = 4  # an update taken by subtraction carries the rounding of both ends


def update_floor(tier: str, p: np.ndarray, update: np.ndarray) -> float:
    """eps ||p|| / ||dp||: what taking dp by subtraction costs, relative to dp; eps ||p|| where dp is zero."""
    return FLOOR_ULPS * EPS[tier] * float(np.linalg.norm(p)) / (float(np.linalg.norm(update)) or 1.0)


def relative_error(left: np.ndarray, right: np.ndarray) -> float:
    """||left - right||_F / ||right||_F; absolute where right is zero, infinite where a value is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = float(np.linalg.norm(left - right))
    if not np.isfinite(difference):
        return np.inf
    return difference / (float(np.linalg.norm(right)) or 1.0) if difference else 0.0


def elementwise_error(left: np.ndarray, right: np.ndarray) -> float:
    """Largest |left - right| / |right|, where values below 1e-4 of the largest count as that."""
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return np.inf
    scale = np.maximum(np.abs(right), 1e-4 * np.abs(right).max(initial=0.0))
    return float(np.max(np.abs(left - right) / np.maximum(scale, 1e-300), initial=0.0))


def block_error(left: np.ndarray, right: np.ndarray, direction: np.ndarray) -> float:
    """Largest difference in the singular basis of ``direction``, on its singular values above 1e-2 of the largest.

    All arguments (..., M, N). Slices whose direction is zero are skipped.
    """
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return np.inf
    worst = 0.0
    shape = (-1, *direction.shape[-2:])
    for x, y, G in zip(left.reshape(shape), right.reshape(shape), direction.reshape(shape), strict=True):
        U, s, Vt = np.linalg.svd(G, full_matrices=False)
        if s[0] > 0:
            kept = s > 1e-2 * s[0]
            worst = max(worst, float(np.abs(U[:, kept].T @ (x - y) @ Vt[kept].T).max()))
    return worst


def is_singular(direction: np.ndarray) -> bool:
    """Whether any matrix of (..., M, N) has singular values below 1e-3 of its largest."""
    s = np.linalg.svd(direction, compute_uv=False)
    return bool(np.any(s[..., -1] < 1e-3 * s[..., 0]))
