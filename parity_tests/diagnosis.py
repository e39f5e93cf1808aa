"""Where one update went wrong, from its result alone: no access to the code that made it.

Given where an update started and where it ended, the oracle recomputes every stage. The state is compared first,
as it is visible. What is left shows in the update dp alone, and each stage leaves its own trace there:

    learning rate    dp' is a multiple of dp as a whole, decay included
    decay            dp' - dp is a multiple of p; or dp' without decay is (1 - lr weight_decay) times what it should be
    scale            dp' without decay is another multiple of it
    newton-schulz    the singular vectors are right, the singular values are not; or the result is transposed
    nesterov         the singular vectors belong to another matrix
    denominator      Adam's counterpart of the last two: moments are right, their quotient is not
    apply            something else happened between the direction and the parameter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from parity_tests import reference
from parity_tests.backends.base import Arrays, Record
from parity_tests.backends.reference_backend import ReferenceRun, Stages
from parity_tests.tolerances import relative_error

NORM_EPS = 1e-7  # of Newton-Schulz
EXPLAINED = 1e-2  # a hypothesis holds when it leaves less than this of the difference unexplained


class Finding(NamedTuple):
    """The first stage that differs.

    Attributes:
        stage: see the module's text; also "routing", "momentum", "first moment", "second moment", "step count".
        note: what is known beyond that.
        found, expected: the values of that stage.
    """

    stage: str
    note: str
    found: np.ndarray
    expected: np.ndarray


STATE_STAGES = {
    "step": "step count",
    "momentum_buffer": "momentum",
    "exp_avg": "first moment",
    "exp_avg_sq": "second moment",
}


def diagnose(
    run: ReferenceRun,
    name: str,
    before: np.ndarray,
    state_before: Arrays,
    record: Record,
    grad: np.ndarray | None,
    updates_done: int,
    is_close: Callable[[np.ndarray, np.ndarray], bool],
) -> Finding:
    """The first stage at which ``record`` departs from one update of the oracle.

    Args:
        run: knows the rules of the case; its own position does not matter.
        name: of the tensor.
        before, state_before: parameter (or master) and state from which the suspect started this update.
        record: of the suspect after it.
        grad: gradient, or None.
        updates_done: before this update.
        is_close: tolerance of the tier for states.
    """
    update = record.updates[name]
    if (name in run.roles) != (name in record.state):
        verb = "not optimized" if name in run.roles else "optimized"
        return Finding("routing", f"{verb} here", update, np.zeros_like(update))
    expected_keys = set(state_before)
    if expected_keys - set(record.state[name]):
        return Finding("routing", f"role {run.roles[name]!r} was expected", update, np.zeros_like(update))
    lr, lr_found = run.lr(name, updates_done), record.learning_rates[name]
    if not is_close(np.asarray(lr_found), np.asarray(lr)):
        return Finding("learning rate", "the schedule gives another value", np.asarray(lr_found), np.asarray(lr))
    if grad is None:
        return Finding("no gradient", "a parameter without a gradient must not change", update, np.zeros_like(update))
    stages = run.stages(name, before, state_before, grad, updates_done)
    for key, expected in stages.state.items():
        if not is_close(record.state[name][key], expected):
            return Finding(STATE_STAGES[key], f"{key} differs after the update", record.state[name][key], expected)
    return _diagnose_update(update, stages, run.options.get("ns_steps", 0))


def _diagnose_update(found: np.ndarray, stages: Stages, ns_steps: int) -> Finding:
    p, lr, decay = stages.before, stages.lr, stages.decay
    expected = stages.after - p

    def finding(stage: str, note: str) -> Finding:
        return Finding(stage, note, found, expected)

    broken = ~np.isfinite(found)
    if broken.any():
        everywhere = stages.direction is not None and broken.all(axis=(-2, -1)).any()
        stage = "newton-schulz" if everywhere else "apply"
        return finding(stage, f"{broken.sum()} of {broken.size} entries are not finite; the state is")
    if not found.any():
        return finding("apply", "the parameter did not move; its state did")
    if stages.active is not None and np.any(np.where(stages.active, 0.0, found)):
        return finding("idle experts", "an expert without a gradient moved")
    gap = float(np.linalg.norm(found - expected))
    factor = _multiple(found, expected, gap)
    if factor is not None and lr * decay * np.linalg.norm(p) * abs(factor - 1) > EXPLAINED * gap:
        return finding("learning rate", f"the whole update is {factor:.6g} times what it should be")
    factor = _multiple(found - expected, p, gap)
    if factor is not None:
        return finding("decay", f"p is scaled by {1 - lr * decay + factor:.6g} instead of {1 - lr * decay:.6g}")
    step_found, step = found + lr * decay * p, -stages.scaled_lr * stages.unscaled
    factor = _multiple(step_found, step, gap)
    if factor is not None:
        if decay and abs(factor - (1 - lr * decay)) < EXPLAINED * lr * decay:
            return finding("decay", "it was applied after the step instead of before")
        return finding("scale", f"the step is {factor:.6g} times what it should be")
    if stages.direction is None:
        return finding("denominator", "both moments are right, their quotient is not")
    return finding(*_matrix_stage(-step_found / stages.scaled_lr, stages.unscaled, stages.direction, ns_steps))


def _matrix_stage(found: np.ndarray, expected: np.ndarray, direction: np.ndarray, ns_steps: int) -> tuple[str, str]:
    shape = (-1, *direction.shape[-2:])
    slices = list(zip(found.reshape(shape), expected.reshape(shape), direction.reshape(shape), strict=True))
    X, Y, G = max(slices, key=lambda triple: relative_error(triple[0], triple[1]))
    gap = float(np.linalg.norm(X - Y))
    if X.shape[0] == X.shape[1] and np.linalg.norm(X.T - Y) < EXPLAINED * gap:
        return "newton-schulz", "the orthogonalized matrix is transposed"
    U, s, Vt = np.linalg.svd(G, full_matrices=False)
    kept = s > 1e-6 * s[0]
    core = np.diag(U[:, kept].T @ X @ Vt[kept].T)
    outside = float(np.linalg.norm(X - (U[:, kept] * core) @ Vt[kept]))
    if outside < EXPLAINED * gap:
        factor = _input_scale(X, Y, G, ns_steps, gap)
        if factor is not None:
            return "nesterov", f"{factor:.4g} times the right matrix was orthogonalized; only the norm's eps shows it"
        return "newton-schulz", f"singular values {np.round(core, 4)[:4]} where the input's singular vectors are right"
    return "nesterov", f"another matrix was orthogonalized: {outside:.2g} of the result lies off its singular vectors"


def _input_scale(X: np.ndarray, Y: np.ndarray, G: np.ndarray, ns_steps: int, gap: float) -> float | None:
    """c for which X is the orthogonalized c G, where Y is that of G; None if it is not.

    Scaling the input changes ||G|| / (||G|| + eps) a little, so X - Y is a small multiple of how Y answers to that.
    """
    norm, h = float(np.linalg.norm(G)), 1e-6
    response = (reference.newton_schulz(G, ns_steps, eps=(norm + NORM_EPS) / (1 + h) - norm) - Y) / h
    shift = _multiple(X - Y, response, gap)
    if shift is None or shift * norm >= NORM_EPS:
        return None
    return 1 / (1 - shift * (norm + NORM_EPS) / NORM_EPS)


def _multiple(x: np.ndarray, y: np.ndarray, gap: float) -> float | None:
    """c such that x - c y leaves little of the difference that is to be explained; None if there is no such c."""
    norm = float((y * y).sum())
    if norm == 0.0:
        return None
    c = float((x * y).sum()) / norm
    return c if np.linalg.norm(x - c * y) < EXPLAINED * gap else None
