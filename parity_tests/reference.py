"""The third voice: every equation once more, in NumPy float64, slow and readable. One function an equation.

Matrices are (fan_out, fan_in), stacks of experts (E, fan_out, fan_in). Nothing is modified in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Array = np.ndarray


# --- schedules: multiplier of the base lr after n updates ------------------------------------------------------------


def anneal(x: float, f_from: float, f_to: float, decay_type: str) -> float:
    """Weight of ``f_from``: 1 at x = 0, 0 at x = 1."""
    weights = {
        "linear": 1 - x,
        "cosine": 0.5 * (1 + math.cos(math.pi * x)),
        "exponential": 2 ** (1 - x) - 1,
        "minus_sqrt": 1 - max(x, 0) ** 0.5,
    }
    weight = weights[decay_type]
    return f_from * weight + f_to * (1 - weight)


def cyclic(
    n: float,
    decay_type: str,
    *,
    warm_up_steps: Sequence[float],
    f_start: Sequence[float],
    f_max: Sequence[float],
    f_min: Sequence[float],
    cycle_lengths: Sequence[float],
) -> float:
    """Cycle c covers start < n <= start + length; past the last cycle its end value is held."""
    ends = np.cumsum(cycle_lengths, dtype=float)
    n = min(n, ends[-1])
    c = int(np.searchsorted(ends, n, side="left"))
    m = n - (ends[c] - cycle_lengths[c])
    w, length = warm_up_steps[c], cycle_lengths[c]
    if w > 0 and (m < w or w >= length):
        return f_start[c] + (f_max[c] - f_start[c]) * m / w
    return anneal((m - w) / (length - w), f_max[c], f_min[c], decay_type) if length > w else f_max[c]


def wsd(
    n: float,
    *,
    warm_up_steps: float,
    total_steps: float,
    decay_steps: float,
    f_start: float,
    f_max: float,
    f_min: float,
    decay_type: str = "cosine",
    f_cooldown_start: float | None = None,
) -> float:
    """Warm-up, stable (or slowly falling to ``f_cooldown_start``), decay."""
    cooldown = f_max if f_cooldown_start is None else f_cooldown_start
    fast = total_steps - decay_steps
    if n < warm_up_steps:
        return f_start + (f_max - f_start) * n / warm_up_steps
    if n < fast:
        return anneal((n - warm_up_steps) / (fast - warm_up_steps), f_max, cooldown, "linear")
    return anneal((n - fast) / decay_steps, cooldown, f_min, decay_type) if n < total_steps else f_min


def multiplier(n: float, lr_scheduler_type: str | None, kwargs: Mapping) -> float:
    """f(n) of any schedule; 1 without one. Of the annealer, its lr or decay itself."""
    if lr_scheduler_type is None:
        return 1.0
    if lr_scheduler_type.startswith("annealed"):
        return (annealed_lr if lr_scheduler_type.endswith("lr") else annealed_wd)(n, **kwargs)
    if lr_scheduler_type.startswith("lambda"):
        return cyclic(n, lr_scheduler_type.removeprefix("lambda"), **kwargs)
    return wsd(n, **kwargs)


# --- annealer: lr and weight decay after s steps, of a group whose factors are 1 -------------------------------------


def annealed_lr(
    s: float,
    *,
    init_lr: float,
    max_lr: float,
    min_lr: float,
    lr_warmup_steps: float,
    lr_decay_steps: float,
    lr_decay_style: str,
    wsd_decay_steps: float = 0,
    lr_wsd_decay_style: str = "linear",
    **_of_the_decay: object,
) -> float:
    """The warm-up includes its last step, and so does the decay."""
    w, end = lr_warmup_steps, lr_decay_steps
    if w > 0 and s <= w:
        return anneal(s / w, init_lr, max_lr, "linear")
    if lr_decay_style == "constant" or s > end:
        return max_lr if lr_decay_style == "constant" else min_lr
    if lr_decay_style == "inverse-square-root":
        return max(min_lr, max_lr * math.sqrt(max(w, 1) / max(s, 1)))
    if lr_decay_style == "WSD":
        late = max(0, s - (end - wsd_decay_steps))
        return anneal(late / (wsd_decay_steps or 1), max_lr, min_lr, lr_wsd_decay_style)
    return anneal((s - w) / (end - w), max_lr, min_lr, lr_decay_style)


def annealed_wd(
    s: float, *, start_wd: float, end_wd: float, wd_incr_steps: float, wd_incr_style: str, **_of_the_lr: object
) -> float:
    if wd_incr_style == "constant":
        return end_wd
    return anneal(min(s / wd_incr_steps, 1), start_wd, end_wd, wd_incr_style)


# --- selection, groups, roles ----------------------------------------------------------------------------------------


def is_selected(name: str, keys_to_select: Sequence[str]) -> bool:
    return not keys_to_select or any(key in name for key in keys_to_select)


def base_lr(name: str, lr: float, lr_multipliers: Mapping[str, float]) -> float:
    """First key, in insertion order, that is a substring of the name."""
    for key, factor in lr_multipliers.items():
        if key in name:
            return lr * factor
    return lr


def decay_of(ndim: int, weight_decay: float, disable_weight_decay_for_1d_params: bool) -> float:
    return 0.0 if ndim < 2 and disable_weight_decay_for_1d_params else weight_decay


def role_of(
    name: str,
    kind: str,
    ndim: int,
    *,
    expert_param_keywords: Sequence[str] = (),
    adamw_module_keywords: Sequence[str] = ("lm_head", "embed_out", "output_layer"),
    orthogonalize_skip_patterns: Sequence[str] = (),
) -> str:
    """``kind`` says what owns the parameter: "linear" for the matrix of a dense layer that is no embedding's too."""
    module = name.rpartition(".")[0]
    if any(re.search(pattern, name) for pattern in orthogonalize_skip_patterns):
        return "adamw"
    if kind == "linear":
        return "adamw" if any(key in module for key in adamw_module_keywords) else "matrix"
    if kind == "raw" and ndim == 3 and any(key in name for key in expert_param_keywords):
        return "expert"
    return "adamw"


