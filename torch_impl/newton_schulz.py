"""Newton-Schulz: an approximate polar factor U V^T of a matrix, by matrix products alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NORM_EPS = 1e-7  # added to the Frobenius norm, so that a zero matrix stays zero

NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

Triple = tuple[float, float, float]


class CoefficientSet(NamedTuple):
    """Triples (a, b, c) of the quintic a s + b s^3 + c s^5 that acts on every singular value s.

    Attributes:
        triples: one a step; a single triple serves every step.
        source: where the numbers were published.
        band: (lowest, highest) singular value after five steps, for inputs within ``domain``; measured on two
            million values in float64.
        domain: (lowest, highest) singular value of the normalized input for which ``band`` holds.
    """

    triples: tuple[Triple, ...]
    source: str
    band: tuple[float, float]
    domain: tuple[float, float]


NS_COEFFICIENTS = {
    "jordan": CoefficientSet(
        triples=((3.4445, -4.7750, 2.0315),),
        source="Keller Jordan, Muon: an optimizer for hidden layers in neural networks, 2024, kellerjordan.github.io",
        band=(0.6818, 1.2024),
        domain=(3e-3, 1.0),
    ),
}


def resolve_coefficients(ns_coefficients: str | Sequence[Triple], ns_steps: int) -> tuple[Triple, ...]:
    """One (a, b, c) for each of ``ns_steps`` steps, from the name of a set or from triples.

    Raises:
        ValueError: ``ns_steps`` below 1, an unknown name, or more steps than triples.
        TypeError: ``ns_steps`` is not an integer, or the triples are not triples of numbers.
    """
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int):
        raise TypeError(f"ns_steps must be an integer, got {ns_steps!r}")
    if ns_steps < 1:
        raise ValueError(f"ns_steps must be at least 1, got {ns_steps}")
    if isinstance(ns_coefficients, str):
        if ns_coefficients not in NS_COEFFICIENTS:
            raise ValueError(
                f"ns_coefficients must be one of {sorted(NS_COEFFICIENTS)} or triples, got {ns_coefficients!r}"
            )
        triples = NS_COEFFICIENTS[ns_coefficients].triples
    else:
        triples = tuple(tuple(triple) for triple in ns_coefficients)  # type: ignore[misc]
        for triple in triples:
            if len(triple) != 3 or not all(isinstance(k, (int, float)) and math.isfinite(k) for k in triple):
                raise TypeError(f"ns_coefficients must be triples (a, b, c) of finite numbers, got {triple!r}")
    if len(triples) == 1:
        return triples * ns_steps
    if len(triples) < ns_steps:
        raise ValueError(f"ns_steps={ns_steps} needs as many coefficient triples, got {len(triples)}")
    return triples[:ns_steps]


def newton_schulz(
    x: Tensor,
    *,
    ns_steps: int = 5,
    ns_dtype: str = "bfloat16",
    ns_coefficients: str | Sequence[Triple] = "jordan",
) -> Tensor:
    """Push the singular values of each matrix towards 1 and keep its singular vectors.

        X = G / (||G||_F + 1e-7);  ns_steps times: A = X X^T,  X = a X + (b A + c A A) X

    Args:
        x: (..., M, N), not modified; every matrix of a batch is normalized by its own norm.
        ns_steps: number of iterations, at least 1.
        ns_dtype: "bfloat16", "float32" or "float64", the dtype of the products. ``x`` is cast once, before it is
            normalized; products of bfloat16 matrices accumulate in float32.
        ns_coefficients: name of a set in NS_COEFFICIENTS, or triples (a, b, c).

    Returns:
        A tensor of the shape of ``x`` in ``ns_dtype``. Zero input gives zero.

    Raises:
        ValueError: fewer than two dimensions, an unknown ``ns_dtype`` or coefficient set, too few triples.

    Source: Jordan et al. 2024 (see NS_COEFFICIENTS); iteration on the shorter side, as A is then smallest.
    """
    if x.ndim < 2:
        raise ValueError(f"newton_schulz needs matrices (..., M, N), got shape {tuple(x.shape)}")
    if ns_dtype not in NS_DTYPES:
        raise ValueError(f"ns_dtype must be one of {sorted(NS_DTYPES)}, got {ns_dtype!r}")
    triples = resolve_coefficients(ns_coefficients, ns_steps)
    X = x.to(NS_DTYPES[ns_dtype])
    tall = X.size(-2) > X.size(-1)
    if tall:
        X = X.mT
    shape = X.shape
    X = X.reshape(math.prod(shape[:-2]), *shape[-2:])
    # square().sum() adds pairwise; torch's float32 norm on CPU does not and errs by 5e-3 on large matrices
    wide = X if X.dtype == torch.float64 else X.float()
    norm = wide.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    X = (wide / (norm + NORM_EPS)).to(X.dtype)
    for a, b, c in triples:
        A = X @ X.mT
        # baddbmm rounds b A + c A A once, and scales in float32 whatever the dtype of A
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    X = X.reshape(shape)
    return X.mT if tall else X
