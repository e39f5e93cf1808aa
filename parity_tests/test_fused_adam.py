"""Fused Adam over a long run, and the transforms of jax_impl: what XLA makes of them, and optax's ways to use them."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import jax_impl
import torch_impl
from parity_tests import reference
from parity_tests.benchmarks import adam_jax
from parity_tests.problems import to_bfloat16
from torch_impl.kernels import adam_cpu

DRIFT = 2e-5  # relative: 10,000 roundings of 6e-8 that add up at random are 6e-6
STEPS, WIDTH, LR, DECAY = 10_000, 61, 1e-3, 0.05
SCHEDULE = dict(warm_up_steps=2, total_steps=9, decay_steps=2, f_start=0.5, f_max=1.0, f_min=0.0)


def problem():
    """Start and gradients, both representable in bfloat16."""
    rng = np.random.default_rng(5)
    start = to_bfloat16(rng.normal(size=WIDTH))
    sizes = 10.0 ** rng.uniform(-3, 1, WIDTH)
    return start, to_bfloat16(sizes * (0.3 + rng.normal(size=(STEPS, WIDTH))))


def jax_run(options, dtype):
    """The parameters and their masters (the same where there are none) after STEPS updates."""
    start, grads = problem()
    params = {"a": jnp.asarray(start, dtype)}
    tx = jax_impl.build_optimizer(params, "fusedadam", lr=LR, weight_decay=DECAY, **options)

    def step(carry, g):
        params, state = carry
        updates, state = tx.update({"a": g.astype(dtype)}, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.jit(partial(jax.lax.scan, step))(
        (params, tx.init(params)), jnp.asarray(grads, jnp.float32)
    )
    masters = named(state, "master")
    return [np.asarray(x, np.float64) for x in (params["a"], masters[0] if masters else params["a"])]


def torch_run(options, dtype):
    start, grads = problem()
    p = torch.nn.Parameter(torch.tensor(start, dtype=getattr(torch, dtype)))
    optimizer = torch_impl.FusedAdam([p], lr=LR, weight_decay=DECAY, **options)
    for g in torch.tensor(grads, dtype=p.dtype):
        p.grad = g
        optimizer.step()
    return [x.detach().double().numpy() for x in (p, optimizer.state[p].get("master_param", p))]


def named(state, field):
    """Leaves of the state that lie under a field of this name."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return [leaf for path, leaf in leaves if any(getattr(key, "name", None) == field for key in path)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"adam_w_mode": False}, {"bias_correction": False}], ids=str)
def test_ten_thousand_steps(options, dtype, monkeypatch):
    """Both sides, torch also without a C compiler, against the oracle in float64 and with each other.

    A bfloat16 parameter is its rounded master.
    """
    p, grads = problem()
    m, v = np.zeros(WIDTH), np.zeros(WIDTH)
    decoupled, corrected = options.get("adam_w_mode", True), options.get("bias_correction", True)
    for t, g in enumerate(grads, 1):
        g = g if decoupled else g + DECAY * p
        m, v = reference.first_moment(m, g, 0.9), reference.second_moment(v, g, 0.999)
        direction = reference.adam_direction(m, v, t if corrected else np.inf, (0.9, 0.999), 1e-8)
        p = reference.descend(p, direction, LR, DECAY if decoupled else 0.0)
    ends = [run(options, dtype) for run in (torch_run, jax_run)]
    monkeypatch.setattr(adam_cpu, "compiled", dict)
    ends.append(torch_run(options, dtype))
    for param, master in ends:
        assert np.linalg.norm(master - p) / np.linalg.norm(p) < DRIFT
        if dtype == "bfloat16":
            np.testing.assert_array_equal(param, to_bfloat16(master))
    assert np.linalg.norm(ends[0][1] - ends[1][1]) / np.linalg.norm(p) < DRIFT


SHAPE = (1009, 1013)  # no other array of a step has this size
BYTES = {"f32": 4, "bf16": 2}


def loops(step, *args):
    """Loops over arrays of SHAPE in the compiled step: [(dtype written, dtypes read)], and what memory it takes."""
    with jax.default_device(jax.devices("cpu")[0]):
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
    entry = compiled.as_text().partition("\nENTRY ")[2]
    size = rf"\[{SHAPE[0]},{SHAPE[1]}\]"
    found, dtypes = [], {}
    for name, dtype, opcode, operands in re.findall(rf"%(\S+) = (\w+){size}\S* ([\w-]+)\(([^)]*)\)", entry):
        if opcode != "parameter":
            read = [dtypes[operand] for operand in re.findall(r"%([^\s,]+)", operands) if operand in dtypes]
            found.append((opcode, dtype, sorted(read)))
        dtypes[name] = dtype
    return found, compiled.memory_analysis()


