"""Run one case on all sides and compare every step; the first step, tensor and stage that differ are kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from parity_tests.backends.base import Arrays, Backend
from parity_tests.backends.reference_backend import ReferenceBackend, ReferenceRun
from parity_tests.cases import Case
from parity_tests.comparison import Comparer, Divergence, severity
from parity_tests.problems import to_bfloat16
from parity_tests.tolerances import Tier

PAIRS = (("torch", "reference"), ("jax", "reference"), ("torch", "jax"))
QUANTITIES = ("update", "state", "lr")


@dataclass
class CaseResult:
    """Errors of one case in one tier and mode.

    Attributes:
        errors: {(pair, quantity): worst error over all tensors, one a step}.
        tolerances: the same keys; the tolerance of the tensor with that error.
        learning_rates: {side: {tensor: lr a step}}.
        divergence: None if all pairs agree.
        seconds: wall time.
    """

    case: Case
    tier: str
    mode: str
    errors: dict[tuple[tuple[str, str], str], np.ndarray]
    tolerances: dict[tuple[tuple[str, str], str], np.ndarray]
    learning_rates: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    divergence: Divergence | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.divergence is None

    def worst(self, pair: tuple[str, str], quantity: str) -> float:
        return float(self.errors[pair, quantity].max(initial=0.0))


def run_case(
    case: Case, tier: Tier, mode: str, backends: Mapping[str, Backend], steps: int | None = None
) -> CaseResult:
    """Compare all pairs of the reference and ``backends`` ("torch", "jax") over the case's steps.

    Args:
        mode: "free" or "forced"; forced starts every step of every side from the reference's rounded state.
        steps: length of the run; the case's own if None.
    """
    started = time.perf_counter()
    sides: dict[str, Backend] = {"reference": ReferenceBackend(), **backends}
    pairs = [pair for pair in PAIRS if pair[0] in sides and pair[1] in sides]
    runs = {name: side.start(case, tier.precision) for name, side in sides.items()}
    oracle = runs["reference"]
    assert isinstance(oracle, ReferenceRun)
    comparer = Comparer(case, tier, mode, oracle)
    total = case.steps if steps is None else min(steps, case.steps)
    keys = [(pair, quantity) for pair in pairs for quantity in QUANTITIES]
    result = CaseResult(
        case, tier.name, mode, {key: np.zeros(total) for key in keys}, {key: np.zeros(total) for key in keys}
    )
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    starts: dict[str, tuple[Arrays, dict[str, Arrays]]] = {}
    for t, grads in enumerate(case.problem.gradient_stream(total)):
        if mode == "forced":
            start = _rounded(oracle.params, oracle.state, tier, oracle.counts_per_group())
            for run in runs.values():
                run.load(*start)
            starts = {name: (_masters(*start), start[1]) for name in sides}
        elif t == 0:
            starts = {name: (oracle.params, oracle.state) for name in sides}
        records = {name: run.step(grads) for name, run in runs.items()}
        comparer.begin_step(t, grads, starts["reference"], records)
        for pair in pairs:
            checks = comparer.compare(pair)
            for quantity in QUANTITIES:
                worst = max((c for c in checks if c.quantity == quantity), key=severity, default=None)
                if worst is not None:
                    result.errors[pair, quantity][t] = worst.error
                    result.tolerances[pair, quantity][t] = worst.tolerance.value
            failed = [check for check in checks if check.failed]
            if failed and result.divergence is None:
                # any change of a single number is a multiple of it: larger tensors show the stage
                telling = [check for check in failed if oracle.params[check.tensor].size > 1] or failed
                result.divergence = comparer.explain(pair, max(telling, key=severity), starts, total)
        for name, record in records.items():
            rates[name].append(record.learning_rates)
            starts[name] = (_masters(record.params, record.state), record.state)
    result.learning_rates = {
        name: {tensor: np.array([row[tensor] for row in rows]) for tensor in rows[0]}
        for name, rows in rates.items()
        if rows
    }
    result.divergence = result.divergence or comparer.explain_ratio(total)
    result.seconds = time.perf_counter() - started
    return result


def _masters(params: Arrays, state: Mapping[str, Arrays]) -> Arrays:
    """Parameters, or their masters where there are some."""
    return {name: state.get(name, {}).get("master_param", p) for name, p in params.items()}


def _rounded(
    params: Arrays, state: Mapping[str, Arrays], tier: Tier, has_masters: bool
) -> tuple[Arrays, dict[str, Arrays]]:
    """What every side can hold exactly in this tier: the common start of a forced step."""
    if tier.name == "float64":
        return dict(params), {name: dict(values) for name, values in state.items()}
    to_float32 = lambda x: np.asarray(x, np.float32).astype(np.float64)  # noqa: E731
    low = tier.precision.params == "bfloat16"
    state_dtype = to_bfloat16 if low and not has_masters else to_float32
    rounded = {
        name: {
            key: value if key == "step" else state_dtype(value)
            for key, value in values.items()
            if key != "master_param"
        }
        for name, values in state.items()
    }
    masters = {name: to_float32(p) for name, p in _masters(params, state).items()}
    if not low:
        return masters, rounded
    if has_masters:
        for name, values in rounded.items():
            values["master_param"] = masters[name]
    return {name: to_bfloat16(p) for name, p in masters.items()}, rounded
