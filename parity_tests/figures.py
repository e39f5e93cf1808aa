"""The figures of the report: SVG for an <img>, both frameworks told apart by line style and marker as by colour."""

from __future__ import annotations

import base64
import io
import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parity_tests.cases import ANNEALED
from parity_tests.schedule_parity import ScheduleResult
from parity_tests.tolerances import BFLOAT16_BLOCK, FLOAT32, FLOAT64, TIERS, TRAINING_FLOAT64
from parity_tests.training import TrainingResult
from parity_tests.trajectory import CaseResult

COLUMNS = tuple((tier.name, mode) for tier in TIERS.values() for mode in tier.modes)
BASE = {"float64": FLOAT64, "float32": FLOAT32, "bfloat16": BFLOAT16_BLOCK}
ORTHOGONALIZED_IN = ("float64", "float32", "bfloat16")
ZERO = {"float64": 1e-18, "float32": 1e-11, "bfloat16": 1e-11}  # where a log axis shows a zero
CEILING = 1e3  # and an infinite error

# Okabe-Ito; line style and marker carry the same distinction in black and white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
TORCH: dict[str, Any] = {"color": COLOURS[0], "linestyle": "-", "linewidth": 1.3}
JAX: dict[str, Any] = {
    "color": COLOURS[1],
    "linestyle": "none",
    "marker": "o",
    "markersize": 5,
    "markerfacecolor": "none",
}
JAX32: dict[str, Any] = {"color": COLOURS[2], "linestyle": "none", "marker": "x", "markersize": 4}
REFERENCE: dict[str, Any] = {"color": "0.8", "linewidth": 6.0, "solid_capstyle": "butt"}
LIMIT: dict[str, Any] = {"color": "black", "linestyle": (0, (6, 3)), "linewidth": 1.0}
PAIR_STYLES = {
    ("torch", "reference"): (COLOURS[0], "-"),
    ("jax", "reference"): (COLOURS[1], (0, (4, 1.5))),
    ("torch", "jax"): (COLOURS[2], (0, (1, 1.2))),
}
RC = {
    "svg.hashsalt": "parity",
    "svg.fonttype": "none",  # text stays text: smaller, and sharp
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.92",
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.08,
}


class Picture(NamedTuple):
    """A figure as the source of an <img>, and what it shows in words."""

    src: str
    alt: str


