"""The table: which optimizer, on which problem, under which schedule, and why the row exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from parity_tests.problems import PROBLEMS, Problem


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        id: name in reports and for ``-k``.
        why: the fault that only this row would show.
        optimizer_type, kwargs: as for build_optimizer of either side, without ``fused`` and ``ns_dtype``.
        schedule: (lr_scheduler_type, kwargs) or None.
        problem: model and gradients.
        steps: length of the run in updates.
        quick: part of ``--quick``.
    """

    id: str
    why: str
    optimizer_type: str
    kwargs: Mapping[str, Any]
    problem: Problem
    schedule: tuple[str, Mapping[str, Any]] | None = None
    steps: int = 100
    quick: bool = False
    axes_by_kind: bool = field(default=False, repr=False)
    """JAX takes torch's names and (out, in) layouts, and matrix axes from the kind of each parameter."""


COSINE = (
    "lambdacosine",
    {"warm_up_steps": [10], "f_start": [0.1], "f_max": [1.0], "f_min": [0.05], "cycle_lengths": [90]},
)
TWO_CYCLES = (
    "lambdalinear",
    {
        "warm_up_steps": [5, 3],
        "f_start": [0.0, 0.2],
        "f_max": [1.0, 0.6],
        "f_min": [0.1, 0.0],
        "cycle_lengths": [40, 50],
    },
)
WSD = (
    "wsd",
    {"warm_up_steps": 8, "total_steps": 95, "decay_steps": 30, "f_start": 0.0, "f_max": 1.0, "f_min": 0.1},
)
WSFD = (
    "wsfd",
    {
        "warm_up_steps": 8,
        "total_steps": 95,
        "decay_steps": 30,
        "f_start": 0.2,
        "f_max": 1.0,
        "f_cooldown_start": 0.7,
        "f_min": 0.0,
        "decay_type": "linear",
    },
)

MUON = "muonwithauxadamw"

