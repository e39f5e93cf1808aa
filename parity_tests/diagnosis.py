"""Where one update went wrong, from its result alone: no access to the code that made it.

Given where an update started and where it ended, the oracle recomputes every stage. The state is compared first,
as it is visible. What is left shows in the update dp alone, and each stage leaves its own trace there:

    learning rate    dp' is a multiple of dp as a whole, decay included
    decay            dp' - dp is a multiple of p; or dp' without decay is (1 - lr weight_decay) times what it should be
    scale            dp' without decay is another multiple of it
    nesterov         another mix of gradient and momentum was orthogonalized
    newton-schulz    no mix gives this result: singular values are off, or it is transposed, or badly rounded
    denominator      for Adam, instead of the last three: moments are right, their quotient is not
    apply            something else happened between the direction and the parameter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from parity_tests import reference
from parity_tests.backends.base import Arrays, Record
from parity_tests.backends.reference_backend import ReferenceRun, Stages
from parity_tests.tolerances import relative_error

NORM_EPS = 1e-7  # of Newton-Schulz
EXPLAINED = 1e-2  # a hypothesis holds when it leaves less than this of the difference, or rounding, unexplained


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
    lr_tolerance: float,
    noise: float,
    rounded: np.ndarray | None = None,
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
        lr_tolerance: absolute.
        noise: Frobenius norm of what rounding may do to the update in this tier.
        rounded: what the parameter must be, if it has a master.
    """
    update = record.updates[name]
    if name not in run.roles and name not in record.state:
        return Finding("frozen", "a parameter that is not selected moved", update, np.zeros_like(update))
    if (name in run.roles) != (name in record.state):
        verb = "not optimized" if name in run.roles else "optimized"
        return Finding("routing", f"{verb} here", update, np.zeros_like(update))
    expected_keys = set(state_before)
    if expected_keys - set(record.state[name]):
        return Finding("routing", f"role {run.roles[name]!r} was expected", update, np.zeros_like(update))
    lr, lr_found = run.lr(name, updates_done), record.learning_rates[name]
    if abs(lr_found - lr) > lr_tolerance:
        return Finding("learning rate", "the schedule gives another value", np.asarray(lr_found), np.asarray(lr))
    if grad is None:
        kept = {**state_before, "step": state_before["step"] + run.counts_per_group()}
        for key, expected in kept.items():
            if not is_close(record.state[name][key], expected):
                note = f"{key} differs after an update without a gradient"
                return Finding(STATE_STAGES[key], note, record.state[name][key], expected)
        return Finding("no gradient", "a parameter without a gradient must not change", update, np.zeros_like(update))
    stages = run.stages(name, before, state_before, grad, updates_done)
    for key, expected in stages.state.items():
        if not is_close(record.state[name][key], expected):
            return Finding(STATE_STAGES[key], f"{key} differs after the update", record.state[name][key], expected)
    if rounded is not None and (record.params[name] != rounded).any():
        return Finding("apply", "the parameter is not its rounded master", record.params[name], rounded)
    return _UpdateDiagnosis(stages, grad, noise, run.options).find(update)