def _encode(figure: Figure, alt: str) -> Picture:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    # two decimals of a point are enough: fewer digits, a smaller file
    svg = re.sub(r'(?<= [dxy]=")[^"]+', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), stream.getvalue())
    # an <img> keeps the ids of one SVG apart from those of the next
    return Picture("data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode("ascii"), alt)


def _sparse(length: int, count: int) -> list[int]:
    """About ``count`` indices of ``length`` points, the last one among them."""
    return [*range(0, length - 1, max(1, length // count)), length - 1]


def _clip(errors: np.ndarray, zero: float) -> np.ndarray:
    return np.clip(np.nan_to_num(errors, nan=np.inf, posinf=np.inf), zero, CEILING)


def growth_picture(cases: list[CaseResult]) -> Picture | None:
    """Update errors of every case and pair, step by step, with their tolerances."""
    columns = [column for column in COLUMNS if any((r.tier, r.mode) == column for r in cases)]
    if not columns:
        return None
    height = (len(columns) + 1) // 2
    figure = Figure(figsize=(11, 3.7 * height + 0.6), layout="constrained")
    axes = figure.subplots(height, 2, squeeze=False).ravel()
    for ax, column in zip(axes, columns, strict=False):
        _draw_growth(ax, [r for r in cases if (r.tier, r.mode) == column], *column)
    for ax in axes[len(columns) :]:
        ax.set_axis_off()
    entries: dict[str, Any] = {}
    for ax in axes[: len(columns)]:
        entries |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=3)
    return _encode(figure, "Error of the update per step, for each tier, with its tolerance")


def _draw_growth(ax: Axes, results: list[CaseResult], tier: str, mode: str) -> None:
    longest = max(len(errors) for r in results for errors in r.errors.values())
    steps = np.arange(1, longest + 1)

    def padded(values: Mapping[tuple[tuple[str, str], str], np.ndarray], pair: tuple[str, str]) -> np.ndarray:
        row = values.get((pair, "update"), np.empty(0))
        return np.pad(row, (0, longest - len(row)), constant_values=np.nan)

    tolerances = []
    for pair, (colour, style) in PAIR_STYLES.items():
        errors = np.stack([padded(r.errors, pair) for r in results])
        allowed = np.stack([padded(r.tolerances, pair) for r in results])
        failed = ~(errors <= allowed) & ~np.isnan(allowed)
        # where the update is as small as its rounding, or zero, a relative error says nothing
        shown = np.where(np.isnan(allowed) | ((allowed > 1) & ~failed), np.nan, _clip(errors, ZERO[tier]))
        tolerances.append(np.where((allowed > 0) & (allowed <= 1), allowed, np.nan))
        name = " and ".join(pair)
        ax.plot(steps, shown.T, color=colour, linestyle=style, linewidth=0.6, alpha=0.35)
        median = np.ma.median(np.ma.masked_invalid(shown), axis=0).filled(np.nan)
        ax.plot(steps, median, color=colour, linestyle=style, linewidth=2.2, label=f"{name}: median of the cases")
        if failed.any():
            rows, at = np.nonzero(failed)
            ax.plot(
                steps[at],
                shown[rows, at],
                color="black",
                linestyle="none",
                marker="x",
                markersize=4,
                label="above its tolerance",
            )
    band = np.ma.masked_invalid(np.concatenate(tolerances))
    ax.fill_between(
        steps,
        band.min(axis=0).filled(np.nan),
        band.max(axis=0).filled(np.nan),
        color="0.88",
        linewidth=0,
        label="tolerances of the single tensors, lowest to highest",
    )
    ax.axhline(BASE[tier].value, **LIMIT, label="base tolerance of the tier")
    ax.set_yscale("log")
    ax.set(title=f"{tier}, {mode}-running: {len(results)} cases", xlabel="step (1 = first update)")
    ax.set_ylabel("error of the update")


def schedule_picture(result: ScheduleResult) -> Picture:
    """Multipliers of all sides on top of each other, and their distance from the reference below."""
    figure = Figure(figsize=(5.4, 4.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    x, expected = result.steps, result.values["reference"]
    top.plot(x, expected, **REFERENCE, label="reference")
    top.plot(x, result.values["torch"], **TORCH)
    top.plot(x, result.values["jax"], **JAX, markevery=_sparse(len(x), 14))
    top.set(
        title=f"{result.case.id} ({result.case.lr_scheduler_type})",
        ylabel=ANNEALED.get(result.case.lr_scheduler_type, "multiplier of the lr").replace("_", " "),
    )
    peak = float(np.abs(expected).max()) or 1.0
    dots = {"color": COLOURS[0], "linestyle": "none", "marker": ".", "markersize": 4}
    labels = {"torch": "torch (line above)", "jax": "jax", "jax32": "jax in float32"}
    for (side, label), style in zip(labels.items(), (dots, JAX, JAX32), strict=True):
        distance = _clip(np.abs(result.values[side] - expected) / peak, 0.0)
        apart = distance > 0
        bottom.plot(x[apart], distance[apart], **style, label=label)
    for side in ("jax", "jax32"):
        bottom.axhline(result.tolerance(side).value, **LIMIT, label="tolerance" if side == "jax" else None)
    bottom.set_yscale("log")
    bottom.set_ylim(1e-18, max(1e-5, bottom.get_ylim()[1]))
    bottom.set(xlabel="step (updates done)", ylabel="|side - reference|\n/ peak")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return _encode(figure, f"Schedule {result.case.id} on all sides, and the differences from the reference")


def _draw_rates(ax: Axes, rates: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """{side: {name: lr per step}} with one line for all names that share it."""
    shared: dict[bytes, list[str]] = {}
    for name, values in rates["torch"].items():
        shared.setdefault(values.tobytes(), []).append(name)
    for i, names in enumerate(shared.values()):
        torch, jax = rates["torch"][names[0]], rates["jax"].get(names[0])
        steps = np.arange(1, len(torch) + 1)
        label = textwrap.shorten(", ".join(names), 60, placeholder=" ...")
        style = {"color": COLOURS[i % len(COLOURS)]}
        ax.plot(steps, torch, **{**TORCH, **style}, label=label)
        if jax is not None:
            ax.plot(steps, jax, **{**JAX, **style}, markevery=_sparse(len(steps), 20))
    ax.set(xlabel="step (1 = first update)", ylabel="learning rate")
    ax.legend(loc="best", fontsize=8, title="line: torch, circles: jax")


def rates_picture(cases: list[CaseResult]) -> Picture | None:
    """Learning rates of the case with most groups, longest run first."""

    def variety(result: CaseResult) -> tuple[int, int]:
        values = list(result.learning_rates["torch"].values())
        return len({v.tobytes() for v in values}), sum(map(len, values))

    both = [r for r in cases if r.learning_rates.keys() >= {"torch", "jax"} and r.tier == "float64"]
    if not both:
        return None
    result = max(both, key=variety)
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    ax = figure.subplots()
    _draw_rates(ax, result.learning_rates)
    ax.set_title(f"case {result.case.id}, {result.tier}: learning rate of every group in both frameworks")
    return _encode(figure, f"Learning rates of case {result.case.id} in torch and in jax")


def training_picture(t: TrainingResult) -> Picture:
    """Loss, its difference, the distance of the parameters and the learning rates of one training."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    (loss, distance), (difference, rates) = figure.subplots(2, 2, height_ratios=(3, 2))
    zero = ZERO[t.dtype]
    steps = np.arange(1, len(t.loss_difference) + 1)
    loss.plot(steps, t.losses["torch"], **TORCH, label="torch")
    loss.plot(steps, t.losses["jax"], **JAX, markevery=_sparse(len(steps), 25), label="jax")
    loss.set(title="loss of both frameworks", xlabel="step (1 = first update)", ylabel="nats per token")
    loss.legend()
    difference.plot(steps, _clip(t.loss_difference, zero), color="black", linewidth=0.9)
    difference.set_yscale("log")
    difference.set(title="difference of the losses", xlabel="step (1 = first update)")
    difference.set_ylabel("|torch - jax|\nnats per token")
    distance.plot(t.snapshot_steps, _clip(t.total_distance, zero), color=COLOURS[0], marker="o", label="all parameters")
    style = {"color": COLOURS[1], "linestyle": "--", "marker": "s", "markerfacecolor": "none"}
    distance.plot(t.snapshot_steps, _clip(t.worst_distance, zero), **style, label="worst tensor")
    if t.dtype == "float64":
        distance.axhline(TRAINING_FLOAT64.value, **LIMIT, label=f"allowed at the end: {TRAINING_FLOAT64.value:.0e}")
    distance.set_yscale("log")
    distance.set(title="distance of the parameters", xlabel="updates done", ylabel="||torch - jax|| / ||larger||")
    distance.legend()
    groups = {side: {f"group {i}": lr for i, lr in enumerate(values.T)} for side, values in t.learning_rates.items()}
    _draw_rates(rates, groups)
    rates.set_title("learning rate of every group")
    figure.suptitle(f"{t.run.name} in {t.dtype}", fontweight="bold")
    return _encode(figure, f"Training {t.run.name} in {t.dtype}: loss, difference, distance, learning rates")


def _orthogonalized(G: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """{side: Newton-Schulz of G (out, in) in ``dtype``}, float64; JAX is left out where it cannot hold ``dtype``."""
    import jax.numpy as jnp
    import torch

    import jax_impl
    import torch_impl

    found = {"torch": torch_impl.newton_schulz(torch.tensor(G), ns_dtype=dtype).double().numpy()}
    if dtype != "float64" or jnp.result_type(float) == jnp.float64:
        found["jax"] = np.asarray(jax_impl.newton_schulz(jnp.asarray(G), ns_dtype=dtype), np.float64)
    return found


def singular_value_picture(trainings: list[TrainingResult]) -> Picture | None:
    """Singular values of trained momentum before and after Newton-Schulz, for each matrix and dtype."""
    from torch_impl import NS_COEFFICIENTS

    run = next((t for t in sorted(trainings, key=lambda t: t.dtype != "float64") if t.momentum), None)
    matrices = {name: G for name, G in run.momentum.items() if np.isfinite(G).all()} if run else {}
    if not matrices:
        return None
    jordan = NS_COEFFICIENTS["jordan"]
    figure = Figure(figsize=(11, 3.2 * len(matrices) + 0.5), layout="constrained")
    grid = figure.subplots(len(matrices), len(ORTHOGONALIZED_IN), squeeze=False, sharey=True)
    for row, (name, G) in zip(grid, matrices.items(), strict=True):
        before = np.linalg.svd(G, compute_uv=False) / max(float(np.linalg.norm(G)), 1e-300)
        index = np.arange(1, len(before) + 1)
        for ax, dtype in zip(row, ORTHOGONALIZED_IN, strict=True):
            low, high = jordan.band
            ax.axhspan(low, high, color="0.88", linewidth=0, label=f"band after five steps: {low} to {high}")
            label = f"{jordan.domain[0]:g}: no promise for what was below"
            ax.axhline(jordan.domain[0], color="black", linestyle=":", linewidth=1, label=label)
            ax.plot(index, before, color="0.45", linestyle="--", linewidth=1.2, label="before, s / ||G||")
            for side, X in _orthogonalized(G, dtype).items():
                s = np.linalg.svd(X, compute_uv=False)
                style = TORCH if side == "torch" else {**JAX, "markevery": _sparse(len(s), 16)}
                ax.plot(index, s, **style, label=f"after, {side}")
            ax.set_yscale("log")
            ax.set(title=f"{name} {G.shape[0]}x{G.shape[1]}\n{dtype}", xlabel="index of the singular value")
        row[0].set_ylabel("singular value")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return _encode(figure, "Singular values of the momentum before and after Newton-Schulz in both frameworks")
