"""Random trainings: models, optimizers, groups, schedules and missing gradients, as hypothesis draws them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import assume, event
from hypothesis import strategies as st

from torch_impl.config import CONFIGS

TYPES = list(CONFIGS)
DTYPES = ("float32", "bfloat16", "float64")
KEYS = ("fc", "embed", "norm", "bias", "weight", "0.", "experts")


class Setup(NamedTuple):
    """All that a training is made of.

    Attributes:
        shapes: {name: shape}; the names decide the role on both sides.
        frozen: names with requires_grad=False; no parameters on the JAX side.
        meshes: {name: number of its stand-in device mesh}.
        missing: bits of (step, parameter) that say which gradients are None.
    """

    optimizer_type: str
    shapes: dict[str, tuple[int, ...]]
    frozen: frozenset[str]
    meshes: dict[str, int]
    dtype: str
    options: dict[str, Any]
    schedule: tuple[str, dict[str, Any]]
    missing: int

    @property
    def trainable(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.shapes.items() if name not in self.frozen}


KINDS: dict[str, dict[str, tuple[int, ...]]] = {
    "fc": {"weight": (3, 4), "bias": (3,)},
    "wide": {"weight": (2, 5)},
    "embed": {"weight": (5, 4)},
    "norm": {"weight": (4,)},
    "moe": {"experts": (2, 3, 2)},
}
small = st.sampled_from([0.0, 0.01, 0.5, 1.0])


@st.composite
def options(draw: st.DrawFn, optimizer_type: str) -> dict[str, Any]:
    """Keywords of build_optimizer, often defaults."""
    given_options: dict[str, Any] = {"lr": draw(st.sampled_from([0.1, 0.003, 1.0])), "fused": True}
    optional = {
        "weight_decay": small,
        "eps": st.sampled_from([1e-8, 1e-6]),
        "lr_multipliers": st.dictionaries(st.sampled_from(KEYS), st.sampled_from([0.0, 0.1, 1.0, 5.0]), max_size=3),
        "keys_to_select": st.lists(st.sampled_from(KEYS), max_size=2, unique=True),
        "disable_weight_decay_for_1d_params": st.booleans(),
    }
    betas = st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.95, 0.999])).map(list)
    if optimizer_type in ("muonwithauxadamw", "dion2withauxadamw"):
        given_options["expert_param_keywords"] = ["experts"]
        optional |= {
            "adam_betas": betas,
            "muon_momentum": st.sampled_from([0.0, 0.9]),
            "ns_steps": st.integers(1, 6),
            "nesterov": st.booleans(),
            "orthogonalize_skip_patterns": st.sampled_from([[], ["wide"]]),
        }
    else:
        optional |= {"betas": betas, "capturable": st.booleans()}
    for name, values in optional.items():
        if draw(st.booleans()):
            given_options[name] = draw(values)
    return given_options


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(["lambdalinear", "lambdacosine", "wsd", "wsfd"]))
    values = {"f_start": draw(small), "f_max": 1.0, "f_min": draw(small)}
    lengths = st.integers(0, 4)
    if kind.startswith("lambda"):
        cycles = draw(st.integers(1, 3))
        lists = {name: [value] * cycles for name, value in values.items()}
        for name in ("warm_up_steps", "cycle_lengths"):
            lists[name] = draw(st.lists(lengths, min_size=cycles, max_size=cycles))
        return kind, lists
    least = 1 if kind == "wsfd" else 0
    values["warm_up_steps"], values["decay_steps"] = draw(lengths) + least, draw(lengths) + least
    values["total_steps"] = values["warm_up_steps"] + values["decay_steps"] + draw(lengths) + least
    if kind == "wsfd":
        values["f_cooldown_start"] = 0.75
    return kind, {**values, "decay_type": draw(st.sampled_from(["linear", "cosine"]))}


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3))
    shapes = {f"{i}.{kind}.{leaf}": shape for i, kind in enumerate(kinds) for leaf, shape in KINDS[kind].items()}
    frozen = draw(st.sets(st.sampled_from(sorted(shapes)), max_size=1)) if len(shapes) > 1 else set()
    optimizer_type = draw(st.sampled_from(TYPES))
    given_options = draw(options(optimizer_type))
    keys = given_options.get("keys_to_select")
    assume(not keys or any(key in name for name in shapes if name not in frozen for key in keys))
    return Setup(
        optimizer_type,
        shapes,
        frozenset(frozen),
        {name: draw(st.integers(0, 1)) for name in shapes},
        draw(st.sampled_from(DTYPES)),
        given_options,
        draw(schedules()),
        draw(st.integers(0, 2**30 - 1)) & draw(st.integers(0, 2**30 - 1)),  # a quarter of them
    )


def values(setup: Setup, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in setup.shapes.items()}


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[Setup, Setup]:
    """A setup and the same, or nearly the same, or another one."""
    setup = draw(setups())
    change = draw(st.sampled_from(["none", "options", "shape", "name", "dtype", "other"]))
    event(change)
    module = draw(st.sampled_from(sorted(setup.trainable))).rpartition(".")[0] + "."

    def rename(name: str) -> str:
        return f"9.{name}" if name.startswith(module) else name

    if change == "options":
        other = setup._replace(options={**setup.options, "eps": 1e-5})
    elif change == "shape":
        longer = {name: tuple(n + 1 for n in shape) for name, shape in setup.shapes.items() if name.startswith(module)}
        other = setup._replace(shapes={**setup.shapes, **longer})
    elif change == "name":
        other = setup._replace(
            shapes={rename(name): shape for name, shape in setup.shapes.items()},
            meshes={rename(name): mesh for name, mesh in setup.meshes.items()},
            frozen=frozenset(map(rename, setup.frozen)),
        )
    elif change == "dtype":
        other = setup._replace(dtype=draw(st.sampled_from([dtype for dtype in DTYPES if dtype != setup.dtype])))
    else:
        other = setup if change == "none" else draw(setups())
    return setup, other
