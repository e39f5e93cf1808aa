"""Executes the notebooks and compares their numbers; ``python notebooks/test_notebooks.py`` saves them executed.

A picture cannot be compared, so each notebook ends in a cell that prints one JSON object a line.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
MOST_BYTES = 400_000
ABSOLUTE_PATH = re.compile(r"/(?:work|tmp|home|root|usr|opt|var|mnt|Users)\b|site-packages|[A-Za-z]:\\\\")

EXACT = 1e-12
"""Torch multipliers against hand-derived ones: a few roundings of float64."""
FLOAT32_OF_PEAK = 2e-7
"""JAX in float32 against torch: under two units in the last place of the peak."""

GOLDEN = {"wsd": "wsd_cos_basic", "lambdacosine": "cos_three_mixed", "lambdalinear": "lin_three_mixed"}

BY_HAND: dict[str, dict[int, float]] = {
    # 10 warm-up, 30 stable, 20 decay; half way through a ramp or a decay the mean of its ends
    "wsd": {0: 0.01, 5: 0.505, 10: 1.0, 40: 1.0, 50: 0.55, 60: 0.1, 64: 0.1},
    "wsfd": {0: 0.01, 5: 0.505, 10: 1.0, 25: 0.8, 40: 0.6, 50: 0.35, 60: 0.1},
    # 11 is one of seven steps from 0.7 to 0.1, 18 one of four from 0.05 to 0.4; the last value is held
    "lambdalinear": {0: 0.0, 3: 1.0, 10: 0.2, 11: 0.7 - 0.6 / 7, 17: 0.1, 18: 0.1375, 30: 0.05, 33: 0.05},
    "lambdacosine": {0: 0.0, 3: 1.0, 10: 0.2, 17: 0.1, 18: 0.1375, 30: 0.05, 33: 0.05},
}


class Client(NotebookClient):
    """Leaves what a slider draws among the outputs of the cell that moved it.

    The parent mimics the Output widget and sends its state to the kernel on the channel on which it awaits the
    reply to the cell. That send can swallow the wake-up for the reply, and the run then waits for its timeout.
    """

    def on_comm_open_jupyter_widget(self, msg: dict[str, Any]) -> None:
        return None


def execute(path: Path, probes: list[str] | None = None) -> NotebookNode:
    """Run a notebook, and then ``probes`` as further cells, against this checkout on the CPU."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells += [new_code_cell(source) for source in probes or []]
    client = Client(
        notebook,
        kernel_name="python3",
        timeout=120,
        resources={"metadata": {"path": str(FOLDER)}},
        coalesce_streams=True,
        record_timing=False,
    )
    paths = [str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "JAX_PLATFORMS": "cpu"}
    return client.execute(env=env)


def outputs(notebook: NotebookNode) -> Iterator[NotebookNode]:
    for cell in notebook.cells:
        yield from cell.get("outputs", [])


def printed(cell: NotebookNode) -> list[Any]:
    """What a cell printed, one JSON value a line."""
    text = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
    return [json.loads(line) for line in text.splitlines()]


def check_schedules(lines: list[dict[str, Any]]) -> None:
    *schedules, last = lines
    assert [line["schedule"] for line in schedules] == ["wsd", "wsfd", "lambdacosine", "lambdalinear"]
    golden = json.loads((FOLDER.parent / "parity_tests" / "golden" / "schedules.json").read_text())
    cases = {case["id"]: case for case in golden["cases"]}
    for line in schedules:
        name = line["schedule"]
        torch_values = dict(zip(line["steps"], line["torch"], strict=True))
        jax_values = dict(zip(line["steps"], line["jax"], strict=True))
        assert BY_HAND[name].keys() <= torch_values.keys()
        expected = list(BY_HAND[name].items())
        if name in GOLDEN:
            case = cases[GOLDEN[name]]
            reference = [(n, f) for n, f in zip(case["steps"], case["values"], strict=True) if n in torch_values]
            # past the end of its last cycle the reference has no value
            reference = [(n, f) for n, f in reference if isinstance(f, float)]
            assert len(reference) >= 7
            expected += reference
        for n, f in expected:
            assert torch_values[n] == pytest.approx(f, rel=0, abs=EXACT), (name, n)
            assert jax_values[n] == pytest.approx(f, rel=0, abs=FLOAT32_OF_PEAK), (name, n)
        # exact equality would mean that one side was compared with itself
        assert 0 < line["float32"] <= FLOAT32_OF_PEAK
        assert line["float64"] <= EXACT
    assert last["refusal"].startswith("Both sides refuse this.\nValueError: wsfd needs warm_up_steps >= 1")
    assert last["refusal"].endswith("got 40, 20 and total_steps=60")


