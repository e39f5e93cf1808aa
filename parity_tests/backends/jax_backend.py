"""jax_impl as a side of the harness. Importing this module turns x64 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, GetAttrKey

import jax_impl
from parity_tests.backends.base import Arrays, Precision, Record, optimizer_kwargs
from parity_tests.cases import ANNEALED, Case
from parity_tests.problems import Parameter

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_default_matmul_precision", "highest")

FLAX_NAMES = {"linear": "kernel", "embedding": "embedding", "norm": "scale"}
STATE_KEYS = {"nu": "exp_avg_sq", "master": "master_param", "count": "step"}  # mu depends on the role


class Layout:
    """Names and storage of a problem's parameters on the JAX side: as Flax has them, or torch's own."""

    def __init__(self, case: Case) -> None:
        self.torch_layout = case.axes_by_kind
        self.parameters = {self.jax_name(p): p for p in case.problem.parameters}
        self.by_torch_name = {p.name: p for p in case.problem.parameters}

    def jax_name(self, parameter: Parameter) -> str:
        if self.torch_layout or parameter.kind not in FLAX_NAMES:
            return parameter.name
        return f"{parameter.name.removesuffix('.weight')}.{FLAX_NAMES[parameter.kind]}"

    def convert(self, parameter: Parameter, x: np.ndarray) -> np.ndarray:
        """From torch's layout to JAX's or back: a Dense kernel is transposed."""
        transposed = parameter.kind == "linear" and not self.torch_layout and np.ndim(x) == 2
        return x.T if transposed else x

    def matrix_axes(self, name: str, leaf: Any) -> jax_impl.MatrixAxes | None:
        return jax_impl.MatrixAxes(fan_out=0, fan_in=1) if self.parameters[name].kind == "linear" else None

    def tree(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Nested dict under JAX names from arrays under torch's."""
        root: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            *parents, leaf = name.split(".")
            owner = root
            for part in parents:
                owner = owner.setdefault(part, {})
            owner[leaf] = arrays[parameter.name]
        return root

    def flatten(self, tree: Any) -> Arrays:
        """float64 copies under torch's names, in torch's layouts."""
        flat = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            parameter = self.parameters[".".join(key.key for key in path)]
            flat[parameter.name] = self.convert(parameter, np.asarray(leaf, np.float64))
        return flat


