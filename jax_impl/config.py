"""Every keyword of build_optimizer with its default and its check, one frozen dataclass an optimizer type."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import math
import numbers
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax

from jax_impl.newton_schulz import NS_DTYPES, Triple, resolve_coefficients


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Keywords that every optimizer type takes."""

    lr: float
    """Base learning rate, >= 0; a schedule multiplies it."""
    fused: bool = True
    """True: the update is one jitted function anyway; accepted so that one config serves both sides."""
    keys_to_select: tuple[str, ...] = ()
    """Substrings of the names of the parameters to optimize; the others are frozen. Empty: all."""
    lr_multipliers: Mapping[str, float] = field(default_factory=dict)
    """{substring of a name: factor >= 0}; the first entry that matches wins, in insertion order."""
    disable_weight_decay_for_1d_params: bool = False
    """No decay for parameters with fewer than two dimensions."""
    weight_decay: float = 0.0
    """Decay coefficient, >= 0."""
    eps: float = 1e-8
    """Added to the root of the second moment, >= 0."""

    def __post_init__(self) -> None:
        if self.fused is not True:
            raise ValueError(f"fused must be True or left out: there is no other kind here; got {self.fused!r}")
        self._set(
            keys_to_select=_strings("keys_to_select", self.keys_to_select),
            lr_multipliers=_multipliers(self.lr_multipliers),
            **{name: check_real(name, getattr(self, name)) for name in ("lr", "weight_decay", "eps")},
        )
        check_bool("disable_weight_decay_for_1d_params", self.disable_weight_decay_for_1d_params)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class AdamConfig(OptimizerConfig):
    """Adam with L2 regularization: the decay is added to the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment, each in [0, 1)."""
    capturable: bool = False
    """Accepted so that one config serves both sides: lr is always part of the traced state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(betas=_betas("betas", self.betas))
        check_bool("capturable", self.capturable)


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(AdamConfig):
    """Adam with decoupled decay."""

    weight_decay: float = 0.01
    """Decay coefficient, >= 0."""


@dataclass(frozen=True, kw_only=True)
class FusedAdamConfig(OptimizerConfig):
    """Adam with a step count per group and float32 masters."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment, each in [0, 1)."""
    adam_w_mode: bool = True
    """Decoupled decay; False adds the decay to the gradient (L2)."""
    bias_correction: bool = True
    """Divide the moments by 1 - beta^step."""
    capturable: bool = True
    """Accepted so that one config serves both sides: lr is always part of the traced state."""
    master_weights: bool = True
    """Keep float32 masters of bfloat16 and float16 parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(betas=_betas("betas", self.betas))
        for name in ("adam_w_mode", "bias_correction", "capturable", "master_weights"):
            check_bool(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon on matrices, AdamW on the rest."""

    weight_decay: float = 0.1
    """Decay coefficient, >= 0, of matrices and of the AdamW side."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the moments of the AdamW side, each in [0, 1)."""
    muon_momentum: float = 0.95
    """Momentum of matrices, in [0, 1)."""
    muon_lr_scale: float = 0.2
    """Factor of the shape adjustment sqrt(max(fan_out, fan_in)), >= 0."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    ns_dtype: str = "bfloat16"
    """dtype of the Newton-Schulz products: "bfloat16", "float32" or "float64"."""
    ns_coefficients: str | Sequence[Triple] = "jordan"
    """Name of a set in NS_COEFFICIENTS, or triples (a, b, c)."""
    nesterov: bool = True
    """Orthogonalize gradient plus momentum instead of momentum."""
    expert_param_keywords: tuple[str, ...] = ()
    """Substrings of the names of raw (E, M, N) parameters that hold one matrix an expert."""
    adamw_module_keywords: tuple[str, ...] = ("lm_head", "embed_out", "output_layer")
    """Substrings of the names of modules whose matrices go to AdamW."""
    orthogonalize_skip_patterns: tuple[str, ...] = ()
    """Regular expressions; parameters whose names match one go to AdamW."""
    capturable: bool = True
    """Accepted so that one config serves both sides: lr is always part of the traced state."""
    master_weights: bool = True
    """Keep float32 masters of bfloat16 and float16 parameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            adam_betas=_betas("adam_betas", self.adam_betas),
            expert_param_keywords=_strings("expert_param_keywords", self.expert_param_keywords),
            adamw_module_keywords=_strings("adamw_module_keywords", self.adamw_module_keywords),
            orthogonalize_skip_patterns=_strings("orthogonalize_skip_patterns", self.orthogonalize_skip_patterns),
        )
        for pattern in self.orthogonalize_skip_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"orthogonalize_skip_patterns: {pattern!r} is no regular expression: {error}"
                ) from error
        self._set(
            muon_momentum=_check_fraction("muon_momentum", self.muon_momentum),
            muon_lr_scale=check_real("muon_lr_scale", self.muon_lr_scale),
        )
        if not isinstance(self.ns_coefficients, str):
            self._set(ns_coefficients=tuple(tuple(map(plain, triple)) for triple in self.ns_coefficients))
        resolve_coefficients(self.ns_coefficients, self.ns_steps)
        if not isinstance(self.ns_coefficients, str):
            self._set(ns_coefficients=tuple(tuple(map(float, triple)) for triple in self.ns_coefficients))
        if self.ns_dtype not in NS_DTYPES:
            raise ValueError(f"ns_dtype must be one of {sorted(NS_DTYPES)}, got {self.ns_dtype!r}")
        for name in ("nesterov", "capturable", "master_weights"):
            check_bool(name, getattr(self, name))


