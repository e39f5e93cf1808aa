"""Both sides and the oracle against numbers of the reference systems. Formats: golden/README.md."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from parity_tests import reference
from parity_tests.backends.base import Precision
from parity_tests.backends.reference_backend import ReferenceBackend
from parity_tests.cases import Case
from parity_tests.problems import Problem
from parity_tests.tolerances import elementwise_error

GOLDEN = Path(__file__).parent / "golden"
TYPES = ("adam", "adamw", "fusedadam", "muonwithauxadamw")

FLOAT64 = 1e-12  # one algorithm in float64; independent NumPy code agrees to 1e-15
FLOAT32 = 2e-6  # absolute, values of order 1, 12 steps of float32; independent code agrees to 5e-7
NATIVE_NS = 0.15  # per step, times the adjusted lr: bfloat16 products depend on the CPU, 0.12 was seen
BFLOAT16_UNIT = 2.0**-7  # two roundings to bfloat16 of nearly the same number are at most one unit apart
NULL_DIRECTIONS = 485  # 3.4445^5: what five steps make of rounding in directions that the input does not have
NS_NATIVE = 0.07  # absolute, single bfloat16 Newton-Schulz results; the rank-1 inputs carry no information


def load_json(name: str) -> dict:
    return json.loads((GOLDEN / name).read_text())


INDEX = load_json("optim/index.json")
OPTIM = {case["id"]: case for case in INDEX["cases"] if case["optimizer_type"] in TYPES}
SIDES = ("reference", "torch", "jax")
RUNS = [
    (case_id, variant, side)
    for case_id, case in OPTIM.items()
    for variant in case["variants"]
    for side in SIDES
    if side != "reference" or variant == "f64"  # the oracle knows no other precision
]


def unflatten(flat: np.ndarray, layout: list) -> dict[str, np.ndarray]:
    """[..., P] into {name: [..., *shape]}."""
    parts = np.split(flat, np.cumsum([math.prod(shape) for _, shape in layout])[:-1], axis=-1)
    return {name: part.reshape((*flat.shape[:-1], *shape)) for (name, shape), part in zip(layout, parts, strict=True)}


class RecordedProblem(Problem):
    """A problem whose values and gradients were recorded."""

    @classmethod
    def load(cls, inputs_id: str) -> RecordedProblem:
        meta = INDEX["inputs"][inputs_id]
        spec = INDEX["models"][meta["model"]]
        problem = cls(
            modules=tuple(tuple(module) for module in spec["modules"]),
            tied=spec.get("tied", {}),
            frozen=tuple(spec.get("frozen", ())),
        )
        with np.load(GOLDEN / "optim" / f"inputs_{inputs_id}.npz") as arrays:
            recorded = {key: arrays[key] for key in ("init", "grads", "none")}
        object.__setattr__(problem, "layout", meta["layout"])
        object.__setattr__(problem, "recorded", recorded)
        return problem

    def initial(self):
        return {name: x.astype(np.float64) for name, x in unflatten(self.recorded["init"], self.layout).items()}

    def gradient_stream(self, steps):
        grads = unflatten(self.recorded["grads"], self.layout)
        for t in range(steps):
            missing = self.recorded["none"][t]
            yield {
                name: None if missing[i] else grads[name][t].astype(np.float64)
                for i, (name, _) in enumerate(self.layout)
            }


def as_case(golden: dict) -> Case:
    scheduler = golden["scheduler"]
    return Case(
        golden["id"],
        "golden",
        golden["optimizer_type"],
        golden["kwargs"],
        RecordedProblem.load(golden["inputs"]),
        (scheduler["type"], scheduler["kwargs"]) if scheduler else None,
        steps=INDEX["steps"],
        axes_by_kind=True,
    )


def run_records(golden: dict, variant: str, backend) -> list:
    ns = {"native": "bfloat16", "ns32": "float32", "f64": "float64"}[variant]
    case = as_case(golden)
    run = backend.start(case, Precision("float64" if variant == "f64" else golden["dtype"], ns))
    return [run.step(grads) for grads in case.problem.gradient_stream(case.steps)]


@pytest.mark.parametrize(("case_id", "variant", "side"), RUNS)
def test_trajectory(case_id, variant, side, backends):
    golden = OPTIM[case_id]
    with np.load(GOLDEN / "optim" / f"{case_id}.npz") as stored:
        arrays = {key.removeprefix(f"{variant}_"): stored[key] for key in stored.files if key.startswith(f"{variant}_")}
    records = run_records(golden, variant, {"reference": ReferenceBackend(), **backends}[side])
    layout = INDEX["inputs"][golden["inputs"]]["layout"]
    trained = {name for group in golden["groups"] for name in group["params"]}
    assert set(records[0].state) == trained

    tolerance = FLOAT64 if variant == "f64" else FLOAT32
    steps = golden["f64_steps"] if variant == "f64" else range(1, INDEX["steps"] + 1)
    params = unflatten(arrays["params"], layout)
    masters = unflatten(arrays["master_by_step"], layout) if "master_by_step" in arrays else {}
    low_precision = golden["dtype"] == "bfloat16" and variant != "f64"
    orthogonalized = {*golden["categories"].get("matrix", ()), *golden["categories"].get("stacked", ())}
    for row, step in enumerate(steps):
        record = records[step - 1]
        for name, value in record.params.items():
            expected = params[name][row]
            if name in orthogonalized and variant == "native":
                adjusted_lr = sum(r.learning_rates[name] for r in records[:step]) * adjustment(golden, value.shape)
                allowed = NATIVE_NS * adjusted_lr + (BFLOAT16_UNIT * np.abs(expected) if low_precision else 0.0)
                assert (np.abs(value - expected) <= allowed + tolerance).all(), (name, step)
            elif name in masters and name in trained:
                master = record.state[name].get("master_param", value)
                np.testing.assert_allclose(master, masters[name][row], rtol=0, atol=tolerance, err_msg=f"{name} {step}")
            elif low_precision:
                assert elementwise_error(value, expected) <= BFLOAT16_UNIT, (name, step)
            else:
                np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance, err_msg=f"{name} {step}")
    check_learning_rates(golden, arrays["lr"], records, tolerance)
    if not (low_precision or (variant == "native" and orthogonalized)):
        check_state(golden, arrays, records[-1], layout, tolerance)


def adjustment(golden: dict, shape: tuple) -> float:
    return golden["kwargs"].get("muon_lr_scale", 0.2) * math.sqrt(max(shape[-2:]))


def check_learning_rates(golden, lr, records, tolerance):
    for g, group in enumerate(golden["groups"]):
        for step, record in enumerate(records):
            for name in group["params"]:
                assert abs(record.learning_rates[name] - lr[step, g]) <= tolerance * max(lr[:, g].max(), 1e-300)


def check_state(golden, arrays, record, layout, tolerance):
    for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        if key not in arrays:
            continue
        expected = unflatten(arrays[key], layout)
        for name, state in record.state.items():
            assert (key in state) == bool(np.isfinite(expected[name]).all() and expected[name].size), (name, key)
            if key in state:
                np.testing.assert_allclose(state[key], expected[name], rtol=0, atol=tolerance, err_msg=f"{name} {key}")
    if "param_step" in arrays:
        for (name, _), step in zip(layout, arrays["param_step"], strict=True):
            if name in record.state:
                assert record.state[name]["step"] == max(step, 0), name
    if "group_step" in arrays:
        for group, step in zip(golden["groups"], arrays["group_step"], strict=True):
            if step >= 0:  # the reference counts no steps in a group that holds matrices only
                assert {float(record.state[name]["step"]) for name in group["params"]} == {float(step)}


SCHEDULES = load_json("schedules.json")["cases"]
SCHEDULE_TYPES = {
    "LambdaWarmUpCosineScheduler": "lambdacosine",
    "LambdaLinearScheduler": "lambdalinear",
    "WSDScheduler": "wsd",
}
# the reference prints the lr every so many steps; here that is the training loop's business
NOT_TAKEN = ("verbosity_interval",)


def build_schedule(side: str, lr_scheduler_type: str, kwargs: dict):
    if side == "torch":
        from torch_impl.schedules import SCHEDULERS

        return SCHEDULERS[lr_scheduler_type](**kwargs).schedule
    if side == "jax":
        import jax

        import jax_impl

        return jax.jit(jax_impl.build_lr_schedule(lr_scheduler_type, **kwargs))
    return lambda n: reference.multiplier(n, lr_scheduler_type, kwargs)


def expected_values(case: dict) -> list[float]:
    """Recorded values; where the reference raises or gives NaN, the deviation that we document.

    Past the last cycle it raises: we hold the last value. With warm_up == length it divides 0 by 0 at the boundary:
    we end on the ramp's last value.
    """
    kwargs = case["kwargs"]
    values: list[float] = []
    for value in case["values"]:
        if value == "nan":
            assert kwargs["warm_up_steps"] == kwargs["cycle_lengths"]
            values.append(kwargs["f_max"][-1])
        elif isinstance(value, dict):
            values.append(values[-1])
        else:
            values.append(value)
    return values


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("case", [c for c in SCHEDULES if not c.get("construct_raises")], ids=lambda case: case["id"])
def test_schedule(case, side, backends):
    kwargs = {key: value for key, value in case["kwargs"].items() if key not in NOT_TAKEN}
    schedule = build_schedule(side, SCHEDULE_TYPES[case["cls"]], kwargs)
    found = [float(schedule(n)) for n in case["steps"]]
    np.testing.assert_allclose(found, expected_values(case), rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize("side", ["torch", "jax"])
@pytest.mark.parametrize("case", [c for c in SCHEDULES if c.get("construct_raises")], ids=lambda case: case["id"])
def test_schedule_that_raises(case, side):
    """The reference asserts on unequal lists; a user's mistake is a ValueError here."""
    with pytest.raises(ValueError, match=r"number of entries|decay_type must be one of"):
        build_schedule(side, SCHEDULE_TYPES[case["cls"]], case["kwargs"])


