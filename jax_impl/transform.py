"""An optax transform that knows its config, and its state: what a resume, a branch or an override needs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_impl.checkpoints import match
from jax_impl.config import check_integer, check_real, config_hash
from jax_impl.group_schedules import Schedules
from jax_impl.group_state import hyperparameters, set_fields


class OptimizerState(NamedTuple):
    """``config_hash``: uint32 (8,), sha256 of the effective config; ``inner``: of ``optax.multi_transform``."""

    config_hash: jax.Array
    inner: Any


class OptimizerTransform(optax.GradientTransformationExtraArgs):  # type: ignore[misc]  # optax is untyped here
    """What build_optimizer returns: ``init`` and ``update`` as any optax transform has them, and its config.

    The methods take any tree that holds this transform's state: one wrapped by ``optax.chain`` or
    ``optax.MultiSteps``, the ``opt_state`` of an ``nnx.Optimizer``, a dict or ``TrainState`` with the parameters too.
    """

    _config: Mapping[str, Any]
    _hash: np.ndarray
    _schedules: Schedules

    @classmethod
    def wrap(
        cls,
        inner: optax.GradientTransformationExtraArgs,
        config: Mapping[str, Any],
        schedules: Schedules,
    ) -> OptimizerTransform:
        """``inner``, built with ``schedules``, with the hash of ``config`` in its state."""
        digest = np.frombuffer(bytes.fromhex(config_hash(config)), ">u4")

        def init(params: Any) -> OptimizerState:
            return OptimizerState(jnp.asarray(digest, jnp.uint32), inner.init(params))

        def update(grads: Any, state: OptimizerState, params: Any = None, **extra: Any) -> tuple[Any, OptimizerState]:
            updates, inner_state = inner.update(grads, state.inner, params, **extra)
            return updates, state._replace(inner=inner_state)

        transform = cls(init, update)
        transform._config = config
        transform._hash = digest
        transform._schedules = schedules
        schedules.take()
        return transform

    def effective_config(self) -> dict[str, Any]:
        """Every keyword in force, defaults included, as JSON holds it; equal to that of torch_impl."""
        return copy.deepcopy(dict(self._config))

    def restore(self, target: Any, saved: Any, *, override: bool = False) -> Any:
        """What was saved, in the structure of ``target``: same node types, dtypes and devices, so nothing is retraced.

        Args:
            target: a tree that holds a state fresh from ``init``, or from ``jax.eval_shape(init, params)``.
            saved: the same leaves in any containers, with the same names: what load_checkpoint, orbax (with or
                without a target) or flax.serialization gave back. Arrays are copied.
            override: go on with this transform's hyperparameters, groups and schedules where they differ from the saved
                ones.

        float32 masters that were not saved are those of ``target``, made from its parameters.

        Raises:
            ValueError: other names, shapes or dtypes; a base lr or decay that is negative or not finite; another config
                than this transform's, without ``override``.
        """
        restored = match(target, saved, config_hash=self._hash, override=override)
        return self._with_factors(restored) if override else restored

    def set_hyperparameters(
        self,
        opt_state: Any,
        *,
        step: int | None = None,
        base_lr: float | Mapping[int, float] | None = None,
        base_weight_decay: float | Mapping[int, float] | None = None,
    ) -> Any:
        """``opt_state`` with another position in the schedule, base lr or decay, of the same structure and dtypes.

        Args:
            opt_state: is left as it is.
            step: updates done, the argument of the schedules; the step counts of bias corrections stay.
            base_lr, base_weight_decay: what the schedules multiply; a number for all groups, or {group: number}.

        Raises:
            TypeError, ValueError: a value that is no number >= 0, a group that does not exist.
        """
        if step is not None and check_integer("step", step) > jnp.iinfo(jnp.int32).max:
            raise ValueError(f"step must fit a 32-bit count, got {step!r}")
        largest = float(jnp.finfo(jnp.result_type(float)).max)
        given = {"step": step, "base_lr": base_lr, "base_weight_decay": base_weight_decay}
        for name, value in given.items():
            for number in value.values() if isinstance(value, Mapping) else [0 if value is None else value]:
                if check_real(name, number) > largest:
                    raise ValueError(f"{name} must be at most {largest}, got {number!r}")
        given["schedule_count"] = given.pop("step")
        return self._with_factors(set_fields(opt_state, {k: v for k, v in given.items() if v is not None}))

    def _with_factors(self, opt_state: Any) -> Any:
        groups = hyperparameters(opt_state)
        factors = {group: self._schedules.factors(group, jnp.asarray(at.step)) for group, at in groups.items()}
        fields = zip(("lr_factor", "weight_decay_factor"), zip(*factors.values(), strict=True), strict=True)
        return set_fields(opt_state, {name: dict(zip(groups, values, strict=True)) for name, values in fields})
