"""Neither side needs, loads or names the other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOREIGN = {
    "torch_impl": {"jax", "jaxlib", "optax", "flax", "jax_impl", "parity_tests"},
    "jax_impl": {"torch", "torch_impl", "parity_tests"},
    "parity_tests": {"torch", "jax", "jaxlib", "optax", "flax", "jax_impl", "torch_impl"},
}


@pytest.mark.parametrize("package", FOREIGN)
def test_import_loads_neither_the_other_framework_nor_the_other_package(package):
    script = f"import sys, {package}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split()
    assert package in loaded
    assert not FOREIGN[package] & set(loaded)


@pytest.mark.parametrize(("package", "blocked"), [("torch_impl", "jax optax flax"), ("jax_impl", "torch")])
def test_works_where_the_other_framework_is_not_installed(package, blocked):
    """None in sys.modules makes an import fail as a missing package does."""
    script = f"""
import sys
for name in {blocked.split()!r}: sys.modules[name] = None
import importlib, pkgutil, {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."): importlib.import_module(module.name)
print(len({package}.__all__))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", ["torch_impl", "jax_impl"])
def test_no_source_names_the_other_side(package):
    """Also inside functions, where a subprocess would not see it."""
    files = list((ROOT / package).rglob("*.py"))
    assert len(files) > 10
    for path in files:
        assert not FOREIGN[package] & imported(path), path


def test_the_oracle_is_numpy_and_short():
    path = ROOT / "parity_tests" / "reference.py"
    assert imported(path) <= {"__future__", "math", "re", "collections", "numpy"}
    assert path.read_text().count("\n") <= 240  # schedules, annealer, groups, update rules
