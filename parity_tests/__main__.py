"""``python -m parity_tests``: the table, the schedules and one real training on both sides; a verdict and a report."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, TypeVar

from parity_tests.cases import CASES, SCHEDULE_CASES
from parity_tests.processes import ENVIRONMENT

QUICK_STEPS, QUICK_TRAINING_STEPS, TRAINING_STEPS = 20, 30, 200
IDS = {case.id for case in CASES} | {case.id for case in SCHEDULE_CASES}
EPILOG = "Exit status: 0 all equal, 1 a mismatch, 2 bad arguments."


class Comparison(Protocol):
    """What every kind of row returns."""

    @property
    def passed(self) -> bool: ...


Result = TypeVar("Result", bound=Comparison)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m parity_tests", description=__doc__, epilog=EPILOG)
    parser.add_argument("--quick", action="store_true", help="fewer rows and steps: under a minute")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where both frameworks run")
    parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), help="one precision tier only")
    parser.add_argument("--steps", type=int, help="at most this many steps for cases, exactly this many for training")
    parser.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="folder of index.html")
    parser.add_argument(
        "-k",
        dest="expression",
        default="",
        metavar="EXPR",
        help="only rows whose id matches, such as 'muon and not gaps or wsd'",
    )
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} is no folder that can be written: {error.strerror}")
    if not os.access(options.out, os.W_OK):
        parser.error(f"--out {options.out} cannot be written")
    return options


def matches(expression: str, name: str) -> bool:
    """Whether a row is wanted: the row of that id if there is one, else every row for which the expression holds.

    Terms are substrings of ``name``; "not" binds tighter than "and", "and" tighter than "or".
    """
    if expression in IDS:
        return name == expression

    def holds(term: str) -> bool:
        words = term.split()
        negated = len(words) > 1 and words[0] == "not"
        return (" ".join(words[negated:]) in name) != negated

    return any(all(map(holds, group.split(" and "))) for group in expression.split(" or "))


def check_device(device: str) -> str | None:
    """Why ``device`` cannot be used, or None."""
    if device == "cpu":
        return None
    import jax
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        return f"JAX sees no GPU: {error}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for and return the exit status."""
    options = parse_arguments(arguments)
    started = time.perf_counter()
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    if options.device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")

    missing = [name for name in ("torch", "jax", "optax", "flax", "matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        print(f"{', '.join(missing)} missing: pip install 'samestep[parity]'", file=sys.stderr)
        return 2

    from parity_tests.report import Summary, format_table, write_report
    from parity_tests.schedule_parity import compare_schedule
    from parity_tests.tolerances import TIERS
    from parity_tests.training import DTYPES, run_pair, runs
    from parity_tests.trajectory import run_case

    tiers = [tier for tier in TIERS.values() if options.dtype in (None, tier.name)]
    cases = [
        (case, tier, mode)
        for case in CASES
        if matches(options.expression, case.id) and (case.quick or not options.quick)
        for tier in tiers
        for mode in (tier.modes[:1] if options.quick else tier.modes)
    ]
    schedules = [case for case in SCHEDULE_CASES if matches(options.expression, case.id)]
    training_steps = options.steps or (QUICK_TRAINING_STEPS if options.quick else TRAINING_STEPS)
    trainings = [
        (run, dtype)
        for run in runs(training_steps)
        # a short float32 training has no time to show its drift
        for dtype in (DTYPES[:1] if options.quick and options.dtype is None else DTYPES)
        if options.dtype in (None, dtype) and matches(options.expression, f"training {run.name}")
    ]
    if not (cases or schedules or trainings):
        print(f"nothing matches -k {options.expression!r} --dtype {options.dtype}", file=sys.stderr)
        return 2
    problem = check_device(options.device)
    if problem is not None:
        print(f"--device {options.device}: {problem}", file=sys.stderr)
        return 2

    from parity_tests.backends.base import Backend
    from parity_tests.backends.jax_backend import JaxBackend
    from parity_tests.backends.torch_backend import TorchBackend

    backends: dict[str, Backend] = {"torch": TorchBackend(options.device), "jax": JaxBackend(options.device)}
    total, done = len(cases) + len(schedules) + len(trainings), 0

    def announce(name: str, passed: bool, seconds: float) -> None:
        nonlocal done
        done += 1
        print(f"[{done:3d}/{total}] {'ok  ' if passed else 'FAIL'} {name} ({seconds:.1f} s)", flush=True)

    crashes: list[str] = []

    def attempt(name: str, compare: Callable[[], Result]) -> Result | None:
        """Run one row; an exception is its result and must not cost the others and the report."""
        since = time.perf_counter()
        try:
            result = compare()
        except Exception:
            crashes.append(f"{name} raised an exception\n{traceback.format_exc()}")
            announce(name, False, time.perf_counter() - since)
            return None
        announce(name, result.passed, time.perf_counter() - since)
        return result

    steps = options.steps or (QUICK_STEPS if options.quick else None)
    case_results = [
        attempt(f"{case.id} {tier.name} {mode}", partial(run_case, case, tier, mode, backends, steps))
        for case, tier, mode in cases
    ]
    schedule_results = [attempt(f"schedule {case.id}", partial(compare_schedule, case)) for case in schedules]
    training_results = []
    for run, dtype in trainings:
        name = f"training {run.name} {dtype}"
        print(f"          {name}: {training_steps} steps in both frameworks ...", flush=True)
        training_results.append(attempt(name, partial(run_pair, run, dtype, training_steps, options.device)))
    done_trainings = [training for training in training_results if training is not None]

    summary = Summary(
        title="samestep parity",
        command="python -m parity_tests " + shlex.join(sys.argv[1:] if arguments is None else arguments),
        environment=environment(options.device),
        cases=[result for result in case_results if result is not None],
        schedules=[result for result in schedule_results if result is not None],
        trainings=done_trainings,
        routing=done_trainings[0].routing if done_trainings else {},
        seconds=time.perf_counter() - started,
        crashes=crashes,
    )
    print(format_table(summary))
    path = options.out / "index.html"
    write_report(path, summary)
    print(f"report: {path}")
    return 0 if summary.passed else 1


def environment(device: str) -> dict[str, str]:
    """Versions and hardware that the numbers depend on."""
    import torch

    names = ("torch", "jax", "jaxlib", "optax", "flax", "numpy")
    hardware = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} {platform.processor()}".strip()
    )
    return {name: version(name) for name in names} | {
        "python": platform.python_version(),
        "device": f"{device}, {hardware}",
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; no report was written", file=sys.stderr)
        sys.exit(130)