def step_of(tx, returned=lambda updates: None):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, returned(updates)

    return step


def traffic(found):
    """Bytes an element read and written."""
    return sum(BYTES[written] + sum(BYTES[dtype] for dtype in read) for _, written, read in found)


MOMENT = ("fusion", "f32", ["f32", "f32"])  # g, the old moment
PARAMETER = ("fusion", "f32", ["f32", "f32", "f32"])  # m, v, the parameter
LOW_MOMENT = ("fusion", "f32", ["bf16", "f32"])
MASTER = ("fusion", "f32", ["bf16", "f32", "f32", "f32"])  # m, v, the master, and the parameter, which may have changed
ROUNDED = ("fusion", "bf16", ["bf16", "f32"])  # the parameter, by apply_updates, from itself and the master
L2 = {"adam_w_mode": False}
LOOPS = {
    # name: (dtype, options, loops, bytes an element)
    "float32": ("float32", {}, [MOMENT, MOMENT, PARAMETER], 40),
    "float32-l2": ("float32", L2, 3 * [PARAMETER], 48),  # a moment reads g, itself, and the parameter for the decay
    "float32-no-bias-correction": ("float32", {"bias_correction": False}, [MOMENT, MOMENT, PARAMETER], 40),
    "bfloat16": ("bfloat16", {}, [LOW_MOMENT, LOW_MOMENT, MASTER, ROUNDED], 46),
    # decay needs the master that is in force before the moments do: its check is a loop of its own, in place
    "bfloat16-l2": (
        "bfloat16",
        L2,
        [LOW_MOMENT, *2 * [("fusion", "f32", ["bf16", "f32", "f32"])], PARAMETER, ROUNDED],
        62,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_one_loop_for_each_array_that_is_written(name):
    """XLA for CPUs writes one array a loop; there is no other pass, no copy, and every donated buffer is reused."""
    dtype, options, expected, bytes_per_element = LOOPS[name]
    params = {"a": jnp.ones(SHAPE, dtype)}
    schedule = jax_impl.build_lr_schedule("wsd", **SCHEDULE)
    tx = jax_impl.build_optimizer(params, "fusedadam", lr=LR, weight_decay=DECAY, lr_schedule=schedule, **options)
    found, memory = loops(step_of(tx), params, tx.init(params), params)
    assert sorted(found) == sorted(expected)
    assert traffic(found) == bytes_per_element
    assert memory.argument_size_in_bytes - memory.alias_size_in_bytes == params["a"].nbytes  # all but the gradient
    assert memory.temp_size_in_bytes < 1000


def test_it_reads_and_writes_what_optax_does_and_a_pass_more_is_seen():
    """optax.adamw has the same loops; updates that are given back as well cost passes and memory."""
    params = {"a": jnp.ones(SHAPE, jnp.float32)}
    tx = optax.adamw(LR, weight_decay=DECAY)
    found, _ = loops(step_of(tx), params, tx.init(params), params)
    assert traffic(found) == LOOPS["float32"][3]
    found, memory = loops(step_of(tx, lambda updates: updates), params, tx.init(params), params)
    assert traffic(found) > LOOPS["float32"][3]
    assert memory.temp_size_in_bytes > 1000


def test_without_parameters_up_front():
    """lr .1 .5 (1 + decay p) at the first update; the same as from build_optimizer, bit for bit."""
    params = {"a": {"kernel": jnp.full((2, 3), 2.0)}, "b": jnp.full(3, 2.0, jnp.bfloat16)}
    schedule = jax_impl.build_lr_schedule("wsd", **SCHEDULE)
    options = dict(lr=0.1, lr_schedule=schedule, weight_decay=0.25, lr_multipliers={"b": 2.0})
    built, free = jax_impl.build_optimizer(params, "fusedadam", **options), jax_impl.fused_adam(**options)
    assert free.effective_config() == built.effective_config()
    grads = jax.tree.map(jnp.ones_like, params)
    results = []
    for tx in (built, free):
        p, state = params, tx.init(params)
        for _ in range(3):
            updates, state = tx.update(grads, state, p)
            p = optax.apply_updates(p, updates)
            results.append((p, state, jax_impl.learning_rates(state)))
    np.testing.assert_allclose(results[0][0]["a"]["kernel"], 2.0 - 0.05 * 1.5, rtol=1e-6)
    np.testing.assert_allclose(named(results[0][1], "master")[0], 2.0 - 0.1 * 1.5, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(results[:3]), jax.tree.leaves(results[3:]), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="needs the parameters"):
        free.update(grads, free.init(params))
    with pytest.raises(TypeError, match="no argument 'amsgrad'"):
        jax_impl.fused_adam(0.1, amsgrad=True)
    with pytest.raises(TypeError, match="no argument 'beta'; did you mean 'betas'"):
        jax_impl.fused_adam(0.1, beta=(0.9, 0.99))


def test_the_direction_is_that_of_optax():
    """Where every gradient is there a count for all is a count for each; parameters are not needed."""
    rng = np.random.default_rng(3)
    params = {"a": jnp.zeros((3, 5)), "b": jnp.zeros(7)}
    ours, theirs = jax_impl.scale_by_fused_adam(betas=(0.8, 0.99), eps=1e-4), optax.scale_by_adam(0.8, 0.99, 1e-4)
    state, their_state = ours.init(params), theirs.init(params)
    for _ in range(20):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        direction, state = ours.update(grads, state)
        expected, their_state = theirs.update(grads, their_state)
        for name in params:
            np.testing.assert_allclose(direction[name], expected[name], rtol=1e-12)  # x64 is on


def test_a_missing_gradient_in_a_plain_chain():
    """Moments of bfloat16 parameters are float32; after a gap the count is 3: .19 / .271 / sqrt(.001999 / .002997)."""
    tx = jax_impl.scale_by_fused_adam()
    params = {"a": jnp.ones(1, jnp.bfloat16), "b": jnp.ones(1, jnp.bfloat16)}
    ones = jax.tree.map(jnp.ones_like, params)
    _, state = tx.update(ones, tx.init(params))
    direction, after = tx.update({**ones, "b": None}, state)
    assert direction["b"] == 0
    assert (after.mu["b"], after.nu["b"], after.count) == (state.mu["b"], state.nu["b"], 2)
    direction, _ = tx.update(ones, after)
    assert direction["b"].dtype == after.mu["b"].dtype == jnp.float32
    assert float(direction["b"][0]) == pytest.approx(0.85846, abs=5e-6)


@pytest.mark.parametrize("row", adam_jax.ROWS, ids=lambda row: row.name)
def test_the_sides_of_the_benchmark_do_the_same_work(row):
    """Its masters (or float32 parameters) after five steps, beside ours, which have moved by about five times lr."""
    shapes = {"a": (5, 7), "b": (3,)}
    grads = adam_jax.random_tree(shapes, row.dtype, 1)
    ends = []
    for make in (adam_jax.ours, row.other):
        side = adam_jax.Timed(*make(shapes, row.dtype))
        start = jax.tree.map(np.asarray, side.carry[0])
        for _ in range(5):
            side.run(grads)
        params, *rest = side.carry
        low = params["a"].dtype == jnp.bfloat16
        masters = named(rest, "master") or (jax.tree.leaves(rest[0]) if low else jax.tree.leaves(params))
        ends.append([np.asarray(x, np.float64) for x in masters])
        assert [x.dtype for x in params.values()] == [row.dtype] * 2
        for x, master in zip(jax.tree.leaves(params), masters, strict=True):
            np.testing.assert_array_equal(x, master.astype(x.dtype))
    for ours, other, p in zip(*ends, jax.tree.leaves(start), strict=True):
        np.testing.assert_allclose(ours, other, rtol=0, atol=2e-6)
        moved = np.abs(ours - np.asarray(p, np.float64))
        assert (moved > 3 * adam_jax.LR).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"betas": (0.9, 1.0)}, ValueError, r"betas must be in \[0, 1\), got 1.0"),
        ({"betas": 0.9}, TypeError, "betas must be a pair of numbers, got 0.9"),
        ({"eps": -1.0}, ValueError, "eps must be finite and >= 0, got -1.0"),
        ({"bias_correction": 1}, TypeError, "bias_correction must be True or False, got 1"),
    ],
)
def test_wrong_values_of_the_direction(options, error, message):
    with pytest.raises(error, match=message):
        jax_impl.scale_by_fused_adam(**options)