CONFIGS: dict[str, type[OptimizerConfig]] = {
    "adam": AdamConfig,
    "adamw": AdamWConfig,
    "fusedadam": FusedAdamConfig,
    "muonwithauxadamw": MuonConfig,
}


def parse_config(optimizer_type: str, kwargs: Mapping[str, Any]) -> OptimizerConfig:
    """Check the keywords of build_optimizer and fill in the defaults.

    Raises:
        NotImplementedError: unknown ``optimizer_type``.
        TypeError: unknown keyword, or a value of the wrong type.
        ValueError: ``lr`` missing, or a value out of range.
    """
    if not isinstance(optimizer_type, str):
        raise TypeError(f"optimizer_type must be a string, got {optimizer_type!r}")
    config_class = CONFIGS.get(optimizer_type.lower())
    if config_class is None:
        raise NotImplementedError(f"optimizer_type must be one of {sorted(CONFIGS)}, got {optimizer_type!r}")
    if "lr" not in kwargs:
        raise ValueError(f"{optimizer_type} needs lr=")
    check_keywords(optimizer_type, kwargs, inspect.signature(config_class).parameters)
    return config_class(**{name: plain(value) for name, value in kwargs.items()})


def effective_config(optimizer_type: str, config: OptimizerConfig) -> dict[str, Any]:
    """Every keyword in force as JSON holds it (lists, dicts in insertion order), behind "optimizer_type"."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return json.loads(json.dumps({"optimizer_type": optimizer_type.lower(), **values}))


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of an effective config, in hexadecimal; equal on both sides. The order of lr_multipliers counts."""
    return hashlib.sha256(json.dumps(config).encode()).hexdigest()


def check_keywords(owner: str, given: Iterable[str], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise TypeError for a keyword that ``owner`` does not take, with the nearest that it does, or that it lacks."""
    given = list(given)
    for name in given:
        if name not in parameters:
            nearest = difflib.get_close_matches(name, parameters, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{owner} has no argument {name!r}{hint} Valid: {', '.join(sorted(parameters))}")
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in given]
    if missing:
        raise TypeError(f"{owner} needs {', '.join(missing)}")


def plain(value: Any) -> Any:
    """An OmegaConf container, and a scalar of numpy, as plain Python values; anything else as it is."""
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        return value.item()
    if "omegaconf" in sys.modules:  # a container can only come from an imported package
        omegaconf = sys.modules["omegaconf"].OmegaConf
        if omegaconf.is_config(value):
            return omegaconf.to_container(value, resolve=True)
    return value


def check_real(argument: str, value: Any) -> float:
    """``value`` as a float, if it is a number that is finite and not negative."""
    value = plain(value)
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{argument} must be a number, got an array: a schedule or set_hyperparameters changes lr and decay of a "
            "running optimizer, which keeps them in its state; optax.inject_hyperparams is neither needed nor possible"
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{argument} must be finite and >= 0, got {value!r}")
    return float(value)


def _check_fraction(argument: str, value: Any) -> float:
    if check_real(argument, value) >= 1:
        raise ValueError(f"{argument} must be in [0, 1), got {value!r}")
    return float(value)


def check_integer(argument: str, value: Any) -> int:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be an integer, got {value!r}")
    return value


def check_bool(argument: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {value!r}")


def _betas(argument: str, value: Any) -> tuple[float, float]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise TypeError(f"{argument} must be a pair of numbers, got {value!r}")
    return (_check_fraction(argument, value[0]), _check_fraction(argument, value[1]))


def _strings(argument: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise TypeError(f"{argument} must be a list of strings, got {value!r}")
    return tuple(value)


def _multipliers(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"lr_multipliers must be a mapping of strings to numbers, got {value!r}")
    return {key: check_real(f"lr_multipliers[{key!r}]", multiplier) for key, multiplier in value.items()}