# --- update rules ----------------------------------------------------------------------------------------------------


def first_moment(m: Array, g: Array, b1: float) -> Array:
    return b1 * m + (1 - b1) * g


def second_moment(v: Array, g: Array, b2: float) -> Array:
    return b2 * v + (1 - b2) * g * g


def adam_direction(m: Array, v: Array, t: float, betas: Sequence[float], eps: float) -> Array:
    """t is 1-based, infinite for no bias correction; eps stands outside the root."""
    m_hat = m / (1 - betas[0] ** t)
    v_hat = v / (1 - betas[1] ** t)
    return m_hat / (np.sqrt(v_hat) + eps)


def momentum(M: Array, g: Array, mu: float) -> Array:
    """A sum, not an average."""
    return mu * M + g


def nesterov_direction(M: Array, g: Array, mu: float, nesterov: bool) -> Array:
    return g + mu * M if nesterov else M


def newton_schulz(
    G: Array, steps: int = 5, coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315), eps: float = 1e-7
) -> Array:
    """On each matrix of (..., fan_out, fan_in), the Frobenius norm to one and then the quintic ``steps`` times."""
    if G.shape[-2] > G.shape[-1]:
        return newton_schulz(G.swapaxes(-1, -2), steps, coefficients, eps).swapaxes(-1, -2)
    a, b, c = coefficients
    X = G / (np.sqrt((G * G).sum(axis=(-2, -1), keepdims=True)) + eps)
    for _ in range(steps):
        A = X @ X.swapaxes(-1, -2)
        X = a * X + (b * A + c * A @ A) @ X
    return X


def newton_schulz_exact(G: Array, steps: int = 5, eps: float = 1e-7) -> Array:
    """The same by singular values: U f(S) V^T. Another road to the same place, for tests of newton_schulz."""
    a, b, c = 3.4445, -4.7750, 2.0315
    U, s, Vt = np.linalg.svd(G, full_matrices=False)
    s = s / (np.sqrt((s * s).sum(axis=-1, keepdims=True)) + eps)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return (U * s[..., None, :]) @ Vt


def adjusted_lr(lr: float, shape: Sequence[int], muon_lr_scale: float) -> float:
    return lr * muon_lr_scale * math.sqrt(max(shape[-2:]))


def active_experts(g: Array) -> Array:
    """(E, 1, 1): False where an expert's gradient is exactly zero, which leaves its weight and momentum alone."""
    return np.any(g != 0, axis=(1, 2), keepdims=True)


def descend(p: Array, direction: Array, lr: float, weight_decay: float, scaled_lr: float | None = None) -> Array:
    """p (1 - lr weight_decay) - scaled_lr direction: the decay uses the unscaled lr and the old p."""
    return p * (1 - lr * weight_decay) - (lr if scaled_lr is None else scaled_lr) * direction
