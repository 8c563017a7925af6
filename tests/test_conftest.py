"""The groups of `conftest.py`: with several workers, each test runs in the one that has its group's fixtures."""

import pytest


def test_the_workers_know_a_tests_group(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", False):  # what xdist tells its workers
        pytest.skip("only with several workers, as `make test` runs them")
    assert request.node.nodeid.endswith("@tests test_conftest.py ")
