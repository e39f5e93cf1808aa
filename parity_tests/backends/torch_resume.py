"""Trainings of torch_impl that are saved and loaded in every format and order; see parity_tests.resume."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import torch_impl
from parity_tests.resume import SCHEDULE, K, keywords
from torch_impl.config import CONFIGS

PARTS = ("model", "optimizer", "scheduler")
DTYPES = ("float32", "bfloat16", "float64")
ROWS = {f"{t} {dtype}": (t, dtype) for t in CONFIGS for dtype in DTYPES}
LATE = "model, optimizer, scheduler built then, scheduler"


class Training:
    """A model with its optimizer and scheduler, stepped with seeded gradients that depend on the step alone."""

    def __init__(
        self,
        optimizer_type: str,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        *,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "fc": nn.Linear(4, 6), "head": nn.Linear(6, 4)})
        model["fc"].register_parameter("experts", nn.Parameter(torch.randn(2, 4, 3)))
        self.model = model.to(device, dtype)
        options = {**keywords(optimizer_type), **kwargs}
        self.optimizer = torch_impl.build_optimizer(self.model, optimizer_type, **options)
        self.build_scheduler()

    def build_scheduler(self) -> None:
        self.scheduler = torch_impl.build_lr_scheduler(self.optimizer, "wsd", **SCHEDULE)

    def run(self, start: int, stop: int) -> Training:
        for t in range(start, stop):
            generator = torch.Generator().manual_seed(t)
            for k, p in enumerate(self.model.parameters()):
                gradient = torch.randn(p.shape, generator=generator).to(p)
                p.grad = None if (t + k) % 5 == 0 else gradient
            self.optimizer.step()
            self.scheduler.step()
        return self

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        return {part: getattr(self, part).state_dict() for part in PARTS}

    def snapshot(self) -> dict[str, dict[str, Any]]:
        return copy.deepcopy(self.state_dicts())


Save = Callable[[Path, Training], Any]
"""Gives what Load takes: the state itself, or where it is."""
Load = Callable[[Any, Training], dict[str, dict[str, Any]]]


def first_difference(a: Any, b: Any, name: str = "") -> str | None:
    """Name of the first value of ``a`` that is another one in ``b``: other keys, type, dtype, shape or bits."""
    if type(a) is not type(b):
        return name
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f"{name}: {sorted(a.keys() ^ b.keys())}"
        names = {key: f"{name}.{key}" if name else key for key in a}
        return next((x for key in a if (x := first_difference(a[key], b[key], names[key])) is not None), None)
    if isinstance(a, torch.Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    else:
        equal = a == b
    return None if equal else name


def _bits(x: torch.Tensor) -> bytes:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextmanager
def one_process() -> Iterator[None]:
    """torch.distributed.checkpoint warns that there is no process group; that is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _save_dcp(path: Path, training: Training) -> Path:
    with one_process():
        save(training.state_dicts(), checkpoint_id=path)
    return path


def _save_dcp_async(path: Path, training: Training) -> Path:
    """Training goes on, in place, while the file is written."""
    with one_process():
        future: Any = async_save(training.state_dicts(), checkpoint_id=path)
        training.run(K, K + 2)
        future.result()
    return path


def _load_dcp(path: Path, fresh: Training) -> dict[str, dict[str, Any]]:
    """DCP fills the tensors of a fresh state_dict: they must all be there before the first step."""
    states = fresh.state_dicts()
    with one_process():
        load(states, checkpoint_id=path)
    return states


def _save_file(write: Callable[[Any, Path], None]) -> Save:
    def save_parts(path: Path, training: Training) -> Path:
        write(training.state_dicts(), path)
        return path

    return save_parts


FORMATS: dict[str, tuple[Save, Load]] = {
    "state_dict": (lambda path, training: training.snapshot(), lambda saved, fresh: saved),
    "torch.save": (_save_file(torch.save), lambda path, fresh: torch.load(path, weights_only=True)),
    "dcp.save": (_save_dcp, _load_dcp),
    "dcp.async_save": (_save_dcp_async, _load_dcp),
    "save_checkpoint": (
        _save_file(lambda states, path: torch_impl.save_checkpoint(path, states)),
        lambda path, fresh: torch_impl.load_checkpoint(path),
    ),
}


class Cells:
    """See parity_tests.resume.Cells."""

    FORMATS = FORMATS
    ORDERS = (*(", ".join(order) for order in itertools.permutations(PARTS)), LATE)

    def __init__(self, optimizer_type: str, dtype: str, device: str, folder: Path) -> None:
        self._arguments = (optimizer_type, getattr(torch, dtype), device)
        self._whole = Training(*self._arguments).run(0, 2 * K).snapshot()
        self._saved = {
            fmt: save_to(folder / fmt, Training(*self._arguments).run(0, K)) for fmt, (save_to, _) in FORMATS.items()
        }

    def difference(self, fmt: str, order: str) -> str | None:
        resumed = Training(*self._arguments, seed=1)
        saved = FORMATS[fmt][1](self._saved[fmt], resumed)
        for part in order.split(", "):
            if part in PARTS:
                getattr(resumed, part).load_state_dict(saved[part])
            else:
                resumed.build_scheduler()
        return first_difference(self._whole, resumed.run(K, 2 * K).snapshot())