CASES: tuple[Case, ...] = (
    Case("adam-defaults", "the plain recurrence", "adam", {"lr": 0.01}, PROBLEMS["mlp"], quick=True),
    Case(
        "adam-l2",
        "decay inside the gradient, not decoupled; betas and eps off their defaults",
        "adam",
        {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4},
        PROBLEMS["shapes"],
        COSINE,
    ),
    Case("adamw-defaults", "decoupled decay", "adamw", {"lr": 0.01}, PROBLEMS["shapes"], COSINE, quick=True),
    Case(
        "adamw-gaps",
        "a step count per parameter: one without a gradient does not advance",
        "adamw",
        {"lr": 0.01, "weight_decay": 0.1},
        PROBLEMS["gaps"],
        WSD,
        quick=True,
    ),
    Case(
        "adamw-groups",
        "first matching multiplier wins, an explicit 0 is a value, vectors do not decay",
        "adamw",
        {
            "lr": 0.02,
            "weight_decay": 0.1,
            "lr_multipliers": {"norm": 0.5, "o": 2.0, "embed": 0.0},
            "disable_weight_decay_for_1d_params": True,
        },
        PROBLEMS["mlp"],
        TWO_CYCLES,
    ),
    Case(
        "adamw-frozen",
        "parameters outside the selection do not move, not even by decay",
        "adamw",
        {"lr": 0.01, "weight_decay": 0.2, "keys_to_select": ["up", "norm"]},
        PROBLEMS["mlp"],
        WSFD,
    ),
    Case(
        "adamw-tiny-gradients",
        "eps stands outside the root and decides the size of the step",
        "adamw",
        {"lr": 0.01, "weight_decay": 0.0},
        PROBLEMS["hard"],
    ),
    Case(
        "fusedadam-defaults",
        "masters of low-precision parameters, no decay",
        "fusedadam",
        {"lr": 0.01},
        PROBLEMS["mlp"],
        COSINE,
        quick=True,
    ),
    Case(
        "fusedadam-gaps",
        "a step count per group: one without a gradient is corrected by the count of the others",
        "fusedadam",
        {"lr": 0.01, "weight_decay": 0.1},
        PROBLEMS["gaps"],
        WSD,
        quick=True,
    ),
    Case(
        "fusedadam-l2",
        "decay inside the gradient, of the master; betas and eps off their defaults",
        "fusedadam",
        {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False, "betas": (0.8, 0.95), "eps": 1e-4},
        PROBLEMS["shapes"],
        COSINE,
    ),
    Case(
        "fusedadam-uncorrected",
        "moments that start at zero are taken as they are; beta1 = 0 is the gradient itself",
        "fusedadam",
        {"lr": 0.003, "weight_decay": 0.1, "bias_correction": False, "betas": (0.0, 0.99)},
        PROBLEMS["shapes"],
        TWO_CYCLES,
    ),
    Case(
        "fusedadam-groups",
        "every group counts for itself and has its own lr and decay",
        "fusedadam",
        {
            "lr": 0.02,
            "weight_decay": 0.1,
            "lr_multipliers": {"norm": 0.5, "o": 2.0, "embed": 0.0},
            "disable_weight_decay_for_1d_params": True,
        },
        PROBLEMS["mlp"],
        WSFD,
    ),
    Case(
        "fusedadam-hard",
        "gradients near eps and growing ones",
        "fusedadam",
        {"lr": 0.01, "weight_decay": 0.1},
        PROBLEMS["hard"],
    ),
    Case("muon-defaults", "both rules side by side", MUON, {"lr": 0.02}, PROBLEMS["mlp"], WSD, quick=True),
    Case(
        "muon-shapes",
        "orientation: tall, wide, square, one row, one column; a raw matrix goes to AdamW",
        MUON,
        {"lr": 0.02, "weight_decay": 0.3},
        PROBLEMS["shapes"],
        COSINE,
        quick=True,
    ),
    Case(
        "muon-no-nesterov",
        "the momentum itself is orthogonalized",
        MUON,
        {"lr": 0.02, "nesterov": False, "weight_decay": 0.0},
        PROBLEMS["shapes"],
        TWO_CYCLES,
    ),
    Case(
        "muon-hyperparameters",
        "every number off its default",
        MUON,
        {
            "lr": 0.005,
            "muon_momentum": 0.8,
            "muon_lr_scale": 1.0,
            "ns_steps": 3,
            "adam_betas": (0.8, 0.99),
            "eps": 1e-5,
            "weight_decay": 0.4,
        },
        PROBLEMS["mlp"],
        WSFD,
    ),
    Case(
        "muon-gaps",
        "None leaves weight, decay and state alone while the group's count advances; zero is a gradient",
        MUON,
        {"lr": 0.02, "weight_decay": 0.2},
        PROBLEMS["gaps"],
        WSD,
    ),
    Case(
        "muon-groups",
        "multipliers reach matrices and vectors; the decay follows the unscaled lr of its group",
        MUON,
        {
            "lr": 0.02,
            "weight_decay": 0.2,
            "lr_multipliers": {"down": 3.0, "norm": 0.5, "up": 0.25},
            "disable_weight_decay_for_1d_params": True,
        },
        PROBLEMS["mlp"],
        WSD,
    ),
    Case(
        "muon-head-keyword",
        "custom keywords replace the default ones: the head becomes a matrix",
        MUON,
        {"lr": 0.02, "adamw_module_keywords": ["down"], "orthogonalize_skip_patterns": [r"^up\b"]},
        PROBLEMS["mlp"],
        COSINE,
    ),
    Case(
        "muon-hard",
        "low rank, gradients near the norm's eps, growing gradients",
        MUON,
        {"lr": 0.02},
        PROBLEMS["hard"],
        COSINE,
    ),
    Case(
        "muon-experts",
        "one matrix an expert; an idle expert keeps weight and momentum",
        MUON,
        {"lr": 0.02, "weight_decay": 0.2, "expert_param_keywords": ["experts"]},
        PROBLEMS["experts"],
        WSD,
    ),
)