class JaxRun:
    """Parameters, a transform and its state; see base.Run."""

    def __init__(self, case: Case, precision: Precision, device: jax.Device) -> None:
        self.layout = Layout(case)
        self.device = device
        self.dtype = jnp.dtype(precision.params)
        self.params = self._device_tree(case.problem.initial())
        schedule = None
        if case.schedule is not None:
            schedule = jax_impl.build_lr_schedule(case.schedule[0], **case.schedule[1])
        options = {"matrix_axes": self.layout.matrix_axes} if case.axes_by_kind else {}
        kwargs = optimizer_kwargs(case, precision) | options
        transform = jax_impl.build_optimizer(self.params, case.optimizer_type, lr_schedule=schedule, **kwargs)
        self.labels = {
            self.layout.parameters[route.name].name: f"{route.group}.{route.role}"
            for route in jax_impl.route_parameters(self.params, case.optimizer_type, **kwargs)
            if route.group is not None
        }
        self.opt_state = transform.init(self.params)

        @jax.jit
        def update(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
            updates, opt_state = transform.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self._update = update

    def step(self, grads: Mapping[str, np.ndarray | None]) -> Record:
        rates = {group: float(lr) for group, lr in jax_impl.learning_rates(self.opt_state).items()}
        before = self._masters()
        self.params, self.opt_state = self._update(self.params, self.opt_state, self._device_tree(grads))
        after = self._masters()
        return Record(
            params=self.layout.flatten(self.params),
            updates={name: after[name] - before[name] for name in after},
            state=self._state(),
            learning_rates={name: rates[int(label.split(".")[0])] for name, label in self.labels.items()},
        )

    def load(self, params: Arrays, state: Mapping[str, Arrays]) -> None:
        self.params = self._device_tree(params)

        def replace(path: tuple[Any, ...], leaf: Any) -> Any:
            key, names = self._locate(path)
            if key is None:
                return leaf
            parameter = self.layout.by_torch_name[names[0]]
            value = state[names[0]].get(key, params[names[0]])  # without a saved master it is the parameter
            return jnp.asarray(self.layout.convert(parameter, value), leaf.dtype, device=self.device)

        self.opt_state = jax.tree_util.tree_map_with_path(replace, self.opt_state)

    def _device_tree(self, arrays: Mapping[str, np.ndarray | None]) -> Any:
        def leaf(parameter: Parameter) -> Any:
            x = arrays[parameter.name]
            return None if x is None else jnp.asarray(self.layout.convert(parameter, x), self.dtype, device=self.device)

        return self.layout.tree({p.name: leaf(p) for p in self.layout.parameters.values()})

    def _locate(self, path: tuple[Any, ...]) -> tuple[str | None, list[str]]:
        """(torch's state key, torch names that share this leaf) of a leaf of the optimizer state."""
        fields = [i for i, key in enumerate(path) if isinstance(key, GetAttrKey) and key.name in ("mu", *STATE_KEYS)]
        if not fields:
            return None, []
        i = fields[-1]
        label = next(key.key for key in path if isinstance(key, DictKey))
        is_matrix = label.endswith((".matrix", ".expert"))
        key = STATE_KEYS.get(path[i].name) or ("momentum_buffer" if is_matrix else "exp_avg")
        if path[i + 1 :]:
            return key, [self.layout.parameters[".".join(k.key for k in path[i + 1 :])].name]
        return key, [name for name, own in self.labels.items() if own == label]

    def _state(self) -> dict[str, Arrays]:
        groups = {label: int(state.schedule_count) for label, state in self._group_states().items()}
        state: dict[str, Arrays] = {
            name: {"step": np.asarray(float(groups[label]))} for name, label in self.labels.items()
        }
        for path, leaf in jax.tree_util.tree_flatten_with_path(self.opt_state)[0]:
            key, names = self._locate(path)
            for name in names:
                assert key is not None
                state[name][key] = self.layout.convert(self.layout.by_torch_name[name], np.asarray(leaf, np.float64))
        return state

    def _group_states(self) -> dict[str, Any]:
        """{label: GroupState}."""
        is_group = lambda x: hasattr(x, "schedule_count")  # noqa: E731
        leaves = jax.tree_util.tree_flatten_with_path(self.opt_state, is_leaf=is_group)[0]
        return {next(key.key for key in path if isinstance(key, DictKey)): x for path, x in leaves if is_group(x)}

    def _masters(self) -> Arrays:
        masters = {name: values["master_param"] for name, values in self._state().items() if "master_param" in values}
        return self.layout.flatten(self.params) | masters


class JaxBackend:
    """jax_impl on a device."""

    name = "jax"

    def __init__(self, device: str = "cpu") -> None:
        self.device = jax.devices({"cpu": "cpu", "cuda": "gpu"}[device])[0]

    def start(self, case: Case, precision: Precision) -> JaxRun:
        return JaxRun(case, precision, self.device)


def schedule_values(lr_scheduler_type: str, kwargs: Mapping[str, Any], steps: list[int], dtype: str) -> np.ndarray:
    """Jitted multipliers at ``steps`` (int32 counts) with x64 on ("float64") or off ("float32")."""
    if lr_scheduler_type in ANNEALED:
        annealer = jax_impl.OptimizerParamScheduler(**kwargs)
        schedule = jax.jit(annealer.learning_rate if ANNEALED[lr_scheduler_type] == "lr" else annealer.weight_decay)
    else:
        schedule = jax.jit(jax_impl.build_lr_schedule(lr_scheduler_type, **kwargs))
    with jax.enable_x64(dtype == "float64"):
        return np.asarray(schedule(jnp.asarray(steps, jnp.int32)), np.float64)
