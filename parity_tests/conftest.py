"""One device for the whole suite, single-threaded frameworks, x64 on, two profiles of random examples."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two thread pools in one process fight
os.environ.setdefault("JAX_ENABLE_X64", "1")

import pytest
from hypothesis import settings

# shared out among the property tests; "ci" draws the same examples every time
settings.register_profile("ci", max_examples=300, derandomize=True, deadline=None)
settings.register_profile("thorough", max_examples=5000, deadline=None, database=None)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where both frameworks run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cpu":
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


@pytest.fixture(scope="session")
def backends(device: str) -> dict:
    from parity_tests.backends.jax_backend import JaxBackend
    from parity_tests.backends.torch_backend import TorchBackend

    return {"torch": TorchBackend(device), "jax": JaxBackend(device)}
