"""Every cell of the resume matrix, and that it finds what is lost."""

from __future__ import annotations

import copy
import subprocess

import jax
import numpy as np
import pytest
import torch
from flax import serialization

from jax_impl.tree import leaf_name
from parity_tests import resume
from parity_tests.backends import jax_resume, torch_resume

BACKENDS = {"torch": torch_resume, "jax": jax_resume}
NUMBER_OF_CELLS = {"torch": {5 * 7}, "jax": {6 * 4, 6 * 2, 5 * 2}}  # formats times orders, a row


@pytest.mark.parametrize(("side", "row"), [(side, row) for side, backend in BACKENDS.items() for row in backend.ROWS])
def test_every_cell_is_equal(side, row, device, tmp_path):
    backend = BACKENDS[side]
    found = resume.differences(backend.Cells(*backend.ROWS[row], device, tmp_path))
    assert len(found) in NUMBER_OF_CELLS[side]
    assert {cell: difference for cell, difference in found.items() if difference is not None} == {}


def changed(path, function):
    """A loss on the torch side: one value, replaced."""

    def loss(states):
        part, key = path
        states[part][key] = function(states[part][key])

    return loss


def drop(ending):
    def loss(states):
        for key in [key for key in states["optimizer"] if key.endswith(ending)]:
            del states["optimizer"][key]

    return loss


def leaves(part, function):
    """A loss on the JAX side: all leaves with this part in their name."""

    def loss(tree):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: function(leaf) if part in leaf_name(path).split(".") else leaf, tree
        )

    return loss


GROUP_0 = "opt_state.inner.inner_states.0.adamw.inner_state"  # the lower lr: fc
LOSSES = [
    ("torch", "adamw float32", changed(("optimizer", "state.fc.weight.exp_avg"), lambda m: m + 1), "model.fc.weight"),
    ("torch", "adamw float32", changed(("scheduler", "last_epoch"), lambda n: n + 1), "model.embed.weight"),
    ("torch", "adamw float32", changed(("model", "head.bias"), lambda p: p.nextafter(p + 1)), "model.head.bias"),
    ("torch", "adamw float32", lambda states: states.pop("optimizer"), "KeyError: 'optimizer'"),
    ("torch", "muonwithauxadamw bfloat16", drop(".master_param"), "model.embed.weight"),
    ("jax", "adamw float32", leaves("nu", lambda v: v + 1), f"{GROUP_0}.inner.nu.fc.bias"),
    ("jax", "adamw float32", leaves("schedule_count", lambda n: n + 1), f"{GROUP_0}.schedule_count"),
    ("jax", "adamw float32", leaves("schedule_count", lambda n: n.astype("int64")), "the number of traces, which is 2"),
    ("jax", "adamw float32", serialization.to_state_dict, "the structure of opt_state"),
    (
        "jax",
        "muonwithauxadamw bfloat16",
        leaves("master", lambda p: p.astype("bfloat16").astype("float32")),
        f"{GROUP_0}.master.fc.bias",
    ),
]


@pytest.fixture
def lossy(monkeypatch):
    """Let the first format of a side lose something when it is read."""

    def install(side, loss):
        fmt, (save, load) = next(iter(BACKENDS[side].FORMATS.items()))

        def lossy_load(*arguments):
            loaded = copy.deepcopy(load(*arguments))
            lost = loss(loaded)
            return loaded if side == "torch" else lost

        monkeypatch.setitem(BACKENDS[side].FORMATS, fmt, (save, lossy_load))
        return fmt

    return install


@pytest.mark.parametrize(("side", "row", "loss", "difference"), LOSSES)
def test_what_is_lost_is_found(side, row, loss, difference, lossy, device, tmp_path):
    fmt = lossy(side, loss)
    backend = BACKENDS[side]
    cells = backend.Cells(*backend.ROWS[row], device, tmp_path)
    cells.FORMATS, cells.ORDERS = {fmt: cells.FORMATS[fmt]}, cells.ORDERS[:1]
    assert list(resume.differences(cells).values()) == [difference]


def test_bits_count():
    """Values that are equal and yet differ: the sign of zero, dtype, int for float."""
    assert torch_resume.first_difference({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}) == "a"
    assert torch_resume.first_difference({"a": torch.zeros(2)}, {"a": torch.zeros(2).double()}) == "a"
    assert torch_resume.first_difference({"a": {"b": 1}}, {"a": {"b": 1.0}}) == "a.b"
    assert torch_resume.first_difference({"a": {"b": 1}}, {"a": {}}) == "a: ['b']"
    nan = torch.tensor(float("nan"))
    assert torch_resume.first_difference({"a": nan}, {"a": nan.clone()}) is None
    assert jax_resume.first_difference({"a": np.zeros(2)}, {"a": -np.zeros(2)}) == "a"
    assert jax_resume.first_difference({"a": np.zeros(2)}, {"a": np.zeros(2, np.float32)}) == "a"
    assert jax_resume.first_difference({"a": np.zeros(2)}, {"b": np.zeros(2)}) == "the names ['a', 'b']"


def test_the_program_prints_all_and_says_what_differs(lossy, monkeypatch, capsys):
    monkeypatch.setattr(torch_resume, "ROWS", {"adam float32": ("adam", "float32")})
    assert resume.main(["--side", "torch"]) == 0
    printed = capsys.readouterr().out
    assert (printed.count("equal"), printed.count("DIFFERS")) == (35, 0)
    lossy("torch", changed(("optimizer", "state.fc.weight.exp_avg"), lambda m: m + 1))
    assert resume.main(["--side", "torch"]) == 1
    printed = capsys.readouterr().out
    assert (printed.count("equal"), printed.count("DIFFERS")) == (28, 7)
    assert "torch adam float32 | state_dict | scheduler, model, optimizer: model.fc.weight\n" in printed


@pytest.mark.parametrize(("codes", "status"), [((0, 0), 0), ((0, 1), 1), ((-9, 0), 1)])
def test_both_sides_run_in_processes_of_their_own(codes, status, monkeypatch):
    calls = []

    def run(command, **kwargs):
        calls.append(command[-4:])
        return subprocess.CompletedProcess(command, codes[len(calls) - 1])

    monkeypatch.setattr(subprocess, "run", run)
    assert resume.main([]) == status
    assert calls == [["--device", "cpu", "--side", side] for side in ("torch", "jax")]
