"""Shared parts of the benches: deadlines that name what they waited for, and `bench all`."""

import asyncio
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bench import pipeline, report
from rollyard.cli import rig
from rollyard.cli._console import CommandError
from rollyard.cli._deadline import within
from rollyard.cli.commands import bench
from tests.cli.conftest import Cli

pytestmark = pytest.mark.slow


async def test_a_deadline_names_the_step_what_it_waited_for_and_a_remedy() -> None:
    arrived = 0
    with pytest.raises(CommandError) as caught:
        async with within(0.01, "counting", lambda: f"5 of them; {arrived} came"):
            arrived = 3
            await asyncio.sleep(60)
    assert caught.value.what == "counting: waited 0.01 s for 5 of them; 3 came"
    assert "stop other programs" in caught.value.remedy


async def test_a_deadline_passes_on_a_timeout_inside_the_block() -> None:
    with pytest.raises(TimeoutError, match="the engine"):
        async with within(60, "counting", "all"):
            raise TimeoutError("the engine was too slow")


class _Client:
    """The client of a service that never has more rollouts in RUN than the last figure."""

    def __init__(self, *active: int) -> None:
        self._active = list(active)

    async def status(self) -> dict[str, Any]:
        return {"pools": {"run": {"active": self._active.pop(0) if len(self._active) > 1 else self._active[0]}}}


def _rig(*active: int) -> Any:
    return SimpleNamespace(client=_Client(*active))


async def test_a_machine_too_slow_for_the_full_load_is_measured_at_the_load_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await pipeline.fill(_rig(3, 10), 10) == 10
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(pipeline, "FILL_S", 0.05)
    assert await pipeline.fill(_rig(7), 10) == 7
    assert capsys.readouterr().err == "7 of 10 rollouts are in flight after 0.05 s; the figures are for 7\n"
    with pytest.raises(CommandError, match=r"filling RUN: waited 0.05 s for 10 rollouts, but none is in flight"):
        await pipeline.fill(_rig(0), 10)


async def test_a_load_that_never_fills_still_gives_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = pipeline.fill

    async def fill_all_slots(bench: Any, target: int) -> int:
        while await pipeline._in_flight(bench) < 4:
            await asyncio.sleep(0.05)
        return await fill(bench, target)

    monkeypatch.setattr(pipeline, "FILL_S", 0.0)
    monkeypatch.setattr(pipeline, "fill", fill_all_slots)
    monkeypatch.setattr(pipeline, "rig", _with_few_slots)
    figures = await pipeline._latency_bound(in_flight=50, latency_s=0.2, quick=True)
    assert figures["rollouts_wanted"] == 50
    assert 0 < figures["rollouts_in_flight"] <= 4  # type: ignore[operator]
    assert figures["turns_per_s"] > 0  # type: ignore[operator]


def _with_few_slots(*arguments: Any, settings: dict[str, Any], **options: Any) -> Any:
    return rig.rig(*arguments, settings={**settings, "run_slots": 4}, **options)


async def test_a_service_that_does_not_start_in_time_is_reported(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "START_S", 0.001)
    result = await cli("bench", "restart", "--quick")
    assert (result.status, result.out) == (1, "")
    assert re.search(
        r"rollyard: starting the service: waited 0.001 s for \S+/url; it logged: nothing — stop other", result.err
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "bench arrow: ran out of time — stop other programs"),
        (TimeoutError("of the page"), "bench arrow: ran out of time (of the page) — stop other programs"),
        (subprocess.TimeoutExpired(["ldd", "a b"], 10), "bench arrow: waited 10 s for the end of `ldd 'a b'` — stop"),
    ],
    ids=["bare", "with a text", "program"],
)
async def test_any_other_deadline_names_the_bench(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    async def late(**_: object) -> dict[str, Any]:
        raise error

    monkeypatch.setattr("bench.arrow.bench_arrow", late)
    result = await cli("bench", "arrow")
    assert result.status == 1
    assert text in result.err


async def test_all_runs_every_bench_and_names_those_that_failed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(argv: list[str], *, check: bool) -> Any:
        ran.append(argv)
        return SimpleNamespace(returncode=int(argv[4] in ("shell", "draw")))

    monkeypatch.setattr(report.subprocess, "run", run)
    result = await cli("bench", "all", "--quick", "--no-peers", "--json")
    assert result.status == 1
    assert "2 of 14 benchmarks failed: shell, draw — the reasons are above" in result.err
    options = ["--quick", "--no-peers", "--json"]
    assert ran == [[sys.executable, "-m", "rollyard", "bench", name, *options] for name in bench.BENCHES]


async def test_bench_all_refuses_options_of_one_bench(cli: Cli) -> None:
    result = await cli("bench", "all", "--train-s", 3)
    assert result.status == 2
    assert "train_s is an option of one benchmark — remove --train-s" in result.err


def test_make_bench_runs_all_benches() -> None:
    output = subprocess.run(["make", "-n", "bench"], capture_output=True, text=True, check=True, timeout=30).stdout
    assert "rollyard bench all" in output
