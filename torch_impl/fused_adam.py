"""Fused Adam: AdamW, or Adam with L2 regularization, in one pass over memory and with float32 masters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torch_impl.config import FusedAdamConfig
from torch_impl.group_step import GroupStepOptimizer


class FusedAdam(GroupStepOptimizer):
    """Adam with a step count per group.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        p = p - lr (u + weight_decay p)

    The count t advances at every step, also for members of the group without a gradient, which keep their value and
    state. With ``torch.amp.GradScaler`` gradients are unscaled inside the step, and a step with an inf or a NaN is
    skipped whole, its count included, without waiting for the device.

    Args:
        params: parameters or groups, as for any torch optimizer; float64, float32, bfloat16 or float16, of any shape.
        lr: learning rate.
        betas, eps: decay rates of the moments (b1, b2); eps stands outside the root.
        weight_decay: decoupled; added to the gradient with ``adam_w_mode=False``.
        adam_w_mode: AdamW or Adam with L2 regularization.
        bias_correction: False leaves out the divisions by 1 - b^t.
        capturable: keep lr and weight decay on the device as tensors that schedulers fill in place and that a captured
            CUDA graph reads live.
        master_weights: keep float32 masters of bfloat16 and float16 parameters, which are then the rounded masters;
            a parameter that was changed from outside wins over its master.

    Groups may override every one of them.

    Raises:
        TypeError, ValueError: a wrong value, see torch_impl.config.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019. Step count, masters and names of the state as in the
    fused Adam of NVIDIA's TransformerEngine.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then sets grad_scale and found_inf before a step

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = True,
        master_weights: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "adam_w_mode": adam_w_mode,
            "bias_correction": bias_correction,
            "capturable": capturable,
            "master_weights": master_weights,
        }
        self.check_hyperparameters(defaults)
        super().__init__(params, defaults)

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        fields = {name: group[name] for name in FusedAdamConfig.__dataclass_fields__ if name in group}
        numbers = {name: float(x) for name, x in fields.items() if isinstance(x, Tensor)}
        FusedAdamConfig(fused=True, **{**fields, **numbers})

    def update_(self, params: list[Tensor], group: dict[str, Any]) -> None:
        self.adam_(params, group, adam_w_mode=group["adam_w_mode"], bias_correction=group["bias_correction"])
