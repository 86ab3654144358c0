"""Fixtures for pytest: `pytest_plugins = ["forge_core.testing.fixtures"]` in the top conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forge_core.testing.pool import WorkerPool

pytest.register_assert_rewrite("forge_core.testing.conformance")


@pytest.fixture(scope="session")
def pool2() -> Iterator[WorkerPool]:
    """Two processes, started by the first test that runs something and kept for the session."""
    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[WorkerPool]:
    """Four processes, started by the first test that runs something and kept for the session."""
    with WorkerPool(4) as pool:
        yield pool
