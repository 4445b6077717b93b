"""Nodes on Ray: the rules are tested here, and everything that needs a cluster in its own network namespace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.fleet.ray_actor import claim_folder, node_home, sizes
from rollyard.fleet.ray_host import RayHost, RayUnavailable, driver_environment
from tests.fleet import netns

pytestmark = pytest.mark.slow

INSIDE = Path(__file__).parent / "inside"
LIMIT_S = 880.0
GIB = 1 << 30


@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", ["test_ray_host.py", "test_ray_ends.py"])
def test_on_a_real_cluster(file: str, tmp_path: Path):
    netns.run_test_inside(str(INSIDE / file), tmp_path, limit_s=LIMIT_S)


def test_nothing_of_the_service_imports_ray():
    code = """
import sys
import rollyard.service, rollyard.service.server, rollyard.cli.app, rollyard.fleet.ray_host, rollyard.fleet.ray_actor
assert "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


async def test_without_ray_the_error_shows_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayUnavailable, match=r"pip install 'rollyard\[ray\]'"):
        async with RayHost(None, "http://127.0.0.1:1", "token"):
            pass


def test_a_ray_clients_url_is_refused():
    with pytest.raises(RayUnavailable, match="HOST:PORT"):
        RayHost("ray://127.0.0.1:10001", "http://127.0.0.1:1", "token")


def test_slots_are_derived_from_cpus_and_memory():
    assert sizes({}, {}, cpus=4, memory_bytes=64 * GIB) == {
        "init_slots": 8,
        "run_slots": 128,
        "eval_slots": 16,
        "ready_slots": 8,
    }
    assert sizes({}, {}, cpus=4, memory_bytes=4 * GIB)["run_slots"] == 16
    assert sizes({}, {}, cpus=0.25, memory_bytes=0)["init_slots"] == 1


def test_the_machines_environment_overrides_the_heads_slots():
    settings = {"run_slots": 10, "eval_slots": 3, "ready_slots": 0}
    slots = sizes(settings, {"ROLLYARD_RUN_SLOTS": "20"}, cpus=1, memory_bytes=GIB)
    assert (slots["run_slots"], slots["eval_slots"], slots["ready_slots"]) == (20, 3, 0)


@pytest.mark.parametrize("slots", ["many", "0", "-1", "1.5"])
def test_an_error_names_invalid_slots(slots: str):
    with pytest.raises(ValueError, match="ROLLYARD_RUN_SLOTS"):
        sizes({}, {"ROLLYARD_RUN_SLOTS": slots}, cpus=1, memory_bytes=GIB)


def test_nodes_of_one_machine_have_separate_folders_that_are_reused(tmp_path: Path):
    home = node_home({"data_dir": str(tmp_path)}, {})
    assert home == tmp_path / "nodes"
    assert node_home({"data_dir": "elsewhere"}, {"ROLLYARD_DATA_DIR": str(tmp_path)}) == home
    first, lock = claim_folder(home)
    with lock:
        second, other_lock = claim_folder(home)
        with other_lock:
            assert second != first
    again, lock = claim_folder(home)
    with lock:
        assert again == first


def test_a_cluster_that_we_start_always_needs_a_token():
    environment = driver_environment(None, {"RAY_AUTH_MODE": "disabled"})
    assert environment["RAY_AUTH_MODE"] == "token" and len(environment["RAY_AUTH_TOKEN"]) == 64
    assert driver_environment(None, {"RAY_AUTH_TOKEN": "mine"})["RAY_AUTH_TOKEN"] == "mine"
    assert "RAY_AUTH_TOKEN" not in driver_environment(None, {"RAY_AUTH_TOKEN_PATH": "file"})


def test_on_another_cluster_a_set_token_is_used_and_none_is_generated():
    assert driver_environment("head:6379", {"RAY_AUTH_TOKEN": "theirs"})["RAY_AUTH_MODE"] == "token"
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} & driver_environment("head:6379", {}).keys()
