"""Clusters of members."""

from pathlib import Path

import pytest
from made_cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """The cluster under test."""
    return Cluster(tmp_path / "cluster")


@pytest.fixture
def others(tmp_path: Path) -> Cluster:
    """Another one, whose authority nobody here trusts."""
    return Cluster(tmp_path / "others")
