"""What the integration tests share: one Ray cluster a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.ray_cluster import RayCluster, running_ray


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A Ray head of two CPUs, its own processes, loopback only."""
    with running_ray() as cluster:
        yield cluster
