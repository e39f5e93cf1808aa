"""Every row of the table in every tier and mode: torch, JAX and the oracle agree."""

import pytest

from parity_tests.cases import CASES
from parity_tests.tolerances import TIERS
from parity_tests.trajectory import PAIRS, QUANTITIES, run_case

# in float64 every free-running step is as exact as a forced one; the main job runs both
RUNS = [(case, tier, tier.modes[0]) for case in CASES for tier in TIERS.values()]


@pytest.mark.parametrize(("case", "tier", "mode"), RUNS, ids=lambda x: getattr(x, "id", None) or getattr(x, "name", x))
def test_all_sides_agree(case, tier, mode, backends):
    steps = None if (tier.name, mode) == ("float64", "free") else 30  # the long run is the one that grows
    result = run_case(case, tier, mode, backends, steps)
    assert result.passed, str(result.divergence)
    for pair in PAIRS:
        for quantity in QUANTITIES:
            assert (result.errors[pair, quantity] <= result.tolerances[pair, quantity]).all()


def test_every_row_says_why_and_moves_something(backends):
    """A row whose parameters stay put would agree whatever the rules do."""
    assert len({case.id for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.why
        run = backends["torch"].start(case, TIERS["float64"].precision)
        start = case.problem.initial()
        for grads in case.problem.gradient_stream(12):
            record = run.step(grads)
        moved = [name for name in record.params if (record.params[name] != start[name]).any()]
        assert len(moved) >= len(record.state) - 1, moved
