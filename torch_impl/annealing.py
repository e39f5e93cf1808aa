"""Learning rate and weight decay as functions of the steps done: what OptimizerParamScheduler drives.

Source of names and formulas: OptimizerParamScheduler of NVIDIA's Megatron-LM and NeMo AutoModel (0.7.0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch_impl.config import check_integer, check_real, plain

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
LR_WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")

# names in older states; where two mean the same, the later one wins
_LEGACY_KEYS = {
    "start_lr": "max_lr",
    "warmup_steps": "lr_warmup_steps",
    "warmup_iter": "lr_warmup_steps",
    "decay_steps": "lr_decay_steps",
    "end_iter": "lr_decay_steps",
    "decay_style": "lr_decay_style",
    "num_iters": "num_steps",
}
_LR_KEYS = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "num_steps")
_WD_KEYS = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")  # all or none: older states have no decay
# what a state may lack, such that it is right with any other values
_HARMLESS: dict[str, Any] = {
    "init_lr": 0.0,
    "start_wd": 0.0,
    "end_wd": 0.0,
    "wd_incr_steps": 0,
    "wd_incr_style": "constant",
    "wsd_decay_steps": 0,
    "lr_wsd_decay_style": "linear",
}


@dataclass(frozen=True, kw_only=True)
class Annealing:
    """lr: a linear warm-up, then a decay; weight decay: a monotone change. Checked, and immutable.

    Lengths are in steps, both lr lengths counted from step 0; they need not be whole.
    """

    init_lr: float
    """Where the warm-up starts."""
    max_lr: float
    """Where the warm-up ends, inclusive; the lr of step 0 without a warm-up."""
    min_lr: float
    """The lr after ``lr_decay_steps``, except under "constant"."""
    lr_warmup_steps: float
    lr_decay_steps: float
    lr_decay_style: str
    start_wd: float
    end_wd: float
    """The decay after ``wd_incr_steps``."""
    wd_incr_steps: float
    wd_incr_style: str
    wsd_decay_steps: float | None = None
    """Length of the decay that ends at ``lr_decay_steps``, for "WSD"."""
    lr_wsd_decay_style: str | None = None

    def __post_init__(self) -> None:
        for name in ("init_lr", "max_lr", "min_lr", "start_wd", "end_wd"):
            object.__setattr__(self, name, check_real(name, getattr(self, name)))
        for name in ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps", "wsd_decay_steps"):
            if name != "wsd_decay_steps" or self.wsd_decay_steps is not None:
                steps = check_real(name, getattr(self, name))
                object.__setattr__(self, name, int(steps) if steps.is_integer() else steps)
        _check_style("lr_decay_style", self.lr_decay_style, LR_DECAY_STYLES)
        _check_style("wd_incr_style", self.wd_incr_style, WD_INCR_STYLES)
        if self.lr_decay_style == "WSD" and self.wsd_decay_steps is None:
            raise ValueError("wsd_decay_steps must be a number under lr_decay_style 'WSD', got None")
        if self.lr_decay_style == "WSD" or self.lr_wsd_decay_style is not None:
            _check_style("lr_wsd_decay_style", self.lr_wsd_decay_style, LR_WSD_DECAY_STYLES)
        for name in ("init_lr", "min_lr"):
            if getattr(self, name) > self.max_lr:
                raise ValueError(f"{name} must be <= max_lr {self.max_lr!r}, got {getattr(self, name)!r}")
        if self.lr_decay_steps <= self.lr_warmup_steps:
            raise ValueError(
                f"lr_decay_steps must be > lr_warmup_steps {self.lr_warmup_steps}, got {self.lr_decay_steps}"
            )
        if self.wd_incr_style != "constant" and self.wd_incr_steps == 0:
            raise ValueError(f"wd_incr_steps must be > 0 under wd_incr_style {self.wd_incr_style!r}, got 0")
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            raise ValueError(
                f"end_wd must be start_wd {self.start_wd!r} under wd_incr_style 'constant', got {self.end_wd!r}"
            )

    def learning_rate(self, step: float, *, max_lr: float | None = None, min_lr: float | None = None) -> float:
        """lr after ``step`` steps; ``max_lr`` and ``min_lr`` replace the annealing's own."""
        max_lr = self.max_lr if max_lr is None else max_lr
        min_lr = self.min_lr if min_lr is None else min_lr
        warm_up, end = self.lr_warmup_steps, self.lr_decay_steps
        if 0 < warm_up >= step:
            return self.init_lr + (max_lr - self.init_lr) * step / warm_up
        if self.lr_decay_style == "constant":
            return max_lr
        if step > end:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(warm_up, 1)) / math.sqrt(max(step, 1)))
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None
            start = end - self.wsd_decay_steps
            left = 1.0 if step <= start else _left((step - start) / self.wsd_decay_steps, self.lr_wsd_decay_style)
        else:
            left = _left((step - warm_up) / (end - warm_up), self.lr_decay_style)
        return min_lr + left * (max_lr - min_lr)

    def weight_decay(self, step: float) -> float:
        """Weight decay after ``step`` steps."""
        if self.wd_incr_style == "constant" or step > self.wd_incr_steps:
            return self.end_wd
        x = step / self.wd_incr_steps
        done = x if self.wd_incr_style == "linear" else _left(1.0 - x, "cosine")
        return self.start_wd + done * (self.end_wd - self.start_wd)

    def branch_from(self, step: float, *, decay_steps: float, decay_type: str | None = None) -> Annealing:
        """See OptimizerParamScheduler.branch_from."""
        ends = {"constant": math.inf, "WSD": self.lr_decay_steps - (self.wsd_decay_steps or 0)}
        if self.lr_decay_style not in ends:
            raise ValueError(f"lr_decay_style must be one of {tuple(ends)} to branch, got {self.lr_decay_style!r}")
        first, last = self.lr_warmup_steps, ends[self.lr_decay_style]
        if not first <= check_real("step", step) <= last:
            raise ValueError(f"step must be in the stable phase, {first} to {last}, got {step!r}")
        if check_real("decay_steps", decay_steps) < 1:
            raise ValueError(f"decay_steps must be >= 1, got {decay_steps!r}")
        return replace(
            self,
            lr_decay_style="WSD",
            lr_decay_steps=step + decay_steps,
            wsd_decay_steps=decay_steps,
            lr_wsd_decay_style=self.lr_wsd_decay_style if decay_type is None else decay_type,
        )


