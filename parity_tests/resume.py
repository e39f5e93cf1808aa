"""``python -m parity_tests.resume``: k steps, save, load into fresh objects, k more steps equal 2k steps bit for bit.

A table an optimizer type and dtype; a row is an order of building and loading, a column a format. The sides run one
after the other, in processes of their own.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from parity_tests.processes import ENVIRONMENT

K = 6  # steps before and after the save
SCHEDULE: dict[str, Any] = dict(warm_up_steps=3, total_steps=14, decay_steps=6, f_start=0.1, f_max=1.0, f_min=0.0)
COMMON = {"lr": 0.05, "fused": True, "weight_decay": 0.1, "lr_multipliers": {"fc": 0.5}}
EXTRA: dict[str, dict[str, Any]] = {"muonwithauxadamw": {"expert_param_keywords": ["experts"]}}
ORDER_WIDTH = 52  # characters
SIDES = {"torch": "parity_tests.backends.torch_resume", "jax": "parity_tests.backends.jax_resume"}


class Cells(Protocol):
    """All cells of one optimizer type and dtype: they share the uninterrupted run and the saved states."""

    FORMATS: Mapping[str, Any]
    ORDERS: Sequence[str]

    def difference(self, fmt: str, order: str) -> str | None:
        """Name of the first tensor or value that differs from the uninterrupted run after 2k steps."""


def keywords(optimizer_type: str) -> dict[str, Any]:
    """Of build_optimizer, on both sides: two groups by lr_multipliers."""
    return {**COMMON, **EXTRA.get(optimizer_type, {})}


def differences(cells: Cells) -> dict[tuple[str, str], str | None]:
    """{(order, format): None, or what differs}; an error is a difference."""
    found: dict[tuple[str, str], str | None] = {}
    for order, fmt in itertools.product(cells.ORDERS, cells.FORMATS):
        try:
            found[order, fmt] = cells.difference(fmt, order)
        except Exception as error:  # the other cells are to be seen, too
            found[order, fmt] = f"{type(error).__name__}: {error}"
    return found


def print_matrix(side: str, device: str) -> bool:
    """Whether all cells of one side are equal."""
    backend = importlib.import_module(SIDES[side])
    wrong = []
    for label, arguments in backend.ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            cells = backend.Cells(*arguments, device, Path(folder))
            found = differences(cells)
        print(f"\n{side} {label}\n{'':{ORDER_WIDTH}}{'  '.join(cells.FORMATS)}")
        for order in cells.ORDERS:
            marks = [("equal" if found[order, fmt] is None else "DIFFERS").ljust(len(fmt)) for fmt in cells.FORMATS]
            print(f"{order:{ORDER_WIDTH}}{'  '.join(marks)}".rstrip(), flush=True)
        wrong += [f"{side} {label} | {fmt} | {order}: {x}" for (order, fmt), x in found.items() if x is not None]
    print("", *wrong, sep="\n")
    return not wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m parity_tests.resume", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the frameworks run")
    parser.add_argument("--side", choices=SIDES, help="one side only, in this process")
    options = parser.parse_args(arguments)
    if options.side:
        return 0 if print_matrix(options.side, options.device) else 1
    command = [sys.executable, "-m", "parity_tests.resume", "--device", options.device, "--side"]
    environment = {**os.environ, **ENVIRONMENT}
    if options.device == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    codes = [subprocess.run([*command, side], env=environment, check=False).returncode for side in SIDES]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
