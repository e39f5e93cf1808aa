"""States in files that are whole or absent."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

_SCALARS = (bool, int, float, str, bytes)


def save_checkpoint(path: str | os.PathLike[str], tree: Any) -> None:
    """``torch.save`` of ``tree``, a dict of state dicts, counters and the like, that never leaves half a file.

    Whoever is killed while writing leaves the file at ``path`` as it was: the bytes go to a file beside it, which
    takes its place when they are on the disk.

    Raises:
        TypeError: something in ``tree`` that ``torch.load(weights_only=True)`` would refuse; nothing is written then.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    _check_plain(tree, "")
    with temporary.open("wb") as file:
        torch.save(tree, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: str | os.PathLike[str]) -> Any:
    """What save_checkpoint wrote, tensors on the CPU, read without running any code in the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, or another kind of file.
    """
    with Path(path).open("rb") as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # on a foreign file the unpickler raises what it happens to meet
            raise ValueError(f"{os.fspath(path)!r} is truncated or no checkpoint: {error}") from error


def _check_plain(x: Any, path: str) -> None:
    """Exact types: ``weights_only`` knows no subclass, not even the float that a numpy scalar is."""
    if type(x) in (dict, OrderedDict):
        for key, value in x.items():
            inside = f"{path}.{key}" if path else str(key)
            if type(key) not in _SCALARS:
                raise TypeError(f"the key of {inside!r} must be a plain value, got {type(key).__name__}")
            _check_plain(value, inside)
    elif type(x) in (list, tuple):
        for i, value in enumerate(x):
            _check_plain(value, f"{path}.{i}")
    elif not (x is None or type(x) in _SCALARS or isinstance(x, (torch.Tensor, torch.dtype, torch.Size))):
        raise TypeError(f"{path!r} must be a tensor or a plain value, got {type(x).__name__}")
