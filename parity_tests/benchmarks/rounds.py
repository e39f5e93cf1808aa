"""What all benchmarks share: workloads, two sides that take turns, ratios of their times, a table.

A machine that slows down slows both sides of a round, so what counts is the median of the ratios of the rounds. Only
one framework is imported in a process: their thread pools would fight.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Shapes = Mapping[str, tuple[int, ...]]


def gpt2_small(blocks: int = 12) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters, kernels as (in, out): 124 million in 12 blocks."""
    block = {"qkv": (768, 2304), "out": (768, 768), "up": (768, 3072), "down": (3072, 768)}
    vectors = {name: (768,) for name in ("scale1", "bias1", "scale2", "bias2")}
    layers = {f"{b}.{name}": shape for b in range(blocks) for name, shape in {**block, **vectors}.items()}
    return {"embed": (50304, 768), **layers}


class Result(NamedTuple):
    """Medians of a row; ``ratio`` is ours over the other, with its quartiles over the rounds."""

    name: str
    ours_ms: float
    other_ms: float
    ratio: float
    quartiles: tuple[float, float]


def compare(name: str, ours: Callable[[], object], other: Callable[[], object], rounds: int) -> Result:
    """Both sides in turn, ``rounds`` times, after two calls to warm up; who begins changes from round to round.

    Args:
        ours, other: one step, finished when the call returns.
    """
    sides = (ours, other)
    for side in sides:
        side()
        side()
    times = np.empty((rounds, 2))
    for r in range(rounds):
        for k in (0, 1) if r % 2 else (1, 0):
            started = time.perf_counter()
            sides[k]()
            times[r, k] = (time.perf_counter() - started) * 1e3
    first, ratio, third = np.percentile(times[:, 0] / times[:, 1], [25, 50, 75])
    ours_ms, other_ms = np.median(times, axis=0)
    return Result(name, float(ours_ms), float(other_ms), float(ratio), (float(first), float(third)))


def arguments(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """--rounds and --json, as every benchmark has them."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds a row (default: {rounds})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def report(title: str, results: Sequence[Result], as_json: bool) -> None:
    if as_json:
        print(json.dumps([result._asdict() for result in results], indent=1))
        return
    print(title)
    print(f"{'ours against':52}{'ms':>8}{'other':>8}{'ratio':>8}  quartiles")
    for r in results:
        low, high = r.quartiles
        print(f"{r.name:52}{r.ours_ms:8.2f}{r.other_ms:8.2f}{r.ratio:8.3f}  {low:.3f} to {high:.3f}")