NS = load_json("ns/ns.json")["cases"]


def newton_schulz_of(side: str, x: np.ndarray, steps: int, dtype: str) -> np.ndarray:
    if side == "reference":
        return reference.newton_schulz(x, steps)
    if side == "torch":
        import torch

        import torch_impl

        return torch_impl.newton_schulz(torch.tensor(x), ns_steps=steps, ns_dtype=dtype).double().numpy()
    import jax.numpy as jnp

    import jax_impl

    return np.asarray(jax_impl.newton_schulz(jnp.asarray(x), ns_steps=steps, ns_dtype=dtype), np.float64)


@pytest.mark.parametrize(
    ("side", "dtype"),
    [("reference", "float64")] + [(side, d) for side in ("torch", "jax") for d in ("float64", "float32", "bfloat16")],
)
@pytest.mark.parametrize("case", NS, ids=lambda case: case["key"])
def test_newton_schulz(case, side, dtype, backends):
    """float32 is held against the recorded float64: two float32 results may lie on either side of it."""
    with np.load(GOLDEN / "ns" / "ns.npz") as stored:
        x = stored[f"{case['key']}_x"].astype(np.float64)
        expected = stored[f"{case['key']}_{'native' if dtype == 'bfloat16' else 'f64'}"]
    found = newton_schulz_of(side, x, case["steps"], dtype)
    rank_deficient = case["kind"] == "rank1"
    if rank_deficient and dtype == "bfloat16":
        assert np.isfinite(found).all()
        return
    amplified = NULL_DIRECTIONS if rank_deficient else 1
    allowed = {"float64": FLOAT64 * amplified, "float32": FLOAT32 * amplified, "bfloat16": NS_NATIVE}[dtype]
    np.testing.assert_allclose(found, expected, rtol=0, atol=allowed)
