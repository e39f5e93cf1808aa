"""Learning rate and weight decay, annealed together: pure functions of the step, and a count that can be saved.

Source of names and rules: OptimizerParamScheduler of NVIDIA's Megatron-LM and NeMo AutoModel (0.7.0).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import jax

from jax_impl.annealing import Annealing, read_state
from jax_impl.config import check_bool, check_integer


class OptimizerParamScheduler:
    """lr and weight decay as traceable functions of the step, with the state of the annealer of torch_impl.

    Args:
        init_lr, max_lr, min_lr: lr where the warm-up starts, where it ends, and after the decay.
        lr_warmup_steps, lr_decay_steps: where the linear warm-up and the decay end, both counted from step 0.
        lr_decay_style: "constant", "linear", "cosine", "inverse-square-root" or "WSD".
        start_wd, end_wd, wd_incr_steps: weight decay at step 0, and from ``wd_incr_steps`` on.
        wd_incr_style: "constant", "linear" or "cosine".
        use_checkpoint_opt_param_scheduler: a load takes the saved values.
        override_opt_param_scheduler: a load takes the count only. With neither, saved values must equal these.
        wsd_decay_steps, lr_wsd_decay_style: length of the decay that ends at ``lr_decay_steps``, and "linear",
            "cosine", "exponential" or "minus_sqrt"; "WSD" needs both.
        allow_decreasing_wd: accept ``end_wd < start_wd``.
        step_size: what one step of the functions counts, >= 1; the batch size where lengths are in samples.

    These values and ``num_steps`` are attributes.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range, or an unknown style.
    """

    def __init__(
        self,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: float,
        lr_decay_steps: float,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: float,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: float | None = None,
        lr_wsd_decay_style: str | None = None,
        *,
        allow_decreasing_wd: bool = False,
        step_size: int = 1,
    ) -> None:
        annealing = Annealing(
            init_lr=init_lr,
            max_lr=max_lr,
            min_lr=min_lr,
            lr_warmup_steps=lr_warmup_steps,
            lr_decay_steps=lr_decay_steps,
            lr_decay_style=lr_decay_style,
            start_wd=start_wd,
            end_wd=end_wd,
            wd_incr_steps=wd_incr_steps,
            wd_incr_style=wd_incr_style,
            wsd_decay_steps=wsd_decay_steps,
            lr_wsd_decay_style=lr_wsd_decay_style,
        )
        check_bool("use_checkpoint_opt_param_scheduler", use_checkpoint_opt_param_scheduler)
        check_bool("override_opt_param_scheduler", override_opt_param_scheduler)
        check_bool("allow_decreasing_wd", allow_decreasing_wd)
        if check_integer("step_size", step_size) < 1:
            raise ValueError(f"step_size must be >= 1, got {step_size}")
        if use_checkpoint_opt_param_scheduler and override_opt_param_scheduler:
            raise ValueError(
                "use_checkpoint_opt_param_scheduler must be False under override_opt_param_scheduler=True, got True"
            )
        if annealing.end_wd < annealing.start_wd and not allow_decreasing_wd:
            raise ValueError(f"end_wd must be >= start_wd {start_wd!r} without allow_decreasing_wd, got {end_wd!r}")
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.step_size = step_size
        self.num_steps = 0
        self.in_use = False  # by a transform, whose compiled step keeps the values
        self._annealing = annealing

    def __getattr__(self, name: str) -> Any:
        """The values of the annealing."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._annealing, name)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.state_dict().items())
        return f"{type(self).__name__}({values})"

    def learning_rate(self, step: Any, *, max_lr: Any = None, min_lr: Any = None) -> jax.Array:
        """lr after ``step`` steps of ``step_size``, for ``jit`` and ``vmap``, with x64 on and off.

        Args:
            step: a number of any size, a traced scalar or an array; the result has its shape.
            max_lr, min_lr: bounds of a group, in place of the annealer's.
        """
        return self._annealing.learning_rate(step, self.step_size, max_lr=max_lr, min_lr=min_lr)

    def weight_decay(self, step: Any) -> jax.Array:
        """Weight decay after ``step`` steps, likewise."""
        return self._annealing.weight_decay(step, self.step_size)

    def step(self, increment: int = 1) -> None:
        """Count ``increment`` more steps (updates, samples). The functions of the step do not depend on the count.

        Raises:
            TypeError: ``increment`` is no integer.
        """
        self.num_steps += check_integer("increment", increment)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings: the step count and everything that lr and decay depend on."""
        return {"num_steps": self.num_steps, **asdict(self._annealing)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the saved count. Loading again changes nothing.

        Args:
            state_dict: what ``state_dict()`` gave here, in torch_impl or in the reference systems, with its older keys
                too. What it does not have (decay, ``init_lr``, the arguments of "WSD") stays as it is.

        Raises:
            TypeError: no mapping, or a value of the wrong type.
            ValueError: keys missing or unknown, values out of range; values that differ from these, unless one of
                the two is to win, or after a transform was built with them. Nothing has changed then.
        """
        num_steps, saved = read_state(state_dict)
        annealing = self._annealing
        if not self.override_opt_param_scheduler:
            ours = asdict(annealing)
            different = [f"{k} is {saved[k]!r} there and {ours[k]!r} here" for k in saved if saved[k] != ours[k]]
            if different and not self.use_checkpoint_opt_param_scheduler:
                raise ValueError(f"the state was saved by another annealer: {'; '.join(different)}")
            annealing = replace(annealing, **saved)
        if self.in_use and annealing != self._annealing:
            raise ValueError(
                "a transform was built with this annealer, and its compiled step keeps the old values: load before "
                "build_optimizer, or build the transform again with a new annealer"
            )
        self._annealing, self.num_steps = annealing, num_steps

    def branch_from(self, step: float, *, decay_steps: float, decay_type: str | None = None) -> OptimizerParamScheduler:
        """The annealer that leaves this one's stable phase at ``step``: the same before, then a decay to ``min_lr``.

        It is at the same count.

        Args:
            step: where the decay starts; "WSD" is stable from warm-up to decay, "constant" from the warm-up on.
            decay_steps: length of the decay, >= 1.
            decay_type: as ``lr_wsd_decay_style``; None keeps this annealer's.

        Raises:
            ValueError: ``step`` is outside the stable phase, or there is none.
        """
        branch = copy.copy(self)
        branch.in_use = False
        branch._annealing = self._annealing.branch_from(step, decay_steps=decay_steps, decay_type=decay_type)
        return branch
