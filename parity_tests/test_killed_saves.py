"""A save that is killed never leaves a checkpoint that loads wrongly; damaged and foreign files are refused.

Children are forked from one process that has imported both frameworks and started no thread. Each saves one state after
the other, all values of a state being its step, until it gets SIGKILL. SIGKILL keeps what the kernel has been given to
write: that a state survives a power cut rests on fsync alone, which no test here shows.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from flax import serialization

import jax_impl
import torch_impl
from parity_tests.backends.torch_resume import one_process
from parity_tests.processes import ENVIRONMENT

ROOT = Path(__file__).parents[1]
TENSORS, SIZE = 8, 1 << 17  # 4 MiB of float32: most kills land inside a write
LONGEST = 0.12  # seconds between the start of the first save and the kill: several saves


def torch_state(step):
    return {f"t{i}": torch.full((SIZE,), float(step)) for i in range(TENSORS)}


def jax_state(step):
    return {f"t{i}": np.full(SIZE, step, np.float32) for i in range(TENSORS)}


SAVES = {  # (tries, save into a folder)
    "torch_impl": (12, lambda folder, step: torch_impl.save_checkpoint(folder / "file", torch_state(step))),
    "jax_impl": (12, lambda folder, step: jax_impl.save_checkpoint(folder / "file", jax_state(step))),
    "torch.save": (8, lambda folder, step: torch.save(torch_state(step), folder / "file")),
    "dcp": (9, lambda folder, step: save_dcp(folder / "same", step)),
    "dcp, a folder a step": (9, lambda folder, step: save_dcp(folder / str(step), step)),
}
LOADS = {"torch_impl": torch_impl.load_checkpoint, "jax_impl": jax_impl.load_checkpoint}


def save_dcp(folder, step, writers=1):
    with one_process():
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        dcp.save(torch_state(step), storage_writer=dcp.FileSystemWriter(folder, thread_count=writers))


def save_for_ever(save, folder, finished):
    os.write(finished, b"-")
    step = 0
    while True:
        step += 1
        save(folder, step)
        os.write(finished, b"-")


def kill_savers(root):
    """Print [[kind, folder, number of saves that had finished], ...]."""
    delays = random.Random(0)
    tries = []
    for kind, (number, save) in SAVES.items():
        for _ in range(number):
            folder = root / str(len(tries))
            folder.mkdir()
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    save_for_ever(save, folder, writer)
                finally:
                    os._exit(1)
            os.close(writer)
            os.read(reader, 1)
            time.sleep(delays.uniform(0, LONGEST))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "it ended by itself"
            with open(reader, "rb") as pipe:
                tries.append((kind, str(folder), len(pipe.read())))
    print(json.dumps(tries))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """{kind: [(folder, saves that had finished), ...]}"""
    root = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, **ENVIRONMENT, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "parity_tests.test_killed_saves", str(root)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = {kind: [] for kind in SAVES}
    for kind, folder, finished in json.loads(done.stdout):
        found[kind].append((Path(folder), finished))
    yield found
    shutil.rmtree(root)


def step_of(state):
    """The step that all values are of."""
    assert len(state) == TENSORS
    (step,) = {float(x) for value in state.values() for x in np.unique(np.asarray(value))}
    return step


def load_dcp(folder):
    state = torch_state(-1)
    with one_process():
        dcp.load(state, checkpoint_id=folder)
    return state


@pytest.mark.parametrize("side", ["torch_impl", "jax_impl"])
def test_save_checkpoint_keeps_the_last_state(side, killed):
    """Whatever happens, once one save was finished; what a killed save leaves behind, the next one takes away."""
    tries = killed[side]
    assert any((folder / ".file.tmp").exists() for folder, _ in tries), "no kill landed inside a write"
    assert any(finished > 0 for _, finished in tries)
    for folder, finished in tries:
        if finished == 0 and not (folder / "file").exists():
            with pytest.raises(FileNotFoundError):
                LOADS[side](folder / "file")
        else:
            assert step_of(LOADS[side](folder / "file")) in (finished, finished + 1)
        SAVES[side][1](folder, 1000)
        assert step_of(LOADS[side](folder / "file")) == 1000
        assert [path.name for path in folder.iterdir()] == ["file"]


def test_plain_torch_save_may_lose_everything_but_says_so(killed):
    """It empties the file first: the state before is gone."""
    refused = 0
    for folder, finished in killed["torch.save"]:
        try:
            state = torch_impl.load_checkpoint(folder / "file")
        except (ValueError, FileNotFoundError):
            refused += 1
        else:
            assert step_of(state) in (finished, finished + 1)
    assert refused > 0


def test_distributed_checkpoints_into_one_folder_may_lose_everything_but_say_so(killed):
    """The next save repairs it."""
    for folder, finished in killed["dcp"]:
        try:
            state = load_dcp(folder / "same")
        except dcp.api.CheckpointException:
            pass
        else:
            assert step_of(state) in (finished, finished + 1)
        save_dcp(folder / "same", 1000)
        assert step_of(load_dcp(folder / "same")) == 1000


def test_distributed_checkpoints_a_folder_a_step_keep_the_last_state(killed):
    """A folder has its .metadata when all of it is written; without, it is refused."""
    assert any(finished > 0 for _, finished in killed["dcp, a folder a step"])
    for folder, finished in killed["dcp, a folder a step"]:
        if finished > 0:
            assert step_of(load_dcp(folder / str(finished))) == finished
        begun = folder / str(finished + 1)
        if (begun / ".metadata").exists():
            assert step_of(load_dcp(begun)) == finished + 1
        elif begun.exists():
            with pytest.raises(dcp.api.CheckpointException):
                load_dcp(begun)


def test_distributed_checkpoints_of_several_files_can_be_mixed(tmp_path):
    """Why a folder a step: nothing in a file says of which step it is.

    Killed after one rank, or one writer, has replaced its file and before another has, a folder loads as a mixture.
    """
    for step in (1, 2):
        save_dcp(tmp_path / str(step), step, writers=2)
    shutil.copy(tmp_path / "2" / "__0_0.distcp", tmp_path / "1" / "__0_0.distcp")
    steps = {float(x) for value in load_dcp(tmp_path / "1").values() for x in value.unique()}
    assert steps == {1.0, 2.0}


def always(data):
    return lambda own, other: data


HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
DAMAGES = {  # what takes the place of (the checkpoint, that of the other side)
    **{f"{k} sixteenths": lambda own, other, k=k: own[: len(own) * k // 16] for k in range(16)},
    "all but a byte": lambda own, other: own[:-1],
    "the other side's": lambda own, other: other,
    "PNG": always(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(50)),
    "JSON": always(b'{"a": [1, 2]}'),
    "safetensors": always(struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)),
    "pickle of a dict": always(pickle.dumps({"a": [1, 2]})),
    "pickle of an object": always(pickle.dumps(Fraction(1, 2))),
    "flax msgpack": always(serialization.msgpack_serialize({"a": np.ones(2)})),
    "zeros": always(bytes(100)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("side", ["torch_impl", "jax_impl"])
def test_damaged_and_foreign_files_are_refused(side, damage, tmp_path):
    torch_impl.save_checkpoint(tmp_path / "torch_impl", {"a": torch.arange(500.0), "step": 3})
    jax_impl.save_checkpoint(tmp_path / "jax_impl", {"a": np.arange(500.0), "step": 3})
    (other,) = LOADS.keys() - {side}
    path = tmp_path / side
    assert LOADS[side](path)["a"][-1] == 499
    path.write_bytes(DAMAGES[damage](path.read_bytes(), (tmp_path / other).read_bytes()))
    with pytest.raises(ValueError, match=r"truncated or no checkpoint|was not written by save_checkpoint") as caught:
        LOADS[side](path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("side", ["torch_impl", "jax_impl"])
def test_paths_without_a_file(side, tmp_path):
    with pytest.raises(FileNotFoundError):
        LOADS[side](tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        LOADS[side](tmp_path)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    kill_savers(Path(sys.argv[1]))
