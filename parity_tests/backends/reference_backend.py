"""The oracle as a side: float64 throughout, whatever the precision of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from parity_tests import reference
from parity_tests.backends.base import Arrays, Precision, Record
from parity_tests.cases import Case
from parity_tests.problems import Parameter

DEFAULTS: dict[str, dict] = {
    "adam": {"weight_decay": 0.0, "betas": (0.9, 0.999)},
    "adamw": {"weight_decay": 0.01, "betas": (0.9, 0.999)},
    "fusedadam": {"weight_decay": 0.0, "betas": (0.9, 0.999)},
    "muonwithauxadamw": {
        "weight_decay": 0.1,
        "betas": (0.9, 0.95),
        "muon_momentum": 0.95,
        "muon_lr_scale": 0.2,
        "ns_steps": 5,
        "nesterov": True,
    },
}
ROUTING = ("expert_param_keywords", "adamw_module_keywords", "orthogonalize_skip_patterns")


@dataclass(frozen=True)
class Stages:
    """Every intermediate value of one parameter's update, in the order in which they are computed.

    Attributes:
        state: of the parameter after the update.
        direction: what is orthogonalized (matrices, experts); None for Adam.
        unscaled: Newton-Schulz of it, or Adam's direction.
        lr, decay, scaled_lr: learning rate, weight decay, lr times the shape adjustment.
        before, after: the parameter.
        active: mask of what moves; experts only.
    """

    state: Arrays
    direction: np.ndarray | None
    unscaled: np.ndarray
    lr: float
    decay: float
    scaled_lr: float
    before: np.ndarray
    after: np.ndarray
    active: np.ndarray | None = None


class ReferenceRun:
    """Holds parameters and state; see base.Run."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.options = {"eps": 1e-8, "lr_multipliers": {}, "keys_to_select": (), **DEFAULTS[case.optimizer_type]}
        self.options |= {"adam_w_mode": case.optimizer_type != "adam", "bias_correction": True, **case.kwargs}
        if "adam_betas" in self.options:
            self.options["betas"] = self.options["adam_betas"]
        self.updates_done = 0
        self.params = case.problem.initial()
        self.roles = {p.name: self._role(p) for p in case.problem.parameters if self._selected(p)}
        self.state = {name: self._empty_state(name) for name in self.roles}

    def _selected(self, parameter: Parameter) -> bool:
        return reference.is_selected(parameter.name, self.options["keys_to_select"])

    def _role(self, parameter: Parameter) -> str:
        if self.case.optimizer_type in ("adam", "adamw", "fusedadam"):
            return self.case.optimizer_type
        routing = {key: self.options[key] for key in ROUTING if key in self.options}
        return reference.role_of(parameter.name, parameter.kind, len(parameter.shape), **routing)

    def _empty_state(self, name: str) -> Arrays:
        keys = ("momentum_buffer",) if self.is_orthogonalized(name) else ("exp_avg", "exp_avg_sq")
        return {key: np.zeros_like(self.params[name]) for key in keys} | {"step": np.zeros(())}

    def is_orthogonalized(self, name: str) -> bool:
        return self.roles[name] in ("matrix", "expert")

    def counts_per_group(self) -> bool:
        return self.case.optimizer_type not in ("adam", "adamw")

    def lr(self, name: str, updates_done: int) -> float:
        schedule, kwargs = self.case.schedule or (None, {})
        base = reference.base_lr(name, self.options["lr"], self.options["lr_multipliers"])
        return base * reference.multiplier(updates_done, schedule, kwargs)

    def decay(self, name: str) -> float:
        flag = self.options.get("disable_weight_decay_for_1d_params", False)
        return reference.decay_of(self.params[name].ndim, self.options["weight_decay"], flag)

    def stages(self, name: str, p: np.ndarray, state: Arrays, g: np.ndarray, updates_done: int) -> Stages:
        """One update of one parameter from any start."""
        lr, decay, o = self.lr(name, updates_done), self.decay(name), self.options
        t = int(state["step"]) + 1
        if self.is_orthogonalized(name):
            M = reference.momentum(state["momentum_buffer"], g, o["muon_momentum"])
            active = None
            if self.roles[name] == "expert":
                active = reference.active_experts(g)
                M = np.where(active, M, state["momentum_buffer"])
            direction = reference.nesterov_direction(M, g, o["muon_momentum"], o["nesterov"])
            unscaled = reference.newton_schulz(direction, o["ns_steps"])
            scaled_lr = reference.adjusted_lr(lr, p.shape, o["muon_lr_scale"])
            after = reference.descend(p, unscaled, lr, decay, scaled_lr)
            after = after if active is None else np.where(active, after, p)
            new_state = {"momentum_buffer": M, "step": np.asarray(float(t))}
            return Stages(new_state, direction, unscaled, lr, decay, scaled_lr, p, after, active)
        if not o["adam_w_mode"]:
            g, decay = g + decay * p, 0.0
        m = reference.first_moment(state["exp_avg"], g, o["betas"][0])
        v = reference.second_moment(state["exp_avg_sq"], g, o["betas"][1])
        corrected_at = t if o["bias_correction"] else np.inf
        unscaled = reference.adam_direction(m, v, corrected_at, o["betas"], o["eps"])
        after = reference.descend(p, unscaled, lr, decay)
        new_state = {"exp_avg": m, "exp_avg_sq": v, "step": np.asarray(float(t))}
        return Stages(new_state, None, unscaled, lr, decay, lr, p, after)

    def step(self, grads: Mapping[str, np.ndarray | None]) -> Record:
        before = self.params
        self.params, self.state = dict(before), dict(self.state)
        for name in self.roles:
            g = grads[name]
            if g is not None:
                stages = self.stages(name, before[name], self.state[name], g, self.updates_done)
                self.params[name], self.state[name] = stages.after, stages.state
            elif self.counts_per_group():
                self.state[name] = {**self.state[name], "step": self.state[name]["step"] + 1}
        record = Record(
            params=self.params,
            updates={name: self.params[name] - before[name] for name in before},
            state=self.state,
            learning_rates={name: self.lr(name, self.updates_done) for name in self.roles},
        )
        self.updates_done += 1
        return record

    def load(self, params: Arrays, state: Mapping[str, Arrays]) -> None:
        self.state = {name: dict(values) for name, values in state.items()}
        masters = {name: values.pop("master_param") for name, values in self.state.items() if "master_param" in values}
        self.params = {**params, **masters}  # the oracle never rounds


class ReferenceBackend:
    """NumPy float64."""

    name = "reference"

    def start(self, case: Case, precision: Precision) -> ReferenceRun:
        return ReferenceRun(case)
