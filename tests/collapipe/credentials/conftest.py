"""Two clusters with separate authorities."""

from pathlib import Path

import pytest
from made_cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """The cluster under test."""
    return Cluster(tmp_path / "cluster")


@pytest.fixture
def others(tmp_path: Path) -> Cluster:
    """Another cluster, whose authority the cluster under test does not trust."""
    return Cluster(tmp_path / "others")
