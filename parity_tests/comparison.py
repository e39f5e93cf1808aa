"""Compare the records of one step of two sides, tensor by tensor, as the tier says; explain what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parity_tests.backends.base import Arrays, Record
from parity_tests.backends.reference_backend import ReferenceRun, Stages
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
    ROUNDED_MASTER,
    SAME_PARAMETERS,
    Tier,
    Tolerance,
    block_error,
    elementwise_error,
    is_singular,
    relative_error,
    update_floor,
)


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


@dataclass(frozen=True)
class Check:
    """One comparison of one tensor: what was compared, how far apart, how far it may be."""

    quantity: str
    tensor: str
    error: float
    tolerance: Tolerance

    @property
    def failed(self) -> bool:
        return not self.error <= self.tolerance.value


def severity(check: Check) -> float:
    """How many times its tolerance an error is."""
    if np.isnan(check.error):
        return np.inf
    return check.error / max(check.tolerance.value, 1e-300)


def _rounding(pair: tuple[str, str]) -> Tolerance:
    return BFLOAT16_ROUNDING if "reference" in pair else BFLOAT16_ROUNDING_PAIR


class Comparer:
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
        self.stages: dict[str, Stages] = {}
        for name in self.oracle.roles:
            g = grads[name]
            self.lr_peak[name] = max(self.lr_peak.get(name, 0.0), records["reference"].learning_rates[name])
            if g is not None and self.oracle.is_orthogonalized(name) and self.tier.name != "float64":
                stages = self.oracle.stages(name, self.start[name], dict(self.start_state[name]), g, t)
                self.stages[name] = stages
                assert stages.direction is not None
                self.singular[name] = is_singular(stages.direction)

    def compare(self, pair: tuple[str, str]) -> list[Check]:
        left, right = (self.records[name] for name in pair)
        checks = []
        for name in right.params:
            if (name in left.state) != (name in right.state):
                checks.append(Check("state", name, np.inf, SAME_PARAMETERS))
                continue
            checks.append(self._compare_update(pair, name))
            if name in right.state:
                checks += self._compare_state(pair, name, left, right)
                checks.append(self._compare_params(pair, name))
                checks.append(self._compare_lr(name, left, right))
        return checks

    def _compare_update(self, pair: tuple[str, str], name: str) -> Check:
        left, right = (self.records[side].updates[name] for side in pair)
        p = self.start[name]
        if self.tier.name == "bfloat16":
            if name not in self.oracle.roles:
                return Check("update", name, relative_error(left, right), EXACT)
            if self._rounds_state():
                after = [self.records[side].params[name] for side in pair]
                return self._compare_values("update", pair, name, after)
            if name in self.stages:
                return self._compare_orthogonalized(pair, name)
        tolerance = self._update_tolerance(name)
        floor = update_floor(self._arithmetic(), p, right)
        return Check("update", name, relative_error(left, right), tolerance._replace(value=tolerance.value + floor))

    def _compare_values(self, quantity: str, pair: tuple[str, str], name: str, values: list[np.ndarray]) -> Check:
        """What is stored: entry by entry where it is stored in bfloat16, else relative to its norm."""
        if self._rounds_state():
            return Check(quantity, name, elementwise_error(*values), _rounding(pair))
        return Check(quantity, name, relative_error(*values), self._base_tolerance())

    def _compare_params(self, pair: tuple[str, str], name: str) -> Check:
        """The parameters themselves; where masters are compared, they must be the rounded masters, bit for bit."""
        values = [self.records[side].params[name] for side in pair]
        if self.tier.name == "bfloat16" and self.oracle.counts_per_group():
            masters = [self.records[side].state[name].get("master_param") for side in pair]
            unequal = sum(
                int(np.sum(value != to_bfloat16(master)))
                for side, value, master in zip(pair, values, masters, strict=True)
                if side != "reference" and master is not None
            )
            return Check("state", name, float(unequal), ROUNDED_MASTER)
        return self._compare_values("state", pair, name, values)

    def _compare_orthogonalized(self, pair: tuple[str, str], name: str) -> Check:
        """bfloat16 results are compared as orthogonalized matrices, where the singular values carry information."""
        stages = self.stages[name]
        assert stages.direction is not None
        tolerance = BFLOAT16_BLOCK if "reference" in pair else BFLOAT16_PAIR
        if stages.scaled_lr == 0.0:
            updates = [self.records[side].updates[name] for side in pair]
            floor = update_floor("float32", stages.before, updates[1])
            only_decay = FLOAT32._replace(value=FLOAT32.value + floor) if stages.lr else EXACT
            return Check("update", name, relative_error(*updates), only_decay)
        found = [
            -(self.records[s].updates[name] + stages.lr * stages.decay * stages.before) / stages.scaled_lr for s in pair
        ]
        if stages.active is not None:
            found = [np.where(stages.active, x, 0.0) for x in found]
        error = block_error(found[0], found[1], stages.direction)
        if pair[1] == "reference":
            self.blocks.setdefault(name, {}).setdefault(pair[0], []).append(relative_error(found[0], found[1]))
        return Check("update", name, error, tolerance)

    def _compare_state(self, pair: tuple[str, str], name: str, left: Record, right: Record) -> list[Check]:
        checks = []
        for key in left.state[name].keys() | right.state[name].keys():
            if key == "master_param":
                continue  # it is what updates are taken from
            if key not in left.state[name] or key not in right.state[name]:
                checks.append(Check("state", name, np.inf, EXACT))
                continue
            values = [left.state[name][key], right.state[name][key]]
            if key == "step":
                checks.append(Check("state", name, abs(float(values[0] - values[1])), EXACT))
            else:
                checks.append(self._compare_values("state", pair, name, values))
        return checks

    def _compare_lr(self, name: str, left: Record, right: Record) -> Check:
        tolerance = self._lr_tolerance()
        peak = self.lr_peak[name]
        difference = abs(left.learning_rates[name] - right.learning_rates[name])
        return Check("lr", name, difference / peak if peak else difference, tolerance)

    def explain(
        self,
        pair: tuple[str, str],
        check: Check,
        starts: Mapping[str, tuple[Arrays, Mapping[str, Arrays]]],
        total: int,
    ) -> Divergence:
        """Ask the oracle which of the two is wrong and at which stage."""
        suspects = [side for side in pair if side != "reference"]
        oracle_pairs = {side: self.compare((side, "reference")) for side in suspects}
        suspect = max(suspects, key=lambda side: max(map(severity, oracle_pairs[side])))
        name = check.tensor
        params, state = starts[suspect]
        state_before = {key: value for key, value in state.get(name, {}).items() if key != "master_param"}
        if not state_before and name in self.oracle.roles:
            state_before = dict(self.start_state[name])
        master = self.records[suspect].state.get(name, {}).get("master_param")
        finding = diagnose(
            self.oracle,
            name,
            params[name],
            state_before,
            self.records[suspect],
            self.grads[name],
            self.t,
            self._is_close,
            self._lr_tolerance().value * (self.lr_peak.get(name, 0.0) or 1.0),
            self._noise(name),
            None if master is None else to_bfloat16(master),
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

    def _arithmetic(self) -> str:
        """Precision of everything but Newton-Schulz and stored bfloat16 values."""
        return "float64" if self.tier.name == "float64" else "float32"

    def _base_tolerance(self) -> Tolerance:
        return FLOAT64 if self.tier.name == "float64" else FLOAT32

    def _update_tolerance(self, name: str) -> Tolerance:
        """Before the floor; in float32 null directions of a matrix count."""
        if self.tier.name == "float32" and self.singular.get(name):
            return FLOAT32_SINGULAR
        return self._base_tolerance()

    def _lr_tolerance(self) -> Tolerance:
        return LR_FLOAT64 if self.tier.name == "float64" else LR_FLOAT32

    def _rounds_state(self) -> bool:
        """Whether moments and parameters are stored in bfloat16, without masters."""
        return self.tier.precision.params == "bfloat16" and not self.oracle.counts_per_group()

    def _is_close(self, found: np.ndarray, expected: np.ndarray) -> bool:
        if self._rounds_state():
            return elementwise_error(found, expected) <= BFLOAT16_ROUNDING.value
        return relative_error(found, expected) <= self._base_tolerance().value

    def _noise(self, name: str) -> float:
        """Frobenius norm of what rounding usually does to the update of ``name``: a share of what is allowed."""
        update, p = self.records["reference"].updates[name], self.start[name]
        size = float(np.linalg.norm(update))
        if self._rounds_state():
            return 2.0**-9 * float(np.linalg.norm(p))
        if self.tier.precision.ns == "bfloat16" and name in self.stages:
            return 0.06 * size  # of a whole bfloat16 Newton-Schulz result
        floor = update_floor(self._arithmetic(), p, update)
        return (self._update_tolerance(name).value + floor) / 4 * size

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
