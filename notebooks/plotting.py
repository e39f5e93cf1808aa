"""Pictures and tables of the schedules from both sides, so that the notebooks hold only what they teach.

A ``config`` is the dict that ``torch_impl.build_lr_scheduler(optimizer, **config)`` and
``jax_impl.build_lr_schedule(**config)`` take: ``lr_scheduler_type`` and the arguments of that schedule.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import ipywidgets as widgets
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import display
from matplotlib.axes import Axes

import jax_impl
import torch_impl

FLOAT32_BOUND = 2e-7
"""Largest |torch - JAX| to expect in float32, as a fraction of the peak: less than two units in the last place."""

# Okabe-Ito sky blue, light and wide, under near-black and thin: two greys that print apart
TORCH_STYLE: dict[str, Any] = {"color": "#56B4E9", "linewidth": 5.0, "solid_capstyle": "butt"}
JAX_STYLE: dict[str, Any] = {"color": "#000000", "linewidth": 1.2, "linestyle": (0, (3, 2)), "marker": "o"}
DIFFERENCE_STYLE: dict[str, Any] = {"color": "#D55E00", "linestyle": "none", "marker": "o"}

_RC = {
    "figure.dpi": 90,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "0.9",
}


class Samples(NamedTuple):
    """One schedule at steps 0, 1, ..., from both sides; arrays of shape (n,)."""

    steps: np.ndarray
    torch: np.ndarray
    jax_float32: np.ndarray
    jax_float64: np.ndarray

    @property
    def peak(self) -> float:
        """Largest |multiplier|; 1 for a schedule that is zero everywhere."""
        return float(np.abs(self.torch).max()) or 1.0

    def difference(self, dtype: str) -> np.ndarray:
        """(torch - JAX) / peak with JAX in ``dtype``, "float32" or "float64"."""
        return (self.torch - getattr(self, f"jax_{dtype}").astype(np.float64)) / self.peak


@contextmanager
def x64(enabled: bool) -> Iterator[None]:
    """JAX with or without 64-bit types."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def torch_schedule(config: Mapping[str, Any], base_lr: float = 1.0) -> Callable[[float], float]:
    """The lr of update n + 1 as torch_impl's scheduler sets it, without having to step there."""
    optimizer = torch_impl.build_optimizer(torch.nn.Linear(1, 1), "adamw", lr=base_lr, fused=True)
    (scheduler,) = torch_impl.build_lr_scheduler(optimizer, **config)
    multiplier = scheduler.lr_lambdas[0]
    return lambda n: scheduler.base_lrs[0] * multiplier(n)


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why the library does not take ``config``, in its own words; None if both sides take it."""
    messages = {}
    for side, build in (("torch_impl", torch_schedule), ("jax_impl", lambda c: jax_impl.build_lr_schedule(**c))):
        try:
            build(config)
        except (NotImplementedError, TypeError, ValueError) as error:
            messages[side] = f"{type(error).__name__}: {error}"
    if len(messages) == 2 and len(set(messages.values())) == 1:
        return f"Both sides refuse this.\n{messages['torch_impl']}"
    return "\n".join(f"{side} refuses this.\n{message}" for side, message in messages.items()) or None


def sample(config: Mapping[str, Any], n: int) -> Samples:
    """The multiplier at steps 0 ... n - 1: torch step by step, JAX in one vectorized call a dtype."""
    multiplier = torch_schedule(config)
    schedule = jax_impl.build_lr_schedule(**config)
    with x64(False):
        jax_float32 = np.asarray(schedule(jnp.arange(n)))
    with x64(True):
        jax_float64 = np.asarray(schedule(jnp.arange(n)))
    return Samples(np.arange(n), np.array([multiplier(k) for k in range(n)]), jax_float32, jax_float64)


def boundaries(config: Mapping[str, Any]) -> list[float]:
    """Steps at which one phase hands over to the next, in order."""
    if "cycle_lengths" in config:
        ends = np.cumsum(config["cycle_lengths"]).tolist()
        ramps = zip(ends, config["cycle_lengths"], config["warm_up_steps"], strict=True)
        steps = ends + [end - length + warm_up for end, length, warm_up in ramps if warm_up < length]
    else:
        total = config["total_steps"]
        steps = [config["warm_up_steps"], max(config["warm_up_steps"], total - config["decay_steps"]), total]
    return sorted({step for step in steps if step > 0})


def phase(config: Mapping[str, Any], n: float) -> str:
    """Name of the phase that step ``n`` belongs to."""
    if "cycle_lengths" in config:
        start = 0
        cycles = zip(config["cycle_lengths"], config["warm_up_steps"], strict=True)
        for number, (length, warm_up) in enumerate(cycles, start=1):
            if n <= start + length:
                return f"cycle {number}, {'warm-up' if n - start < warm_up else 'decay'}"
            start += length
        return "held"
    if n < config["warm_up_steps"]:
        return "warm-up"
    if n < config["total_steps"] - config["decay_steps"]:
        return "slow decay" if "f_cooldown_start" in config else "stable"
    if n < config["total_steps"]:
        return "fast decay" if "f_cooldown_start" in config else "decay"
    return "held"


def draw(*configs: Mapping[str, Any]) -> None:
    """One column a config: both sides on one axis, and below it torch - JAX in float32 and in float64."""
    with plt.rc_context(_RC):
        figure, axes = plt.subplots(
            3,
            len(configs),
            figsize=(10.5 if len(configs) > 1 else 9.0, 6.4),
            height_ratios=(3, 1, 1),
            sharex="col",
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        for column, config in zip(axes.T, configs, strict=True):
            _draw_column(column, config)
        axes[0, 0].set_ylabel("multiplier of the base lr [-]")
        axes[1, 0].set_ylabel("[$10^{-7}$ peak]")
        axes[2, 0].set_ylabel("[$10^{-16}$ peak]")
        figure.align_ylabels()
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
        plt.show()


def _draw_column(axes: Sequence[Axes], config: Mapping[str, Any]) -> None:
    value_axis, *difference_axes = axes
    length = max(boundaries(config), default=1)
    samples = sample(config, math.ceil(1.12 * length) + 2)
    last = len(samples.steps) - 1
    value_axis.plot(samples.steps, samples.torch, label="torch_impl", **TORCH_STYLE)
    every = math.ceil(len(samples.steps) / 80)
    value_axis.plot(samples.steps, samples.jax_float32, label="jax_impl", markevery=every, markersize=2.5, **JAX_STYLE)
    value_axis.set_title(_title(config), loc="left", fontsize=11, pad=20)
    for axis, dtype, unit, half_range in zip(
        difference_axes, ("float32", "float64"), (1e-7, 1e-16), (2.4, 5.0), strict=True
    ):
        difference = samples.difference(dtype)
        largest = np.abs(difference).max()
        axis.axhline(0.0, color="0.6", linewidth=0.8)
        axis.plot(samples.steps, difference / unit, markersize=2.5 if every == 1 else 1.5, **DIFFERENCE_STYLE)
        axis.set_title(f"torch - JAX, {dtype}", loc="left", fontsize=9, pad=4)
        axis.set_title(f"largest {largest:.1e} of the peak", loc="right", fontsize=9, pad=4)
        # one scale for all schedules, unless a difference would fall outside it
        axis.set_ylim(-max(half_range, 1.1 * largest / unit), max(half_range, 1.1 * largest / unit))
    for bound in (-FLOAT32_BOUND, FLOAT32_BOUND):
        difference_axes[0].axhline(bound / 1e-7, color="0.4", linewidth=0.8, linestyle="--")
    difference_axes[1].set_xlabel("step [updates done]")
    difference_axes[1].set_xlim(-0.015 * last, last)
    _mark_phases(axes, config, last)


def _mark_phases(axes: Sequence[Axes], config: Mapping[str, Any], last: int) -> None:
    """Dotted lines where a phase ends, its name above it where there is room."""
    edges = [0, *boundaries(config), last]
    for name, group in groupby(pairwise(edges), lambda span: phase(config, sum(span) / 2).partition(",")[0]):
        members = list(group)
        start, end = members[0][0], members[-1][1]
        if end < last:
            for axis in axes:
                axis.axvline(end, color="0.5", linewidth=0.8, linestyle=":")
        if end - start > 0.013 * len(name) * last:
            axes[0].annotate(
                name,
                ((start + end) / 2, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=9,
                color="0.35",
            )


def _title(config: Mapping[str, Any]) -> str:
    name = config["lr_scheduler_type"]
    return f"{name}, {config['decay_type']} decay" if "decay_type" in config else name


def draw_or_explain(config: Mapping[str, Any]) -> None:
    """draw for sliders: where the library refuses ``config`` its message takes the picture's place."""
    message = refusal(config)
    if message is None:
        draw(config)
    else:
        print("\n".join(textwrap.fill(line, width=90, break_on_hyphens=False) for line in message.splitlines()))


