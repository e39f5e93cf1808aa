"""Newton-Schulz: closed forms, invariants, numerics; on both sides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl
import torch_impl
from jax_impl.muon import orthogonalize
from parity_tests import reference
from parity_tests.tolerances import block_error

FLOAT64 = 1e-12
FLOAT32 = 1e-5  # five steps of float32 rounding on well-conditioned input
BFLOAT16_VALUE = 0.03  # singular values of a bfloat16 result: 0.6875 was seen for 0.69644
BFLOAT16_RMS = 0.02  # the root mean square averages over many rounding errors
SIDES = ("torch", "jax")


def newton_schulz(side, x, **options):
    if side == "torch":
        return torch_impl.newton_schulz(torch.tensor(x), **options).double().numpy()
    return np.asarray(jax_impl.newton_schulz(jnp.asarray(x), **options), np.float64)


def phi5(s, steps=5):
    """The quintic, iterated: what every singular value of a normalized matrix becomes."""
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("n", "value"), [(1, 0.6964364), (2, 1.1081111), (4, 0.7654385), (3, 0.6857849)])
def test_multiples_of_the_identity(side, n, value):
    """c I_n has n singular values 1 / sqrt(n) once normalized: phi5(1/sqrt n) I_n for every c far above eps."""
    for c in (1.0, -3.0, 1e4):
        found = newton_schulz(side, c * np.eye(n), ns_dtype="float64")
        np.testing.assert_allclose(found, np.sign(c) * value * np.eye(n), atol=5e-7)
        np.testing.assert_allclose(found, np.sign(c) * phi5(n**-0.5) * np.eye(n), atol=2e-7)  # eps / ||c I||


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("c", [1.0, 1e-6, 1e-8, 1e-10])
def test_eps_is_added_to_the_norm(side, c):
    """c I_2 / (c sqrt 2 + 1e-7): the place and size of eps are part of the rule."""
    s = c / (c * 2**0.5 + 1e-7)
    found = newton_schulz(side, c * np.eye(2), ns_dtype="float64")
    np.testing.assert_allclose(found, phi5(s) * np.eye(2), rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (5, 5), (5, 13), (13, 5), (3, 4, 9), (2, 3, 9, 4)])
def test_against_singular_values(side, shape):
    """U phi5(s) V^T by SVD is another road to the same place."""
    x = np.random.default_rng(3).normal(size=shape)
    exact = reference.newton_schulz_exact(x)
    np.testing.assert_allclose(newton_schulz(side, x, ns_dtype="float64"), exact, atol=FLOAT64)
    np.testing.assert_allclose(newton_schulz(side, x, ns_dtype="float32"), exact, atol=FLOAT32)
    np.testing.assert_allclose(reference.newton_schulz(x), exact, atol=FLOAT64)


@pytest.mark.parametrize("side", SIDES)
def test_batches_are_normalized_one_by_one(side):
    x = np.random.default_rng(4).normal(size=(3, 4, 6)) * np.array([1.0, 1e3, 0.0])[:, None, None]
    found = newton_schulz(side, x, ns_dtype="float64")
    for k in range(3):
        np.testing.assert_allclose(found[k], newton_schulz(side, x[k], ns_dtype="float64"), atol=FLOAT64)
    assert not found[2].any()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_zero_gives_zero(side, dtype):
    assert not newton_schulz(side, np.zeros((3, 5)), ns_dtype=dtype).any()


@pytest.mark.parametrize("side", SIDES)
def test_transposing_and_rotating_commute(side):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(6, 9))
    Q = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    found = newton_schulz(side, x, ns_dtype="float64")
    np.testing.assert_allclose(newton_schulz(side, x.T, ns_dtype="float64"), found.T, atol=FLOAT64)
    np.testing.assert_allclose(newton_schulz(side, Q @ x, ns_dtype="float64"), Q @ found, atol=FLOAT64)


@pytest.mark.parametrize("name", torch_impl.NS_COEFFICIENTS)
def test_band_of_every_coefficient_set(name):
    """The band that the set documents holds, and is no wider than it must be."""
    entry = torch_impl.NS_COEFFICIENTS[name]
    s = np.geomspace(*entry.domain, 200_001)
    low, high = entry.band
    steps = entry.triples * 5 if len(entry.triples) == 1 else entry.triples
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    assert low - 1e-4 <= s.min() <= low + 1e-4
    assert high - 1e-4 <= s.max() <= high + 1e-4


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (96, 96)])
def test_bfloat16_keeps_the_invariants(shape):
    """Entry by entry bfloat16 says little; the large singular block, the band and the RMS do."""
    x = np.random.default_rng(6).normal(size=shape)
    exact = reference.newton_schulz_exact(x)
    s = np.linalg.svd(x, compute_uv=False)
    low, high = torch_impl.NS_COEFFICIENTS["jordan"].band
    inside = int((s / np.linalg.norm(s) >= 3e-3).sum())
    errors = {}
    for side in SIDES:
        found = newton_schulz(side, x, ns_dtype="bfloat16")
        assert block_error(found, exact, x) <= 0.1
        values = np.linalg.svd(found, compute_uv=False)
        assert values.max() <= high + BFLOAT16_VALUE
        assert np.sort(values)[::-1][inside - 1] >= low - BFLOAT16_VALUE
        rms = np.sqrt(np.mean(found**2) / np.mean(exact**2))
        assert abs(rms - 1) <= BFLOAT16_RMS
        errors[side] = np.linalg.norm(found - exact)
    assert max(errors.values()) <= 1.5 * min(errors.values())


@pytest.mark.parametrize("side", SIDES)
def test_large_norms_are_exact_in_float32(side):
    """torch's own float32 norm errs by 4e-5 at 2.4 million entries on CPU; a sum of squares in pairs does not.

    The triple (1, 0, 0) leaves the normalized matrix as it is.
    """
    x = np.random.default_rng(7).normal(size=(4, 600_000)).astype(np.float32)
    found = newton_schulz(side, x, ns_steps=1, ns_dtype="float32", ns_coefficients=[(1.0, 0.0, 0.0)])
    assert np.linalg.norm(x.astype(np.float64)) * found[1, 7] / x[1, 7] == pytest.approx(1.0, abs=3e-7)
    assert np.linalg.norm(found) == pytest.approx(1.0, abs=3e-7)


def test_coefficients_are_not_rounded_to_bfloat16_first():
    """3.4445 in bfloat16 is 3.4375: one step on s = 1 would give 0.6944 for 0.7010. Both results are bfloat16."""
    for side in SIDES:
        found = newton_schulz(side, np.ones((1, 1)), ns_steps=1, ns_dtype="bfloat16")
        # A = 1, b A + c A A = -2.7435 rounds to -2.75, a X + B X = 0.6945 exactly; then half a unit of bfloat16
        assert abs(found[0, 0] - (3.4445 - 2.75)) <= 2.0**-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_input_is_left_alone(dtype):
    x = torch.full((2, 2), 4.0, dtype=dtype)
    torch_impl.newton_schulz(x, ns_dtype=str(dtype).removeprefix("torch."))
    assert (x == 4.0).all()


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((6, 10), ((0,), (1,), ())),
        ((10, 6), ((1,), (0,), ())),
        ((3, 6, 10), ((1,), (2,), (0,))),
        ((6, 3, 10), ((0,), (2,), (1,))),
        ((10, 2, 3), ((1, 2), (0,), ())),  # (in, heads, head size): query, key, value kernels
        ((2, 3, 10), ((2,), (0, 1), ())),  # (heads, head size, out)
        ((4, 10, 2, 3), ((2, 3), (1,), (0,))),  # the same, stacked over layers
    ],
)
def test_any_storage_order(shape, axes):
    """Whatever axes hold outputs and inputs, the result is that of the (out, in) matrix."""
    x = np.random.default_rng(8).normal(size=shape)
    fan_out, fan_in, batch = axes
    order = (*batch, *fan_out, *fan_in)
    sizes = [int(np.prod([shape[a] for a in side], dtype=int)) for side in (fan_out, fan_in)]
    as_matrix = x.transpose(order).reshape(*(shape[a] for a in batch), *sizes)
    found = orthogonalize(jnp.asarray(x), jax_impl.MatrixAxes(*axes), ns_dtype="float64")
    back = np.asarray(found).transpose(order).reshape(as_matrix.shape)
    np.testing.assert_allclose(back, reference.newton_schulz(as_matrix), atol=FLOAT64)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ns_steps": 0}, ValueError, "ns_steps must be at least 1"),
        ({"ns_steps": 2.0}, TypeError, "ns_steps must be an integer"),
        ({"ns_dtype": "float16"}, ValueError, "ns_dtype must be one of"),
        ({"ns_coefficients": "jordn"}, ValueError, "ns_coefficients must be one of"),
        ({"ns_coefficients": [(1.0, 2.0)]}, TypeError, "triples"),
        ({"ns_coefficients": [(1.0, 0.0, 0.0)] * 3}, ValueError, "ns_steps=5 needs as many"),
    ],
)
def test_bad_options(side, options, error, message):
    with pytest.raises(error, match=message):
        newton_schulz(side, np.eye(2), **options)


@pytest.mark.parametrize("side", SIDES)
def test_vectors_are_rejected(side):
    with pytest.raises(ValueError, match="needs matrices"):
        newton_schulz(side, np.ones(3))


def test_float64_without_x64_is_an_error():
    """It would quietly become float32."""
    with jax.enable_x64(False), pytest.raises(ValueError, match="jax_enable_x64"):
        jax_impl.newton_schulz(jnp.eye(2), ns_dtype="float64")


@pytest.mark.parametrize("side", SIDES)
def test_own_triples(side):
    """The cubic 1.5 s - 0.5 s^3 twice, on s = 1/sqrt 2."""
    found = newton_schulz(side, np.eye(2), ns_steps=2, ns_dtype="float64", ns_coefficients=[(1.5, -0.5, 0.0)] * 3)
    s = 2**-0.5
    for _ in range(2):
        s = 1.5 * s - 0.5 * s**3
    np.testing.assert_allclose(found, s * np.eye(2), atol=2e-7)