class _UpdateDiagnosis:
    """Explains an update whose state, learning rate and decay coefficient are known to be right."""

    def __init__(self, stages: Stages, grad: np.ndarray, noise: float, options: Mapping[str, Any]) -> None:
        self.stages, self.grad, self.noise, self.options = stages, grad, noise, options

    def find(self, found: np.ndarray) -> Finding:
        stage, note = self._first_stage(found, self.stages.after - self.stages.before)
        return Finding(stage, note, found, self.stages.after - self.stages.before)

    def _first_stage(self, found: np.ndarray, expected: np.ndarray) -> tuple[str, str]:
        stages, p, lr, decay = self.stages, self.stages.before, self.stages.lr, self.stages.decay
        broken = ~np.isfinite(found)
        if broken.any():
            everywhere = stages.direction is not None and broken.all(axis=(-2, -1)).any()
            stage = "newton-schulz" if everywhere else "apply"
            return stage, f"{broken.sum()} of {broken.size} entries are not finite; the state is"
        if not found.any():
            return "apply", "the parameter did not move; its state did"
        if stages.active is not None and np.any(np.where(stages.active, 0.0, found)):
            return "idle experts", "an expert without a gradient moved"
        if lr == 0:
            return "learning rate", "the lr is 0 and the parameter moved"
        gap = float(np.linalg.norm(found - expected))
        if gap < 1.5 * self.noise:
            last = "denominator" if stages.direction is None else "newton-schulz"
            return last, "one entry is off by more than rounding; as a whole the difference is too small to tell more"
        left = EXPLAINED * gap + self.noise
        factor = _multiple(found, expected, left)
        if factor is not None and lr * decay * np.linalg.norm(p) * abs(factor - 1) > left:
            return "learning rate", f"the whole update is {factor:.6g} times what it should be"
        factor = _multiple(found - expected, p, left)
        if factor is not None and abs(factor) * np.linalg.norm(p) > self.noise:
            return "decay", f"p is scaled by {1 - lr * decay + factor:.6g} instead of {1 - lr * decay:.6g}"
        step_found, step = found + lr * decay * p, -stages.scaled_lr * stages.unscaled
        factor = _multiple(step_found, step, left)
        if factor is not None:
            size = float(np.linalg.norm(step))
            if lr * decay * size > self.noise and abs(factor - (1 - lr * decay)) * size < left:
                return "decay", "it was applied after the step instead of before"
            if stages.direction is None:
                cause = "the bias correction, eps, or an lr that only the step saw"
                return "denominator", f"the step is {factor:.6g} times what it should be everywhere: {cause}"
            return "scale", f"the step is {factor:.6g} times what it should be"
        if stages.scaled_lr == 0:
            return "scale", "the step should be zero"
        if stages.direction is None:
            return "denominator", "both moments are right, their quotient is not"
        return self._matrix_stage(-step_found / stages.scaled_lr)

    def _matrix_stage(self, found: np.ndarray) -> tuple[str, str]:
        stages = self.stages
        assert stages.direction is not None
        shape = (-1, *found.shape[-2:])
        arrays = (found, stages.unscaled, stages.direction, self.grad, stages.state["momentum_buffer"])
        slices = list(zip(*(x.reshape(shape) for x in arrays), strict=True))
        X, Y, G, g, M = max(slices, key=lambda parts: relative_error(parts[0], parts[1]))
        left = EXPLAINED * float(np.linalg.norm(X - Y)) + self.noise / stages.scaled_lr
        if X.shape[0] == X.shape[1] and np.linalg.norm(X.T - Y) < left:
            return "newton-schulz", "the orthogonalized matrix is transposed"
        mu = self.options["muon_momentum"]
        for what, mixed in (
            ("the momentum alone", M),
            ("the gradient alone", g),
            (f"gradient + {mu:g} x momentum", g + mu * M),
        ):
            if np.linalg.norm(reference.newton_schulz(mixed, self.options["ns_steps"]) - X) < left:
                return "nesterov", f"{what} was orthogonalized"
        factor = self._input_scale(X, Y, G, left)
        if factor is not None:
            if min(abs(factor / known - 1) for known in (1 + mu, 1 / (1 + mu), (1 + 2 * mu) / (1 + mu) ** 2)) < 1e-3:
                return "nesterov", f"{factor:.4g} times the right matrix was orthogonalized; only eps shows it"
            return "newton-schulz", f"eps of the norm is {NORM_EPS / factor:.3g} instead of {NORM_EPS:g}"
        share, distance = self._mix(X, g, M)
        if distance < left:
            mixed = "the momentum alone" if share == np.inf else f"gradient + {share:.4g} x momentum"
            return "nesterov", f"{mixed} was orthogonalized"
        U, _, Vt = np.linalg.svd(G, full_matrices=False)
        core = np.diag(U.T @ X @ Vt.T)
        return (
            "newton-schulz",
            f"no mix of gradient and momentum gives this; in the singular basis of the right one it is "
            f"{np.round(core, 3)[:4]}, expected {np.round(np.diag(U.T @ Y @ Vt.T), 3)[:4]}",
        )

    def _input_scale(self, X: np.ndarray, Y: np.ndarray, G: np.ndarray, left: float) -> float | None:
        """c for which X is the orthogonalized c G, where Y is that of G; None if it is not.

        Scaling the input changes ||G|| / (||G|| + eps) a little, so X - Y is a small multiple of how Y answers to that.
        """
        norm, h = float(np.linalg.norm(G)), 1e-6
        scaled_eps = (norm + NORM_EPS) / (1 + h) - norm
        response = (reference.newton_schulz(G, self.options["ns_steps"], eps=scaled_eps) - Y) / h
        shift = _multiple(X - Y, response, left)
        limit = NORM_EPS / (norm + NORM_EPS)
        if shift is None or shift >= limit or abs(shift) < 1e-3 * limit:
            return None
        return 1 / (1 - shift / limit)

    def _mix(self, X: np.ndarray, g: np.ndarray, M: np.ndarray) -> tuple[float, float]:
        """(r, distance): the r for which the orthogonalized g + r M comes nearest to X, and how near."""
        sizes = float(np.linalg.norm(g)), float(np.linalg.norm(M))
        if not all(sizes):
            return np.inf, np.inf

        def distance(angle: float) -> float:
            mixed = np.cos(angle) * g / sizes[0] + np.sin(angle) * M / sizes[1]
            return float(np.linalg.norm(reference.newton_schulz(1e6 * mixed, self.options["ns_steps"]) - X))

        low, high = -np.pi / 2, np.pi / 2
        for _ in range(12):
            angles = np.linspace(low, high, 25)
            best = int(np.argmin([distance(angle) for angle in angles]))
            low, high = angles[max(best - 1, 0)], angles[min(best + 1, 24)]
        angle = angles[best]
        if abs(np.cos(angle)) < 1e-6:
            return np.inf, distance(angle)
        return float(np.tan(angle)) * sizes[0] / sizes[1], distance(angle)


def _multiple(x: np.ndarray, y: np.ndarray, left: float) -> float | None:
    """c such that no more than ``left`` remains of x - c y; None if there is no such c."""
    norm = float((y * y).sum())
    if norm == 0.0:
        return None
    c = float((x * y).sum()) / norm
    return c if np.linalg.norm(x - c * y) < left else None
