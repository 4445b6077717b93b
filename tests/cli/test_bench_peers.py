"""Parts of the peers' benches that need no network: the drivers' pins, and peers that fail."""

import re
from pathlib import Path

import pytest

from bench import peer_drivers, pipeline_peers
from bench.pipeline import TURNS
from bench.pipeline_peers import measure_peer, run_peers

# Calls the engine like the real drivers, with the standard library only.
DRIVER = """
import json, os, sys, threading, urllib.request
url, turns, concurrency = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def call():
    body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}).encode()
    answer = json.load(urllib.request.urlopen(urllib.request.Request(url + "/v1/chat/completions", body)))
    assert answer["choices"][0]["message"]["content"] == "hello", answer
    assert answer["object"] == "chat.completion" and answer["created"] == 0, answer
call()
print("a banner", flush=True)
print(json.dumps({"turns_per_rollout": turns}), flush=True)
threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
while True:
    call()
"""


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for a test's drivers."""
    monkeypatch.setattr(peer_drivers, "DRIVERS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("peer", "package"),
    [
        ("mini_swe_agent", "mini-swe-agent"),
        ("verifiers", "verifiers"),
        ("swe_rex", "swe-rex"),
        ("jupyter", "ipykernel"),
    ],
)
def test_a_driver_compiles_and_pins_every_package(peer: str, package: str) -> None:
    compile((peer_drivers.DRIVERS / f"{peer}.py").read_text(), peer, "exec")
    lines = (peer_drivers.DRIVERS / f"{peer}.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", pin)] == []
    assert package in {pin.partition("==")[0] for pin in pins}


async def test_peers_that_cannot_be_installed_are_reported_as_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tmp_path / "taken"
    occupied.write_text("a file where the environments should be")
    monkeypatch.setattr(peer_drivers, "CACHE", occupied)
    results = await run_peers(quick=True)
    assert list(results) == ["mini-swe-agent", "verifiers"]
    for figures in results.values():
        assert isinstance(figures, dict)
        assert list(figures) == ["error"] and "install" in str(figures["error"])


def test_a_failed_installation_leaves_no_environment(drivers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_drivers, "CACHE", drivers / "cache")
    monkeypatch.setattr(peer_drivers, "INSTALL_S", 0.0)
    (drivers / "peer.py").write_text("")
    (drivers / "peer.txt").write_text("peer==1\n")
    with pytest.raises(peer_drivers.PeerError, match="not installed"):
        peer_drivers.driver_argv("peer")
    assert list(drivers.glob("cache/peer-*")) == []


def test_a_peer_without_a_driver_is_an_error(drivers: Path) -> None:
    figures = peer_drivers.measure("missing", 1)
    assert isinstance(figures, dict) and "repository" in str(figures["error"])


def test_a_driver_may_have_the_name_of_its_package(drivers: Path) -> None:
    (drivers / "aiohttp.py").write_text("import aiohttp\nprint('{\"parts\": %d}' % len(aiohttp.__path__))")
    assert peer_drivers.measure("aiohttp", 1) == {"parts": 1}


async def test_a_driver_is_measured_under_the_same_names_as_rollyard(drivers: Path) -> None:
    (drivers / "peer.py").write_text(DRIVER)
    figures = await measure_peer("peer", {"default": ["hello"]}, window_s=1.0)
    assert figures["turns_per_rollout"] == TURNS
    for name in ("peak_turns_per_s", "cpu_ms_per_turn", "engine_cpu_ms_per_turn", "machine_cpu_ms_per_turn"):
        value = figures[name]
        assert isinstance(value, float) and value >= 0
    assert figures["child_cpu_ms_per_turn"] == 0


@pytest.mark.parametrize("first", ["", "print('{}', flush=True); "])
async def test_a_driver_that_ends_is_an_error_with_its_last_output(drivers: Path, first: str) -> None:
    """Before its steady state, and during the measurement: the window is far longer than a test may take."""
    (drivers / "peer.py").write_text(first + "raise SystemExit('boom')")
    with pytest.raises(peer_drivers.PeerError, match=r"ended with .*boom"):
        await measure_peer("peer", {}, window_s=600.0)


async def test_a_driver_that_never_reaches_its_steady_state_is_an_error(
    drivers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_peers, "STEADY_S", 0.5)
    (drivers / "peer.py").write_text("import os; os.read(0, 1)")
    with pytest.raises(peer_drivers.PeerError, match="first rollouts"):
        await measure_peer("peer", {}, window_s=600.0)


async def test_a_driver_does_not_inherit_the_environment(drivers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_SECRET", "hidden")
    (drivers / "peer.py").write_text("import os; raise SystemExit(' '.join(sorted(os.environ)))")
    with pytest.raises(peer_drivers.PeerError, match=r"HOME .*PATH") as caught:
        await measure_peer("peer", {}, window_s=600.0)
    assert "BENCH_SECRET" not in str(caught.value)
