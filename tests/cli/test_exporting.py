"""Commands that write rollouts to files, open files, and plot runs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from rollyard.cli import _exporting
from rollyard.client import AsyncClient
from rollyard.exports.reading import read_rollouts
from tests.cli.conftest import Cli
from tests.client.served import RunningService, task
from tests.exports.atif_schema import Trajectory
from tests.exports.rollouts import rollout

pytestmark = pytest.mark.slow

SERIES = {
    "by": "version",
    "x": [1, 2, 3],
    "count": [4, 4, 4],
    "reward": [0.1, 0.4, 0.9],
    "pass_rate": [0.0, 0.25, 0.75],
    "turns": [1.0, 2.0, 3.0],
    "group_counts": {"complete": [3, 1, 3], "failed": [0, 1, 2], "cancelled": [0, 0, 1]},
    "group_tokens": {"complete": [90, 30, 90], "failed": [0, 100_000, 200_000], "cancelled": [0, 0, 3]},
    "totals": {"count": 12, "reward": 0.5, "pass_rate": 0.33, "failures": []},
}


@pytest.fixture
async def ended(service: RunningService) -> AsyncGenerator[RunningService, None]:
    """A service whose run `r` has two rollouts that ended with a conversation, and one that was cancelled before it."""
    async with AsyncClient(service.url, service.token) as client:
        await client.create_run("r")
        await client.cancel("three", run="r")
        await client.submit([task(), task("Say </script>."), task()], run="r", ids=["one", "two", "three"])
        await client.wait_all(["one", "two", "three"], run="r", timeout_s=60)
    yield service


async def test_one_rollout_is_written_as_a_page_and_as_atif(cli: Cli, ended: RunningService, tmp_path: Path):
    result = await cli("rollouts", "show", "one", "--html", "one.html", "--atif", "one.json")
    assert result.status == 0, result.err
    assert result.out == f"{(tmp_path / 'one.html').as_uri()}\n"
    assert "one is in one.html" in result.err and "one is in one.json" in result.err
    (read,) = read_rollouts(tmp_path / "one.html")
    assert read.record["id"] == "one" and read.record["reward"] == 1.0
    assert {reply.status for reply in read.replies.values()} <= {200, 404, 410}
    (texts,) = read.replies["/v1/rollouts/one/texts?run=r"].body["texts"]
    (trace,) = read.record["trajectory"]["traces"]
    assert len(texts) == len(trace["token_ids"])
    written = json.loads((tmp_path / "one.json").read_text())
    Trajectory.model_validate(written)
    metrics = next(step["metrics"] for step in written["steps"] if step["source"] == "agent")
    start, end = metrics["extra"]["start"], metrics["extra"]["end"]
    assert metrics["completion_token_ids"] == trace["token_ids"][start:end]
    as_json = await cli("rollouts", "show", "one", "--atif", "again.json", "--json")
    assert as_json.json == [{"id": "one", "run": "r", "atif": "again.json"}]
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "one.json").read_bytes()


async def test_what_cannot_be_written_is_one_line(cli: Cli, ended: RunningService):
    for arguments, says in (
        (("rollouts", "show", "one", "--html", "no/such/one.html"), "no/such/one.html cannot be written"),
        (("rollouts", "show", "one", "--atif", "no/such/one.json"), "no/such/one.json cannot be written"),
        (("rollouts", "show", "three", "--atif", "three.json"), "rollout three has no messages"),
        (("runs", "export", "r", "--atif", "no/such/r.jsonl"), "no/such/r.jsonl cannot be written"),
        (("runs", "export", "nowhere", "--atif", "r.jsonl"), "nowhere"),
    ):
        result = await cli(*arguments)
        assert result.status == 1 and says in result.err and len(result.err.splitlines()) == 1, result.err
    async with AsyncClient(ended.url, ended.token) as client:
        await client.submit([task("NEVER")], ids=["running"])
    result = await cli("rollouts", "show", "running", "--html", "running.html")
    assert result.status == 1 and "has not ended" in result.err and "--wait-s" in result.err
    wrong = await cli("runs", "export", "r", "--atif", "r.txt")
    assert wrong.status == 2 and "ends in .jsonl" in wrong.err


async def test_a_run_is_written_line_by_line(
    cli: Cli, ended: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_exporting, "AHEAD", 2)
    monkeypatch.setattr(_exporting, "PAGE", 2)
    result = await cli("runs", "export", "r", "--atif", "r.jsonl")
    assert result.status == 0 and "2 trajectories are in r.jsonl; 1 without a conversation are left out" in result.err
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {line["trajectory_id"] for line in lines} == {"one", "two"}
    for line in lines:
        Trajectory.model_validate(line)
    again = await cli("runs", "export", "r", "--atif", "again.jsonl", "--json")
    assert again.json == [{"run": "r", "atif": "again.jsonl", "written": 2, "skipped": 1}]
    shown = await cli("view", "r.jsonl", "--out", "page.html", "--print")
    assert shown.status == 0 and shown.out == f"{(tmp_path / 'page.html').as_uri()}\n"
    assert [one.record["id"] for one in read_rollouts(tmp_path / "page.html")] == [
        line["trajectory_id"] for line in lines
    ]


async def test_a_file_is_opened_in_the_browser(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", lambda url: not opened.append(url))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file.jsonl").write_text(f"{json.dumps(rollout())}\n{json.dumps(rollout())}\n")
    result = await cli("view", "file.jsonl")
    assert (result.status, result.out, result.err) == (0, f"{opened[0]}\n", "")
    (folder,) = tmp_path.glob("rollyard-view-*")
    assert opened == [(folder / "rollouts.html").as_uri()] and folder.stat().st_mode & 0o77 == 0
    printed = await cli("view", "file.jsonl", "--out", "page.html", "--json")
    assert printed.json[0]["rollouts"] == 2 and len(opened) == 1
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert "no browser was found" in (await cli("view", "file.jsonl", "--out", "page.html")).err


async def test_a_bad_file_is_one_line_and_leaves_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "bad.jsonl").write_text(json.dumps(rollout()) + '\n{"messages": 7}\n')
    result = await cli("view", "bad.jsonl", "--print")
    assert (result.status, result.out, len(result.err.splitlines())) == (2, "", 1)
    assert "bad.jsonl, line 2: " in result.err
    assert not [*tmp_path.glob("rollyard-view-*")]
    assert (await cli("view", "none.jsonl", "--print")).status == 2


def with_series(monkeypatch: pytest.MonkeyPatch, series: dict[str, Any]) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    async def read(self: AsyncClient, path: str, **options: Any) -> dict[str, Any]:
        asked.append({"path": path, **options})
        return series

    monkeypatch.setattr(AsyncClient, "get_json", read)
    return asked


async def test_a_run_is_plotted(cli: Cli, service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = with_series(monkeypatch, SERIES)
    async with AsyncClient(service.url, service.token) as client:
        await client.create_run("grpo-7b")
    shown = await cli("runs", "plot", "grpo", "--by", "version")
    assert asked == [{"path": "/runs/grpo-7b/series", "by": "version", "points": 60}]
    lines = shown.out.splitlines()
    assert lines[0] == "grpo-7b: 12 rollouts"
    assert [line for line in lines[1:] if line and line[0].islower()] == [
        *("reward", "turns", "rollouts ended", "share of ended groups", "tokens thrown away"),
    ]
    assert any("mean reward" in line and "pass rate" in line for line in lines)
    assert any("\u2800" < character < "\u2900" for character in shown.out) and lines[-1].split() == ["1", "3"]
    assert "\x1b" not in shown.out and max(map(len, lines)) <= 80
    assert (await cli("runs", "plot", "grpo-7b", "--json")).json == [SERIES]
    result = await cli("runs", "plot", "grpo-7b", "--out", "reward.svg")
    assert result.status == 0 and "5 plots are in reward.svg" in result.err
    assert (tmp_path / "reward.svg").read_text().startswith("<svg ")
    failures = [{"code": "run_deadline", "blame": "task", "counts": [0, 1, 2]}]
    with_series(monkeypatch, {**SERIES, "failures": failures})
    assert "── run_deadline (task)" in (await cli("runs", "plot", "grpo-7b", "--only", "failures")).out
    one = await cli("runs", "plot", "grpo-7b", "--only", "turns")
    assert "turns" in one.out and "reward" not in one.out and len(one.out.splitlines()) == 1 + 2 + 14
    result = await cli("runs", "plot", "grpo-7b", "--only", "reward", "--out", "reward.svg")
    assert "the plot is in reward.svg" in result.err
    assert (await cli("runs", "plot", "grpo-7b", "--out", "reward.png")).status == 2
    assert "cannot be written" in (await cli("runs", "plot", "grpo-7b", "--out", "no/such.svg")).err


async def test_a_run_without_values_has_no_plot(cli: Cli, service: RunningService, monkeypatch: pytest.MonkeyPatch):
    none: list[None] = [None] * 3
    for series, more, says in (
        ({"x": [], "reward": [], "pass_rate": []}, (), "run default has no ended rollouts yet"),
        ({**SERIES, "reward": none, "pass_rate": none}, ("--only", "reward"), "run default has no reward to plot yet"),
        ({"x": [1]}, (), "the service's reply has no curves"),
    ):
        with_series(monkeypatch, series)
        result = await cli("runs", "plot", "default", *more)
        assert result.status == 1 and says in result.err and len(result.err.splitlines()) == 1


async def test_an_unreachable_service_is_an_error_and_not_an_absent_part(ended: RunningService, tmp_path: Path):
    async with AsyncClient(ended.url, ended.token, retry_s=0) as client:
        record = await client.get("one", run="r")
    async with AsyncClient("http://127.0.0.1:9", "t", retry_s=0) as client:
        with pytest.raises(Exception, match="cannot connect"):
            await _exporting.write_rollouts(client, [record], tmp_path / "page.html")
    assert not [*tmp_path.glob("*.html")]