def steps_slider(value: int, most: int, least: int = 0) -> widgets.IntSlider:
    """A slider for a number of updates; it acts when it is let go."""
    return widgets.IntSlider(value, least, most, continuous_update=False)


def factor_slider(value: float, most: float = 1.5) -> widgets.FloatSlider:
    """A slider for a multiplier; it acts when it is let go."""
    return widgets.FloatSlider(value, min=0.0, max=most, step=0.01, continuous_update=False)


def show_sliders(control: widgets.interactive) -> None:
    """Display an ``interactive`` with its controls in two columns; a line of text where there is no kernel."""
    *controls, picture = control.children
    for child in controls:
        child.style.description_width = "130px"
        child.layout.width = "95%"
    columns = widgets.Layout(
        grid_auto_flow="column",
        grid_template_rows=f"repeat({math.ceil(len(controls) / 2)}, auto)",
        grid_template_columns="repeat(2, minmax(0, 1fr))",
    )
    grid = widgets.GridBox(controls, layout=columns)
    # kept open while the picture is replaced, so that the page does not jump
    picture.layout.min_height = "590px"
    box = widgets.VBox([grid, picture], layout=widgets.Layout(max_width="900px"))
    bundle = box._repr_mimebundle_()
    display({**bundle, "text/plain": "Sliders: run the notebook in JupyterLab to move them."}, raw=True)


def lr_table(config: Mapping[str, Any], base_lr: float, steps: Sequence[int] = ()) -> str:
    """lr from both sides at the first step, around every boundary and at ``steps``; or why there is none."""
    message = refusal(config)
    if message is not None:
        return message
    around = {math.floor(b) + offset for b in boundaries(config) for offset in (-1, 0, 1)}
    rows = sorted({0, *(n for n in around if n >= 0), *steps})
    lr = torch_schedule(config, base_lr)
    torch_lr = np.array([lr(n) for n in rows])
    jax_lr = np.asarray(base_lr * jax_impl.build_lr_schedule(**config)(np.array(rows)))
    peak = float(np.abs(torch_lr).max()) or 1.0
    lines = [f"{'step':>20}  {'phase':<18} {'lr torch':>16} {'lr JAX':>16} {'(torch - JAX)/peak':>20}"]
    for n, a, b in zip(rows, torch_lr, jax_lr, strict=True):
        lines.append(f"{n:>20,}  {phase(config, n):<18} {a:>16.9e} {b:>16.9e} {(a - float(b)) / peak:>20.1e}")
    return "\n".join(lines)
