"""Two frameworks in processes of their own, side by side: their thread pools fight inside one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with (framework, steps done, steps)."""

BACKENDS = {"torch": "parity_tests.backends.torch_training", "jax": "parity_tests.backends.jax_training"}
POLL_SECONDS = 0.05
STDERR_TAIL = 2000  # characters
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # a GPU is shared by the two processes
}
XLA_FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Deliver Ctrl-C after the block: between the start of a process and its entry in a table nobody would end it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def run_processes(job: dict[str, Any], stem: Path, steps: int, progress: Progress | None) -> None:
    """Run both trainings to their end; whatever else happens, neither is left running.

    Args:
        job: what both read, JSON-able; each is told its own "result" file, ``<stem>-<framework>.npz``.
        stem: path and beginning of the names of all files.
        steps: number of updates, for ``progress``.
        progress: told whenever a framework has printed how far it is.

    Raises:
        RuntimeError: one failed; the message ends with the end of its stderr.
    """
    environment = {**os.environ, **ENVIRONMENT, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()}
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    if job["device"] == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    processes: dict[str, subprocess.Popen[bytes]] = {}
    done = dict.fromkeys(BACKENDS, 0)
    try:
        for framework, module in BACKENDS.items():
            own = f"{stem}-{framework}"
            Path(f"{own}.json").write_text(json.dumps({**job, "result": f"{own}.npz"}, indent=1), encoding="utf-8")
            command = [sys.executable, "-m", module, f"{own}.json"]
            with open(f"{own}.out", "wb") as out, open(f"{own}.err", "wb") as err, _interrupts_held():
                processes[framework] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment
                )
        running = True
        while running:
            running = False
            for framework, process in processes.items():
                code = process.poll()
                if code:
                    error = Path(f"{stem}-{framework}.err").read_text(encoding="utf-8", errors="replace")
                    raise RuntimeError(
                        f"the {framework} training ended with exit code {code}: {error[-STDERR_TAIL:].strip()}"
                    )
                running |= code is None
                lines = Path(f"{stem}-{framework}.out").read_bytes().split(b"\n")[:-1]
                if progress and lines and int(lines[-1]) != done[framework]:
                    done[framework] = int(lines[-1])
                    progress(framework, done[framework], steps)
            if running:
                time.sleep(POLL_SECONDS)
    finally:
        for process in processes.values():
            process.kill()  # does nothing to one that has ended
        for process in processes.values():
            process.wait()
