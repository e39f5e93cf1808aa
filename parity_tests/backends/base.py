"""What the harness asks of a side: start a case, take gradients, show everything that it computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from parity_tests.cases import Case

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Precision:
    """dtypes of a run: of parameters and of the Newton-Schulz products, by name."""

    params: str
    ns: str


@dataclass(frozen=True)
class Record:
    """One side after one update; float64 copies under torch's names and in torch's layouts.

    Attributes:
        params: {name: value}.
        updates: {name: value after minus value before}, of the master where there is one.
        state: {name: {"exp_avg", "exp_avg_sq", "momentum_buffer", "step", "master_param"}}, what a role has of
            them; zeros where nothing has been accumulated yet; a parameter that is not optimized is missing.
        learning_rates: {name: base lr of its group times the schedule, as used in this update}.
    """

    params: Arrays
    updates: Arrays
    state: dict[str, Arrays]
    learning_rates: dict[str, float]


class Run(Protocol):
    """A case in progress on one side."""

    def step(self, grads: Mapping[str, np.ndarray | None]) -> Record:
        """One update from these gradients, in torch's layouts."""

    def load(self, params: Arrays, state: Mapping[str, Arrays]) -> None:
        """Replace parameters and optimizer state; the schedule goes on by itself."""


class Backend(Protocol):
    """A side."""

    name: str

    def start(self, case: Case, precision: Precision) -> Run:
        """A fresh run of ``case``."""


def optimizer_kwargs(case: Case, precision: Precision) -> dict:
    """Keywords of build_optimizer for a case in this precision."""
    kwargs = {**case.kwargs, "fused": True}
    if case.optimizer_type == "muonwithauxadamw":
        kwargs["ns_dtype"] = precision.ns
    return kwargs
