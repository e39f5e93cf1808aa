"""The momentum recurrence of Muon, on whole matrices and on stacks of experts.

M = mu M + g            (a sum, not an average; no bias correction)
G = g + mu M  if nesterov else  M
"""

from __future__ import annotations

import torch
from torch import Tensor


def active_slices(grad: Tensor) -> Tensor:
    """Which experts of ``grad`` (E, M, N) saw a token: bool (E, 1, 1), False where the whole slice is zero."""
    return (grad != 0).flatten(1).any(dim=1)[:, None, None]


def update_momentum_(momentum_buffer: Tensor, grad: Tensor, muon_momentum: float, active: Tensor | None) -> None:
    """M = mu M + g.

    Args:
        momentum_buffer: (..., M, N), modified in place.
        grad: same shape and dtype, not modified.
        muon_momentum: mu in [0, 1).
        active: None, or what active_slices returns; idle slices keep their momentum.
    """
    if active is None:
        momentum_buffer.mul_(muon_momentum).add_(grad)
    else:
        momentum_buffer.copy_(torch.where(active, momentum_buffer * muon_momentum + grad, momentum_buffer))


def descent_direction(momentum_buffer: Tensor, grad: Tensor, muon_momentum: float, nesterov: bool) -> Tensor:
    """G, the matrix that is orthogonalized; neither argument is modified."""
    return grad.add(momentum_buffer, alpha=muon_momentum) if nesterov else momentum_buffer
