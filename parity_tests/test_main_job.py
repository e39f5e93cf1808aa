"""The real training, and the command line around everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from parity_tests.__main__ import main, matches
from parity_tests.tolerances import TRAINING_FLOAT64
from parity_tests.training import ModelShape, batches, corpus, initial_weights, run_pair, runs

ROOT = Path(__file__).parents[1]
STEPS = 30


@pytest.mark.parametrize("index", [0, 1], ids=["muonwithauxadamw", "adamw"])
def test_training_ends_at_the_same_place(index, device):
    run = runs(STEPS)[index]
    result = run_pair(run, "float64", STEPS, device)
    assert result.passed
    assert result.total_distance[0] == 0.0  # the weights were converted exactly
    assert result.final_distance <= TRAINING_FLOAT64.value
    assert result.worst_distance.max() <= TRAINING_FLOAT64.value
    assert result.loss_difference.max() <= 1e-12
    np.testing.assert_allclose(result.learning_rates["torch"], result.learning_rates["jax"], rtol=0, atol=1e-14)
    for losses in result.losses.values():
        assert abs(losses[0] - np.log(result.shape.vocab)) < 0.1  # nothing is known yet
        assert losses[-1] < losses[0] - 1.0  # and it learns
    assert result.run.name == run.name
    assert "lm_head" in result.routing["torch"]
    assert bool(result.momentum) == (index == 0)


def test_training_data_is_real_and_windows_are_right():
    tokens = corpus()
    shape = ModelShape(vocab=int(tokens.max()) + 1, context=10)
    assert len(tokens) > 100_000
    assert 60 < shape.vocab < 300
    windows = batches(tokens, shape, 3, 2, seed=1)
    assert windows.shape == (2, 3, 11)
    text = tokens.tobytes()
    assert all(window.tobytes() in text for window in windows.reshape(-1, 11))
    weights = initial_weights(shape, seed=0)
    assert all((w.astype(np.float32) == w).all() for w in weights.values())
    assert weights["lm_head.weight"].shape == (shape.vocab, shape.width)


def test_training_errors():
    run = runs(2)[0]
    with pytest.raises(ValueError, match="dtype must be one of"):
        run_pair(run, "bfloat16", 2)
    with pytest.raises(ValueError, match="at least 1"):
        run_pair(run, "float64", 0)


@pytest.mark.parametrize(
    ("expression", "name", "expected"),
    [
        ("", "muon-gaps", True),
        ("muon", "muon-gaps", True),
        ("muon and not gaps", "muon-gaps", False),
        ("muon and not gaps", "muon-shapes", True),
        ("not muon", "wsd", True),
        ("adam or wsd", "wsd", True),
        ("adam and x or wsd", "adamw-gaps", False),
        ("not", "adamw-not", True),
        ("cosine", "cosine", True),
        ("cosine", "cosine-restarts", False),  # the id of a row stands for that row alone
    ],
)
def test_expressions(expression, name, expected):
    assert matches(expression, name) is expected


def test_a_part_of_the_job_passes_and_reports(tmp_path, capsys):
    assert main(["-k", "adamw-defaults or wsfd", "--dtype", "float64", "--steps", "5", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "adamw-defaults float64 free" in printed
    assert "schedule wsfd" in printed
    report = (tmp_path / "index.html").read_text()
    assert "adamw-defaults" in report
    assert list(tmp_path.iterdir()) == [tmp_path / "index.html"]


def test_a_mismatch_is_status_1(tmp_path, capsys, monkeypatch):
    import jax_impl.muon

    monkeypatch.setattr(jax_impl.muon, "adjusted_lr_scale", lambda shape, axes, scale: 0.1)
    status = main(["-k", "muon-defaults", "--dtype", "float64", "--steps", "3", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert status == 1
    assert "the reference says that jax is wrong" in printed
    assert "run it alone python -m parity_tests -k muon-defaults --dtype float64" in printed
    assert "jax is wrong" in (tmp_path / "index.html").read_text()


def test_a_row_that_crashes_costs_only_itself(tmp_path, capsys, monkeypatch):
    import jax_impl.muon

    def broken(*args):
        raise RuntimeError("planted crash")

    monkeypatch.setattr(jax_impl.muon, "adjusted_lr_scale", broken)
    status = main(
        ["-k", "adamw-defaults or muon-defaults", "--dtype", "float64", "--steps", "3", "--out", str(tmp_path)]
    )
    printed = capsys.readouterr().out
    assert status == 1
    assert "ok   adamw-defaults float64 free" in printed
    assert "FAIL muon-defaults float64 free" in printed
    assert "planted crash" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--steps", "many"], "invalid int value"),
        (["--dtype", "float16"], "invalid choice"),
        (["--devise", "cpu"], "unrecognized arguments"),
        (["-k", "nothing-of-that-name"], "nothing matches"),
        (["--out", "pyproject.toml/report"], "no folder that can be written"),
    ],
)
def test_bad_arguments_are_status_2(arguments, message, capsys, monkeypatch, tmp_path):
    if "--out" not in arguments:
        arguments = [*arguments, "--out", str(tmp_path / "report")]
    monkeypatch.chdir(ROOT)
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing_behind(tmp_path):
    """SIGINT during the training: status 130, no report, and both children gone."""
    command = [sys.executable, "-m", "parity_tests", "-k", "training adamw", "--dtype", "float64", "--steps", "5000"]
    # a suite that runs in the background ignores SIGINT, and a new process would inherit that
    own_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "report")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    signal.signal(signal.SIGINT, own_handler)
    children: list[int] = []
    deadline = time.monotonic() + 60
    while len(children) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        children = [int(pid) for pid in listing.stdout.split()]
    assert len(children) == 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; no report was written" in errors
    assert not list((tmp_path / "report").iterdir())
    for pid in children:
        assert not Path(f"/proc/{pid}").exists()
