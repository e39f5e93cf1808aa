"""What a parity run found: a table for the terminal, and one HTML page that needs no network and no script."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jinja2
import matplotlib as mpl
import numpy as np

from parity_tests.cases import Case
from parity_tests.figures import (
    COLUMNS,
    RC,
    ZERO,
    growth_picture,
    rates_picture,
    schedule_picture,
    singular_value_picture,
    training_picture,
)
from parity_tests.schedule_parity import ScheduleResult
from parity_tests.tolerances import TRAINING_FLOAT64
from parity_tests.training import TrainingResult
from parity_tests.trajectory import PAIRS, QUANTITIES, CaseResult


@dataclass(frozen=True)
class Summary:
    """All results of one run; any list may be empty."""

    title: str
    command: str
    """That was run."""
    environment: dict[str, str]
    """{what: version, device, ...}."""
    cases: list[CaseResult]
    schedules: list[ScheduleResult]
    trainings: list[TrainingResult]
    routing: dict[str, str]
    """{"torch": printed table, "jax": printed table}."""
    seconds: float
    crashes: Sequence[str] = ()
    """What rows that raised an exception said; each counts as a mismatch."""

    @property
    def compared(self) -> int:
        return len(self.cases) + len(self.schedules) + len(self.trainings) + len(self.crashes)

    @property
    def failures(self) -> list[str]:
        """One message for each comparison that failed."""
        messages = [str(result.divergence) for result in self.cases if not result.passed]
        messages += [result.failure() for result in self.schedules if not result.passed]
        messages += [_training_failure(t) for t in self.trainings if not t.passed]
        return messages + list(self.crashes)

    @property
    def passed(self) -> bool:
        """Something was compared and all of it agrees."""
        return self.compared > 0 and not self.failures

    @property
    def verdict(self) -> str:
        if not self.compared:
            return "Nothing was compared"
        count = len(self.failures)
        return f"{count} mismatch{'es' if count > 1 else ''}" if count else "All equal"

    @property
    def extent(self) -> str:
        """What was compared, and for how long, in one line."""
        return (
            f"{len(self.cases)} runs of {len(_by_case(self.cases))} cases, {len(self.schedules)} schedules, "
            f"{len(self.trainings)} trainings in {self.seconds:.0f} s"
        )


class Place(NamedTuple):
    """Where one quantity of a run comes nearest to its tolerance; ``step`` is 1-based."""

    quantity: str
    pair: tuple[str, str]
    step: int
    error: float
    tolerance: float
    ratio: float


def write_report(path: Path, summary: Summary) -> None:
    """Write the page, whole or not at all; folders are made as needed."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    trainings = [(t, _training_verdict(t)) for t in summary.trainings]
    with mpl.rc_context(RC):
        page = environment.get_template("report.html.j2").render(
            summary=summary,
            columns=[column for column in COLUMNS if any((r.tier, r.mode) == column for r in summary.cases)],
            cases=_by_case(summary.cases),
            places=lambda result: [_nearest(result, quantity) for quantity in QUANTITIES],
            growth=growth_picture(summary.cases),
            zero=ZERO,
            schedules=[schedule_picture(result) for result in summary.schedules],
            rates=rates_picture(summary.cases),
            trainings=trainings,
            training_pictures=[training_picture(t) for t in summary.trainings],
            training_tolerance=TRAINING_FLOAT64,
            singular_values=singular_value_picture(summary.trainings),
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def format_table(summary: Summary) -> str:
    """The results in at most 110 columns of ASCII, and the message of every failure below them."""
    blocks = []
    if summary.cases:
        rows = [["case: update error", *map(" ".join, COLUMNS), "of tolerance", ""]]
        for case, results in _by_case(summary.cases):
            cells = []
            for result in (results.get(column) for column in COLUMNS):
                text = "-" if result is None else _number(_nearest(result, "update").error)
                cells.append(text if result is None or result.passed else f"{text} FAIL")
            worst = max((_nearest(r, q) for r in results.values() for q in QUANTITIES), key=lambda place: place.ratio)
            ratio = f"{worst.ratio:.2f}" if worst.ratio < 100 else f"{worst.ratio:.0e}"
            used = f"{ratio} {_pair(worst.pair)}"
            rows.append([case.id, *cells, used, "ok" if all(r.passed for r in results.values()) else "FAIL"])
        blocks.append(_aligned(rows))
    if summary.schedules:
        rows = [["schedule: error / peak", "torch", "jax", "jax32", ""]]
        for schedule in summary.schedules:
            errors = (_number(schedule.errors[side]) if side in schedule.errors else "-" for side in rows[0][1:4])
            rows.append([schedule.case.id, *errors, "ok" if schedule.passed else "FAIL"])
        blocks.append(_aligned(rows))
    if summary.trainings:
        rows = [["training", "dtype", "loss torch", "loss jax", "difference", "distance", ""]]
        for t in summary.trainings:
            losses = [f"{t.losses[side][-1]:.6f}" for side in ("torch", "jax")]
            distances = _number(t.loss_difference[-1]), _number(t.final_distance)
            rows.append([t.run.name, t.dtype, *losses, *distances, _training_verdict(t)])
        blocks.append(_aligned(rows))
    blocks.append(f"{summary.verdict.upper()}: {summary.extent}")
    return "\n\n".join(blocks + summary.failures)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _number(x: float) -> str:
    return f"{x:.1e}" if x else "0"


def _pair(pair: tuple[str, str]) -> str:
    return "/".join(pair).replace("reference", "ref")


def _by_case(results: Iterable[CaseResult]) -> list[tuple[Case, dict[tuple[str, str], CaseResult]]]:
    grouped: dict[str, tuple[Case, dict[tuple[str, str], CaseResult]]] = {}
    for result in results:
        grouped.setdefault(result.case.id, (result.case, {}))[1][result.tier, result.mode] = result
    return list(grouped.values())


def _nearest(result: CaseResult, quantity: str) -> Place:
    places = [Place(quantity, PAIRS[0], 0, 0.0, 0.0, 0.0)]
    for (pair, key), errors in result.errors.items():
        if key == quantity and errors.size:
            tolerances = result.tolerances[pair, key]
            with np.errstate(over="ignore"):
                ratios = np.nan_to_num(errors / np.maximum(tolerances, 1e-300), nan=np.inf, posinf=np.inf)
            k = int(ratios.argmax())
            places.append(Place(quantity, pair, k + 1, float(errors[k]), float(tolerances[k]), float(ratios[k])))
    return max(places, key=lambda place: (place.ratio, place.step))


def _training_verdict(t: TrainingResult) -> str:
    if not t.passed:
        return "FAIL"
    return "ok" if t.dtype == "float64" else "info"


def _training_failure(t: TrainingResult) -> str:
    first = int(np.argmin(np.isfinite(t.total_distance) & (t.total_distance <= t.limits)))
    worst = int(np.argmax(t.tensor_distances[first]))
    steps = t.snapshot_steps
    return (
        f"training {t.run.name} ({t.dtype}): torch and jax part\n"
        f"  first at     snapshot after {steps[first]} of {steps[-1]} steps, tensor {t.names[worst]}: distance "
        f"{t.tensor_distances[first, worst]:.3g}\n"
        f"  error        {t.total_distance[first]:.3g} there, {t.final_distance:.3g} at the end, "
        f"allowed {t.tolerance.value:.3g}\n"
        f"  tolerance    {t.tolerance.name}: {t.tolerance.reason}\n"
        f"  run it alone python -m parity_tests -k 'training {t.run.name}' --dtype {t.dtype} --steps {steps[-1]}"
    )
