"""torch_impl as a side of the harness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torch_impl
from parity_tests.backends.base import Arrays, Precision, Record, optimizer_kwargs
from parity_tests.cases import ANNEALED, Case
from parity_tests.problems import Problem
from torch_impl.schedules import SCHEDULERS

torch.set_float32_matmul_precision("highest")  # no TF32
torch.backends.cuda.matmul.allow_tf32 = False


def build_model(problem: Problem) -> nn.Module:
    """The problem's modules under their dotted names, float32."""
    root = nn.Module()
    for name, kind, *args in problem.modules:
        *parents, leaf = name.split(".")
        owner = root
        for part in parents:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if kind == "Linear":
            owner.add_module(leaf, nn.Linear(args[0], args[1], bias=bool(args[2])))
        elif kind == "Param":
            owner.register_parameter(leaf, nn.Parameter(torch.zeros(args)))
        else:
            owner.add_module(leaf, getattr(nn, kind)(*args))
    for alias, name in problem.tied.items():
        owner_name, _, leaf = alias.rpartition(".")
        root.get_submodule(owner_name).register_parameter(leaf, root.get_parameter(name))
    for name in problem.frozen:
        root.get_parameter(name).requires_grad_(False)
    return root


class TorchRun:
    """A model, its optimizers and its scheduler; see base.Run."""

    def __init__(self, case: Case, precision: Precision, device: str) -> None:
        dtype = getattr(torch, precision.params)
        model = build_model(case.problem).to(device=device, dtype=dtype)
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._set_params(case.problem.initial())
        self.optimizers = torch_impl.build_optimizer(model, case.optimizer_type, **optimizer_kwargs(case, precision))
        self.scheduler = None
        if case.schedule is not None:
            self.scheduler = torch_impl.build_lr_scheduler(self.optimizers, case.schedule[0], **case.schedule[1])
        self.orthogonalized = {route.name for route in self.optimizers.describe() if route.role in ("matrix", "expert")}
        self.owners = {
            name: (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for name, p in self.params.items()
            if any(p is q for q in group["params"])
        }

    def step(self, grads: Mapping[str, np.ndarray | None]) -> Record:
        for name, p in self.params.items():
            g = grads[name] if p.requires_grad else None
            p.grad = None if g is None else torch.tensor(g, device=p.device, dtype=p.dtype)
        rates = {name: float(group["lr"]) for name, (_, group) in self.owners.items()}
        before = self._masters()
        self.optimizers.step()
        if self.scheduler is not None:
            self.scheduler.step()
        after = self._masters()
        return Record(
            params={name: to_numpy(p) for name, p in self.params.items()},
            updates={name: after[name] - before[name] for name in after},
            state={name: self._state_of(name) for name in self.owners},
            learning_rates=rates,
        )

    def load(self, params: Arrays, state: Mapping[str, Arrays]) -> None:
        self._set_params(params)
        for name, (optimizer, group) in self.owners.items():
            values = dict(state[name])
            step = float(values.pop("step"))
            p = self.params[name]
            optimizer.state[p] = {
                key: torch.tensor(value, device=p.device, dtype=self._state_dtype(name))
                for key, value in values.items()
            }
            if "step" in group:
                group["step"].fill_(step)
            else:
                optimizer.state[p]["step"] = torch.tensor(step, dtype=torch.float32, device=p.device)

    def _set_params(self, params: Arrays) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(torch.tensor(params[name]))

    def _state_dtype(self, name: str) -> torch.dtype:
        """torch's own Adam keeps moments in the parameter's dtype, the others in float32 or wider."""
        p = self.params[name]
        return p.dtype if "step" not in self.owners[name][1] or p.dtype == torch.float64 else torch.float32

    def _masters(self) -> Arrays:
        masters = {
            name: optimizer.state[self.params[name]].get("master_param") for name, (optimizer, _) in self.owners.items()
        }
        return {name: to_numpy(p if masters.get(name) is None else masters[name]) for name, p in self.params.items()}

    def _state_of(self, name: str) -> Arrays:
        optimizer, group = self.owners[name]
        p = self.params[name]
        state = optimizer.state[p]
        keys = ["momentum_buffer"] if name in self.orthogonalized else ["exp_avg", "exp_avg_sq"]
        values = {key: to_numpy(state[key]) if key in state else np.zeros(p.shape) for key in keys}
        if "master_param" in state:
            values["master_param"] = to_numpy(state["master_param"])
        step = group["step"] if "step" in group else state.get("step", 0.0)
        return values | {"step": np.asarray(float(step))}


def to_numpy(x: Tensor) -> np.ndarray:
    """float64 copy on the host."""
    return x.detach().to("cpu", torch.float64, copy=True).numpy()


class TorchBackend:
    """torch_impl on a device."""

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def start(self, case: Case, precision: Precision) -> TorchRun:
        return TorchRun(case, precision, self.device)


def schedule_values(lr_scheduler_type: str, kwargs: Mapping[str, Any], steps: list[int]) -> np.ndarray:
    """Multipliers as a LambdaLR would ask for them; of ANNEALED, what the annealer leaves in a group."""
    if lr_scheduler_type in ANNEALED:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, weight_decay=1.0)
        scheduler = torch_impl.OptimizerParamScheduler(optimizer, **kwargs)
        found = []
        for n in steps:
            scheduler.step(n - scheduler.num_steps)
            found.append(optimizer.param_groups[0][ANNEALED[lr_scheduler_type]])
        return np.array(found)
    schedule = SCHEDULERS[lr_scheduler_type](**kwargs)
    return np.array([schedule(n) for n in steps])