CHECKS: dict[str, Callable[[list[dict[str, Any]]], None]] = {"01_schedules": check_schedules}

PROBES: dict[str, list[str]] = {
    "01_schedules": [
        "controls = {child.description: child for child in phased_control.children[:-1]}\n"
        "controls['schedule'].value = 'wsfd'",
        "controls['total_steps'].value = 300",
        "cyclic_control.children[1].value = 5",
    ]
}


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def executed(request: pytest.FixtureRequest) -> tuple[str, NotebookNode, list[NotebookNode]]:
    """Name, the freshly executed notebook, and its probe cells."""
    name = request.param.stem
    probes = PROBES.get(name, [])
    notebook = execute(request.param, probes)
    end = len(notebook.cells) - len(probes)
    return name, NotebookNode(notebook | {"cells": notebook.cells[:end]}), notebook.cells[end:]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def committed(request: pytest.FixtureRequest) -> tuple[Path, NotebookNode]:
    notebook = nbformat.read(request.param, as_version=4)
    nbformat.validate(notebook)
    return request.param, notebook


def test_every_notebook_is_checked() -> None:
    assert NOTEBOOKS
    assert set(CHECKS) == {path.stem for path in NOTEBOOKS}


def test_numbers_of_a_fresh_run(executed: tuple[str, NotebookNode, list[NotebookNode]]) -> None:
    name, notebook, _ = executed
    assert not [output for output in outputs(notebook) if "Warning:" in output.get("text", "")]
    CHECKS[name](printed(notebook.cells[-1]))


def test_sliders_of_schedules(executed: tuple[str, NotebookNode, list[NotebookNode]]) -> None:
    name, _, probes = executed
    if name != "01_schedules":
        pytest.skip("has no sliders")  # the fixture runs every notebook, and only this one can be moved
    drawn, refused, cycled = (cell.outputs for cell in probes)
    assert [set(output.get("data", {})) for output in drawn + cycled] == [{"image/png", "text/plain"}] * 2
    message = " ".join("".join(output.get("text", "") for output in refused).split())
    assert message.startswith("Both sides refuse this. ValueError: wsfd needs")
    assert message.endswith("got 100, 200 and total_steps=300")


def test_numbers_of_the_committed_file(committed: tuple[Path, NotebookNode]) -> None:
    """The assertions are those of CHECKS: a function a notebook, the same as for a fresh run."""
    path, notebook = committed
    CHECKS[path.stem](printed(notebook.cells[-1]))


def test_committed_file_is_clean(committed: tuple[Path, NotebookNode]) -> None:
    path, notebook = committed
    assert path.stat().st_size < MOST_BYTES
    assert dict(notebook.metadata["kernelspec"]) == KERNELSPEC
    assert dict(notebook.metadata["language_info"]) == {"name": "python"}
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert not [cell.id for cell in notebook.cells if cell.metadata]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "not run from top to bottom"
    assert all(cell.outputs for cell in code[1:]), "all but the imports have something to show"
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) >= 1
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    for output in outputs(notebook):
        # base64 may spell anything
        output.get("data", {}).pop("image/png", None)
    assert not ABSOLUTE_PATH.findall(nbformat.writes(notebook))


def save_executed(path: Path) -> None:
    """Execute and save a notebook, without what belongs to one run or to one machine."""
    notebook = execute(path)
    notebook.metadata = NotebookNode(kernelspec=KERNELSPEC, language_info={"name": "python"})
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
        for output in cell.get("outputs", []):
            # without its kernel a widget is an error message; the line of text beside it says what to do
            if output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None):
                cell.outputs = [output]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for notebook_path in [Path(argument).resolve() for argument in sys.argv[1:]] or NOTEBOOKS:
        save_executed(notebook_path)
