"""These tests start Ray clusters: `tests/fleet/test_ray.py` runs each in a place with only a loopback of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from tests.fleet import netns
from tests.fleet.inside.ray_parts import RAY_TOKEN, Cluster, Front

collect_ignore_glob = [] if netns.is_inside() else ["test_*.py"]


@pytest.fixture(autouse=True)
def ray_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[Path, None, None]:
    """Where Ray keeps its sockets, whose paths are at most 107 bytes long: pytest's own folders are too deep."""
    folder = Path(tempfile.mkdtemp(prefix="ry-", dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(netns.ROOT))  # where the nodes' entry is
    monkeypatch.setenv("ROLLYARD_DATA_DIR", str(tmp_path / "data"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Generator[Cluster, None, None]:
    """A real Ray cluster of one node; it wants a token."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", RAY_TOKEN)
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
async def front() -> AsyncGenerator[Front, None]:
    async with Front("first") as front:
        yield front
