"""These tests start Ray clusters: `tests/fleet/test_ray.py` runs them in their own network namespace."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from tests.fleet import netns
from tests.fleet.inside.ray_parts import RAY_TOKEN, Cluster, Front

collect_ignore_glob = [] if netns.is_inside() else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def ray_folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path, None, None]:
    """Ray's sockets are here. Their paths have at most 107 bytes: pytest's own folders are too deep."""
    folder, home = Path(tempfile.mkdtemp(prefix="ry-", dir="/tmp")), tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("HOME", str(home))
        patch.setenv("PYTHONPATH", str(netns.ROOT))  # contains the nodes' entry
        patch.setenv("ROLLYARD_DATA_DIR", str(home / "data"))
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", RAY_TOKEN)


@pytest.fixture(scope="session")
def shared_cluster(ray_folder: Path) -> Generator[Cluster, None, None]:
    """A real Ray cluster of one node, started once; it requires a token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", RAY_TOKEN)
        cluster = Cluster()
    with cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster, token: None) -> Generator[Cluster, None, None]:
    """The shared cluster, restored when the test ends."""
    yield shared_cluster
    shared_cluster.do("restore")


@pytest.fixture
def own_cluster(token: None) -> Generator[Cluster, None, None]:
    """For a test that breaks it."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
async def front() -> AsyncGenerator[Front, None]:
    async with Front("first") as front:
        yield front
