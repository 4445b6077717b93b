"""Engines at loopback addresses: accepted on one machine, refused by a fleet whose head listens beyond it."""

from pathlib import Path
from typing import Any

import pytest

from rollyard.core.failure import InvalidRequest
from rollyard.engines.base import EngineSpec, Kind
from rollyard.service.engine_address import check_reachable
from tests.service.site import settings


@pytest.mark.parametrize(
    ("url", "is_loopback"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9", True),
        ("http://localhost:8000/v1", True),
        ("http://gpu.localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://[::ffff:127.0.0.1]:8000", True),
        ("http://0.0.0.0:8000", True),
        ("http://10.0.0.1:8000", False),
        ("https://gpu1.example:8000", False),
        ("http://localhost.example", False),
    ],
)
def test_loopback_addresses_are_detected(url: str, is_loopback: bool) -> None:
    assert EngineSpec("e1", url, Kind.VLLM).is_loopback is is_loopback


@pytest.mark.parametrize(
    ("values", "is_taken"),
    [
        ({"host": "10.0.0.1"}, True),
        ({"host": "10.0.0.1", "plain_http_nodes": True, "fleet": "nodes"}, False),
        ({"host": "10.0.0.1", "plain_http_nodes": True, "fleet": "nodes", "loopback_engines": True}, True),
        ({"host": "127.0.0.1", "fleet": "nodes"}, True),
        ({"host": "127.0.0.1", "fleet": "nodes", "loopback_engines": False}, False),
    ],
)
def test_a_fleet_refuses_loopback_engines_unless_it_is_on_one_machine(
    tmp_path: Path, values: dict[str, Any], is_taken: bool
) -> None:
    spec, chosen = EngineSpec("e1", "http://localhost:8000", Kind.VLLM), settings(tmp_path, **values)
    check_reachable(EngineSpec("e2", "http://gpu1:8000", Kind.VLLM), chosen)
    if is_taken:
        check_reachable(spec, chosen)
    else:
        with pytest.raises(InvalidRequest, match="set loopback_engines if all nodes run on this machine"):
            check_reachable(spec, chosen)
