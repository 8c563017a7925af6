"""Fixtures that the tests of the models share."""

from pathlib import Path

import pytest

from mini_engine.models import hub


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The folder of the embedded model, converted on first use."""
    return hub.embedded_folder()