def read_state(state_dict: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The step count and the fields of a saved state, under the names of Annealing.

    Raises:
        TypeError: no mapping, or the count is no integer.
        ValueError: keys missing or unknown, or values that no annealer has.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping, got {state_dict!r}")
    saved = {key: plain(value) for key, value in state_dict.items() if key not in _LEGACY_KEYS}
    saved |= {new: plain(state_dict[old]) for old, new in _LEGACY_KEYS.items() if old in state_dict}
    needed = (*_LR_KEYS, *(_WD_KEYS if any(key in saved for key in _WD_KEYS) else ()))
    missing = [key for key in needed if key not in saved]
    unknown = sorted(set(saved) - {"num_steps", *(field.name for field in fields(Annealing))})
    if missing or unknown:
        raise ValueError(f"state_dict must be that of an annealer: missing {missing}, unknown {unknown}")
    num_steps = check_integer("num_steps", saved.pop("num_steps"))
    Annealing(**{**_HARMLESS, **saved})
    return num_steps, saved


def _check_style(argument: str, value: Any, styles: tuple[str, ...]) -> None:
    if value not in styles:
        raise ValueError(f"{argument} must be one of {styles}, got {value!r}")


def _left(x: float, style: str | None) -> float:
    """What is left of the decay after the share ``x`` of its length: 1 at x = 0, 0 at x = 1."""
    if style == "linear":
        return 1.0 - x
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * x) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**x - 1.0
    assert style == "minus_sqrt"
    return 1.0 - math.sqrt(x)