@dataclass(frozen=True)
class ScheduleCase:
    """One schedule of the parity job: evaluated at every step around its seams and on a grid, past the end too.

    Attributes:
        id, why: as in Case.
        lr_scheduler_type, kwargs: as for build_lr_scheduler and build_lr_schedule; or one of ANNEALED and the arguments
            of OptimizerParamScheduler.
        seams: steps at which its formula changes; each is compared with its neighbours.
    """

    id: str
    why: str
    lr_scheduler_type: str
    kwargs: Mapping[str, Any]
    seams: tuple[int, ...]

    @property
    def steps(self) -> list[int]:
        """0, a grid of about 200 steps up to a fifth past the end, and every seam +-1."""
        end = self.seams[-1]
        grid = range(0, end + end // 5 + 2, max(1, end // 170))
        return sorted({0, *grid, *(max(0, seam + k) for seam in self.seams for k in (-1, 0, 1))})


ANNEALED = {"annealed lr": "lr", "annealed weight decay": "weight_decay"}
_ANNEALING = {
    "init_lr": 1e-5,
    "max_lr": 1e-3,
    "min_lr": 1e-4,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 90,
    "start_wd": 0.05,
    "end_wd": 0.05,
    "wd_incr_steps": 0,
    "wd_incr_style": "constant",
}


def _annealed_lr(why: str, lr_decay_style: str, lr_wsd_decay_style: str | None = None) -> ScheduleCase:
    kwargs: dict[str, Any] = {**_ANNEALING, "lr_decay_style": lr_decay_style}
    if lr_wsd_decay_style is None:
        return ScheduleCase(f"annealer-{lr_decay_style}", why, "annealed lr", kwargs, (10, 90))
    kwargs |= {"wsd_decay_steps": 30, "lr_wsd_decay_style": lr_wsd_decay_style}
    return ScheduleCase(f"annealer-wsd-{lr_wsd_decay_style}", why, "annealed lr", kwargs, (10, 60, 90))


def _annealed_wd(name: str, why: str, start: float, end: float, style: str) -> ScheduleCase:
    kwargs = {**_ANNEALING, "lr_decay_style": "constant"}
    kwargs |= {"start_wd": start, "end_wd": end, "wd_incr_steps": 80, "wd_incr_style": style}
    return ScheduleCase(
        f"annealer-decay-{name}", why, "annealed weight decay", {**kwargs, "allow_decreasing_wd": end < start}, (80,)
    )


SCHEDULE_CASES: tuple[ScheduleCase, ...] = (
    ScheduleCase("cosine", "one cycle", *COSINE, (10, 90)),
    ScheduleCase(
        "cosine-restarts",
        "a boundary step belongs to the earlier cycle; one cycle has no warm-up",
        "lambdacosine",
        {
            "warm_up_steps": [30, 0, 20],
            "f_start": [0.0, 0.5, 0.1],
            "f_max": [1.0, 0.7, 0.4],
            "f_min": [0.2, 0.1, 0.0],
            "cycle_lengths": [300, 200, 400],
        },
        (30, 300, 500, 520, 900),
    ),
    ScheduleCase("linear-two-cycles", "lines, and a start at zero", *TWO_CYCLES, (5, 40, 43, 90)),
    ScheduleCase(
        "linear-long-warm-up",
        "a warm-up longer than its cycle is cut off and held",
        "lambdalinear",
        {"warm_up_steps": [1000], "f_start": [0.05], "f_max": [1.0], "f_min": [0.5], "cycle_lengths": [500]},
        (500,),
    ),
    ScheduleCase("wsd-cosine", "three phases", *WSD, (8, 65, 95)),
    ScheduleCase(
        "wsd-real",
        "the horizon of a public configuration",
        "wsd",
        {
            "warm_up_steps": 2000,
            "total_steps": 50000,
            "decay_steps": 5000,
            "f_start": 0.01,
            "f_max": 1.0,
            "f_min": 0.1,
        },
        (2000, 45000, 50000),
    ),
    ScheduleCase(
        "wsd-no-phases",
        "zero-length warm-up and decay never divide by zero",
        "wsd",
        {"warm_up_steps": 0, "total_steps": 40, "decay_steps": 0, "f_start": 0.3, "f_max": 1.0, "f_min": 0.2},
        (40,),
    ),
    ScheduleCase("wsfd", "a slow decay before the fast one", *WSFD, (8, 65, 95)),
    ScheduleCase(
        "linear-1e13",
        "a horizon beyond 32 bits, the default of a public configuration",
        "lambdalinear",
        {"warm_up_steps": [1000], "f_start": [1e-6], "f_max": [1.0], "f_min": [1.0], "cycle_lengths": [10**13]},
        (1000, 2000),
    ),
    ScheduleCase(
        "wsd-3e9-samples",
        "lengths in samples: the total exceeds 2^31, the count does not",
        "wsd",
        {
            "warm_up_steps": 24_414_063,
            "total_steps": 3_048_706_055,
            "decay_steps": 1_610_351_563,
            "f_start": 0.0,
            "f_max": 1.0,
            "f_min": 0.01,
            "decay_type": "linear",
        },
        (24_414_063, 1_438_354_492),
    ),
    _annealed_lr("the warm-up alone", "constant"),
    _annealed_lr("a line to the floor, then the floor", "linear"),
    _annealed_lr("half a cosine to the floor", "cosine"),
    _annealed_lr("jumps to the floor where it ends", "inverse-square-root"),
    _annealed_lr("stable, then a line", "WSD", "linear"),
    _annealed_lr("stable, then half a cosine", "WSD", "cosine"),
    _annealed_lr("stable, then halving", "WSD", "exponential"),
    _annealed_lr("stable, then the root, steep at first", "WSD", "minus_sqrt"),
    _annealed_wd("linear", "a decay that rises from zero", 0.0, 0.1, "linear"),
    _annealed_wd("cosine", "a decay that rises smoothly", 0.02, 0.3, "cosine"),
    _annealed_wd("falling", "a decay that falls, behind its flag", 0.1, 0.01, "cosine"),
)
