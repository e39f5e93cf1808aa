"""Run one case on all sides, compare every step, and name the first step, tensor and stage that differ."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from parity_tests.backends.base import Arrays, Backend, Record
from parity_tests.backends.reference_backend import ReferenceBackend, ReferenceRun
from parity_tests.cases import Case
from parity_tests.diagnosis import diagnose
from parity_tests.problems import to_bfloat16
from parity_tests.tolerances import (
    BFLOAT16_BLOCK,
    BFLOAT16_PAIR,
    BFLOAT16_RATIO,
    BFLOAT16_ROUNDING,
    BFLOAT16_ROUNDING_PAIR,
    EXACT,
    FLOAT32,
    FLOAT32_SINGULAR,
    FLOAT64,
    LR_FLOAT32,
    LR_FLOAT64,
    TIERS,
    Tier,
    Tolerance,
    block_error,
    elementwise_error,
    is_singular,
    relative_error,
    update_floor,
)

PAIRS = (("torch", "reference"), ("jax", "reference"), ("torch", "jax"))
QUANTITIES = ("update", "state", "lr")


@dataclass(frozen=True)
class Divergence:
    """The first place where two sides part."""

    case: str
    tier: str
    mode: str
    pair: tuple[str, str]
    suspect: str
    step: int
    steps: int
    tensor: str
    stage: str
    note: str
    index: tuple[int, ...]
    found: float
    expected: float
    error: float
    tolerance: Tolerance

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.index))}]" if self.index else "its value"
        return "\n".join(
            (
                f"{self.case} ({self.tier}, {self.mode}-running): {self.pair[0]} and {self.pair[1]} part; "
                f"the reference says that {self.suspect} is wrong",
                f"  first at     step {self.step} of {self.steps}, tensor {self.tensor}",
                f"  stage        {self.stage}: {self.note}",
                f"  values       at {where}: {self.suspect} {self.found:.9g}, reference {self.expected:.9g}",
                f"  error        {self.error:.3g}, allowed {self.tolerance.value:.3g}",
                f"  tolerance    {self.tolerance.name}: {self.tolerance.reason}",
                f"  run it alone python -m parity_tests -k {self.case} --dtype {self.tier}",
            )
        )


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


@dataclass(frozen=True)
class _Check:
    """One comparison of one tensor: what was compared, how far apart, how far it may be."""

    quantity: str
    tensor: str
    error: float
    tolerance: Tolerance

    @property
    def failed(self) -> bool:
        return not self.error <= self.tolerance.value


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
    comparer = _Comparer(case, tier, mode, oracle)
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
                worst = max((c for c in checks if c.quantity == quantity), key=_severity, default=None)
                if worst is not None:
                    result.errors[pair, quantity][t] = worst.error
                    result.tolerances[pair, quantity][t] = worst.tolerance.value
            failed = [check for check in checks if check.failed]
            if failed and result.divergence is None:
                result.divergence = comparer.explain(pair, max(failed, key=_severity), starts, total)
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


def _severity(check: _Check) -> float:
    """How many times its tolerance an error is."""
    if np.isnan(check.error):
        return np.inf
    return check.error / max(check.tolerance.value, 1e-300)


def _rounding(pair: tuple[str, str]) -> Tolerance:
    return BFLOAT16_ROUNDING if "reference" in pair else BFLOAT16_ROUNDING_PAIR


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


class _Comparer:
    """Compares the records of one step; keeps what the bfloat16 tier needs over the whole run."""

    def __init__(self, case: Case, tier: Tier, mode: str, oracle: ReferenceRun) -> None:
        self.case, self.tier, self.mode, self.oracle = case, tier, mode, oracle
        self.lr_peak: dict[str, float] = {}
        self.blocks: dict[str, dict[str, list[float]]] = {}

    def begin_step(
        self,
        t: int,
        grads: Mapping[str, np.ndarray | None],
        start: tuple[Arrays, Mapping[str, Arrays]],
        records: Mapping[str, Record],
    ) -> None:
        self.t, self.grads, self.records = t, grads, records
        self.start, self.start_state = start
        self.singular: dict[str, bool] = {}
        self.stages = {}
        for name in self.oracle.roles:
            g = grads[name]
            self.lr_peak[name] = max(self.lr_peak.get(name, 0.0), records["reference"].learning_rates[name])
            if g is not None and self.oracle.is_orthogonalized(name) and self.tier.name != "float64":
                stages = self.oracle.stages(name, self.start[name], dict(self.start_state[name]), g, t)
                self.stages[name] = stages
                assert stages.direction is not None
                self.singular[name] = is_singular(stages.direction)

    def compare(self, pair: tuple[str, str]) -> list[_Check]:
        left, right = (self.records[name] for name in pair)
        checks = []
        for name in right.params:
            if (name in left.state) != (name in right.state):
                checks.append(_Check("state", name, np.inf, EXACT))
                continue
            checks.append(self._compare_update(pair, name))
            if name in right.state:
                checks += self._compare_state(pair, name, left, right)
                checks.append(self._compare_lr(name, left, right))
        return checks

    def _compare_update(self, pair: tuple[str, str], name: str) -> _Check:
        left, right = (self.records[side].updates[name] for side in pair)
        p = self.start[name]
        if self.tier.name == "bfloat16":
            if name not in self.oracle.roles:
                return _Check("update", name, relative_error(left, right), EXACT)
            if not self.oracle.counts_per_group():
                after = (self.records[side].params[name] for side in pair)
                return _Check("update", name, elementwise_error(*after), _rounding(pair))
            if name in self.stages:
                return self._compare_orthogonalized(pair, name)
            tolerance = FLOAT32
        elif self.tier.name == "float32":
            tolerance = FLOAT32_SINGULAR if self.singular.get(name) else FLOAT32
        else:
            tolerance = FLOAT64
        floor = update_floor("float64" if self.tier.name == "float64" else "float32", p, right)
        return _Check("update", name, relative_error(left, right), tolerance._replace(value=tolerance.value + floor))

    def _compare_orthogonalized(self, pair: tuple[str, str], name: str) -> _Check:
        """bfloat16 results are compared as orthogonalized matrices, where the singular values carry information."""
        stages = self.stages[name]
        assert stages.direction is not None
        tolerance = BFLOAT16_BLOCK if "reference" in pair else BFLOAT16_PAIR
        if stages.scaled_lr == 0.0:
            return _Check("update", name, relative_error(*(self.records[s].updates[name] for s in pair)), EXACT)
        found = [
            -(self.records[s].updates[name] + stages.lr * stages.decay * stages.before) / stages.scaled_lr for s in pair
        ]
        if stages.active is not None:
            found = [np.where(stages.active, x, 0.0) for x in found]
        error = block_error(found[0], found[1], stages.direction)
        if pair[1] == "reference":
            self.blocks.setdefault(name, {}).setdefault(pair[0], []).append(relative_error(found[0], found[1]))
        return _Check("update", name, error, tolerance)

    def _compare_state(self, pair: tuple[str, str], name: str, left: Record, right: Record) -> list[_Check]:
        checks = []
        for key in left.state[name].keys() | right.state[name].keys():
            if key == "master_param":
                continue  # it is what updates are taken from
            if key not in left.state[name] or key not in right.state[name]:
                checks.append(_Check("state", name, np.inf, EXACT))
                continue
            values = left.state[name][key], right.state[name][key]
            if key == "step":
                checks.append(_Check("state", name, abs(float(values[0] - values[1])), EXACT))
            elif self.tier.name == "bfloat16" and not self.oracle.counts_per_group():
                checks.append(_Check("state", name, elementwise_error(*values), _rounding(pair)))
            else:
                tolerance = FLOAT64 if self.tier.name == "float64" else FLOAT32
                checks.append(_Check("state", name, relative_error(*values), tolerance))
        return checks

    def _compare_lr(self, name: str, left: Record, right: Record) -> _Check:
        tolerance = LR_FLOAT64 if self.tier.name == "float64" else LR_FLOAT32
        peak = self.lr_peak[name]
        difference = abs(left.learning_rates[name] - right.learning_rates[name])
        return _Check("lr", name, difference / peak if peak else difference, tolerance)

    def explain(
        self,
        pair: tuple[str, str],
        check: _Check,
        starts: Mapping[str, tuple[Arrays, Mapping[str, Arrays]]],
        total: int,
    ) -> Divergence:
        """Ask the oracle which of the two is wrong and at which stage."""
        suspects = [side for side in pair if side != "reference"]
        oracle_pairs = {side: self.compare((side, "reference")) for side in suspects}
        suspect = max(suspects, key=lambda side: max(map(_severity, oracle_pairs[side])))
        name = check.tensor
        params, state = starts[suspect]
        state_before = {key: value for key, value in state.get(name, {}).items() if key != "master_param"}
        if not state_before and name in self.oracle.roles:
            state_before = dict(self.start_state[name])
        finding = diagnose(
            self.oracle,
            name,
            params[name],
            state_before,
            self.records[suspect],
            self.grads[name],
            self.t,
            lambda x, y: relative_error(x, y) <= (FLOAT64 if self.tier.name == "float64" else FLOAT32).value,
        )
        gap = np.abs(finding.found - finding.expected)
        gap = np.where(np.isfinite(gap), gap, np.inf)
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(gap)), gap.shape)) if gap.ndim else ()
        return Divergence(
            case=self.case.id,
            tier=self.tier.name,
            mode=self.mode,
            pair=pair,
            suspect=suspect,
            step=self.t + 1,
            steps=total,
            tensor=name,
            stage=finding.stage,
            note=finding.note,
            index=index,
            found=float(finding.found[index]),
            expected=float(finding.expected[index]),
            error=check.error,
            tolerance=check.tolerance,
        )

    def explain_ratio(self, total: int) -> Divergence | None:
        """The bfloat16 tier's last question: is one side clearly less accurate than the other?"""
        for name, errors in self.blocks.items():
            means = {side: float(np.mean(values)) for side, values in errors.items()}
            if len(means) < 2:
                continue
            worse, better = sorted(means, key=lambda side: -means[side])
            ratio = means[worse] / max(means[better], 1e-300)
            if ratio > BFLOAT16_RATIO.value:
                return Divergence(
                    case=self.case.id,
                    tier=self.tier.name,
                    mode=self.mode,
                    pair=(worse, better),
                    suspect=worse,
                    step=total,
                    steps=total,
                    tensor=name,
                    stage="newton-schulz",
                    note="its mean bfloat16 error over the run is larger than the other side's",
                    index=(),
                    found=means[worse],
                    expected=means[better],
                    error=ratio,
                    tolerance=BFLOAT16_RATIO,
                )
        return None


def tiers(dtype: str | None) -> list[Tier]:
    """The tier of that name, or all."""
    return list(TIERS.values()) if dtype is None else [TIERS[dtype]]
