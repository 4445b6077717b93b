"""Tables and frames in a terminal of 100 or 80 columns: one line per row, and nothing wraps."""

import io
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from rollyard.cli._console import shorten, show_in_parts, table
from rollyard.cli._results import list_table
from rollyard.cli.commands.runs import RUNS_OPTIONAL, results_table
from rollyard.cli.commands.top import Rates, frame
from rollyard.client import AsyncClient, Record
from tests.cli.conftest import Cli
from tests.client.served import RunningService


def printed(width: int, grid: Any, *give_way: str, optional: Sequence[str] = ()) -> list[str]:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, color_system=None)
    console.print(shorten(grid, console, *give_way, optional=optional) if give_way else grid)
    return [line for line in written.getvalue().splitlines() if line.strip()]


def test_a_row_of_the_list_is_one_line_of_100_columns():
    long = Record(
        id="g_01kf3zq8w5e7y1c9d2m4t6x8a0b-15",
        run="an-experiment-with-a-long-name",
        state="ended",
        outcome="failed",
        failure={"code": "engine_unavailable"},
        summary={"turns": 48, "sampled_tokens": 131_072},
        timings={"run_s": 5000.0},
        task={"environment": "reasoning_gym", "data": {"question": "How many [bold]letters\nare in this sentence?"}},
    )
    lines = printed(100, list_table([long, Record(id="short", run="r", state="run")]), "task", "run", "state", "id")
    assert [line.split()[0] for line in lines[2:]] == [long.id, "short"] and len(lines) == 4
    assert all(len(line) <= 100 for line in lines)
    assert "131,072" in lines[2] and "  engine_" in lines[2]
    narrow = printed(60, list_table([long]), "task", "run", "state", "id")
    assert len(narrow) == 3 and all(len(line) <= 60 for line in narrow)


def test_a_run_is_one_line_of_100_columns():
    states = {"queued": 100_000, "init": 64, "ready": 128, "run": 4096, "eval": 512, "ended": 1_234_567}
    results = {"states": states, "mean_reward": 0.51234, "trainable": 1_000_000, "active_at": 1000.0}
    rows = [{"id": "a-run-with-a-name-that-is-too-long-for-a-line", "policy": "a-long-policy", "results": results}]
    lines = printed(100, results_table([*rows, {"id": "new", "created_at": 4000.0}], 4600.0), "policy", "id")
    assert len(lines) == 4 and all(len(line) <= 100 for line in lines)
    assert lines[2].split()[-5:] == ["1,234,567", "0.512", "81%", "1", "h"]
    assert lines[3].split()[-4:] == ["–", "–", "10", "min"]


def test_columns_that_a_narrow_terminal_has_no_room_for_are_named():
    results = {"states": {"run": 4096, "ended": 1_234_567}, "mean_reward": 0.5, "trainable": 1000, "active_at": 1000.0}
    rows = [{"id": "grpo-qwen2.5-7b-lr1e-6-seed42", "policy": "default", "results": results}]
    grid = results_table(rows, 4600.0)
    lines = printed(80, grid, "policy", "id", optional=RUNS_OPTIONAL)
    assert lines[0].split() == ["id", "policy", "queued", "run", "ended", "reward", "trainable", "idle"]
    assert lines[2].split()[1:] == ["default", "–", "4,096", "1,234,567", "0.500", "0%", "1", "h"]
    assert lines[2].startswith(" grpo-qwen2.5-7b-l…")
    assert lines[3].strip() == "too narrow for: init, ready, eval; --json has everything"
    assert all(len(line) <= 80 for line in lines)
    assert len(printed(120, results_table(rows, 4600.0), "policy", "id", optional=RUNS_OPTIONAL)) == 3


def test_an_outcome_is_whole_in_80_columns():
    one = Record(id="swe-gym__django__django-15814-0", run="grpo-qwen2.5-7b", state="ended", outcome="completed")
    task = {"environment": "swe", "data": {"instruction": "Fix the bug in the list display of the admin"}}
    summary = {"turns": 12, "sampled_tokens": 99_999}
    record = replace(one, reward=0.25, task=task, summary=summary, timings={"run_s": 500.0})
    (head, _, row, caption) = printed(80, list_table([record]), "task", "run", "state", "id", optional=("time",))
    assert "completed" in row and "swe-gym__django__" in row and len(row) <= 80
    assert "time" not in head and caption.strip().startswith("too narrow for: time;")


async def test_the_lists_and_a_draw_fit_in_80_columns(
    cli: Cli, service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = dict.fromkeys(("open", "complete", "delivered", "filtered", "failed"), 1234) | {"keep_rate": 0.6667}
    source = {
        "kind": "file",
        "file": "/data/tasks/" + "hard-" * 12 + "problems.jsonl",
        "environment": "",
        "split": None,
    }
    draw = {"id": "draw-of-the-hard-problems", "run": "grpo-qwen2.5-7b", "state": "ended", "reason": "exhausted"}
    draw |= {"batch": 120, "acked": 118, "version": 240, "epoch": 3, "figures": figures, "config": {"source": source}}

    async def draws(self: object) -> list[dict[str, Any]]:
        return [draw]

    async def get_draw(self: object, *_: object) -> object:
        return SimpleNamespace(status=status)

    async def status() -> dict[str, Any]:
        return draw

    monkeypatch.setattr(AsyncClient, "draws", draws)
    monkeypatch.setattr(AsyncClient, "get_draw", get_draw)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # to rich: a terminal
    monkeypatch.setenv("TERM", "dumb")  # no escapes
    written = (await cli("draws", "list")).out
    lines = [line.strip() for line in written.splitlines() if line.strip()]
    assert all(len(line) <= 80 for line in lines) and "draw-of-the-" in lines[2] and "0.6667" in lines[2]
    assert {"id", "state", "batch", "delivered", "filtered", "failed", "keep_rate"} <= {*lines[0].split()}
    assert lines[3].startswith("too narrow for: epoch, version")
    written = (await cli("draws", "show", "draw-of")).out
    assert "kind file, file" in written and "problems.jsonl" in written
    assert all(len(line) <= 80 for line in written.splitlines())
    names = {line.split()[0] for line in written.splitlines() if line.strip()}
    assert {"id", "run", "batch", "keep_rate", "source"} <= names


def test_a_table_with_many_columns_is_shown_in_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def grid() -> Table:
        names = [f"environment-{number}" for number in range(5)]
        made = table("", *names, right=names)
        made.add_row("mean reward", *(f"0.{number}00  0.412 … 0.752" for number in range(5)))
        made.caption = "means over tasks"
        return made

    monkeypatch.setenv("COLUMNS", "80")
    show_in_parts(grid())
    assert len(capsys.readouterr().out.splitlines()) == 3  # in a pipe
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "dumb")
    show_in_parts(grid())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert all(len(line) <= 80 for line in lines)
    heads = [line.split() for line in lines if "environment" in line]
    assert heads == [["environment-0", "environment-1", "environment-2"], ["environment-3", "environment-4"]]
    assert sum("mean reward" in line for line in lines) == 2 and "0.400  0.412 … 0.752" in lines[-2]
    assert [line.strip() for line in lines if "means" in line] == ["means over tasks"]


def test_no_line_of_top_wraps():
    error = "cannot connect to http://a-gpu-with-a-long-name.example.org:8000 (Connection refused) " * 10
    engine = {"id": "gpu1.example.org:8000", "state": "down", "policy": "actor", "model": "org/" + "model-" * 20}
    engine |= {"capacity": 512, "calls": 100_000, "tokens": 10**8, "cached_tokens": 10**7, "last_error": error}
    node = {
        "name": "node-" * 8,
        "state": "up",
        "host": "host." * 8,
        "engines": {"e": {"is_reachable": False, "error": error}},
    }
    status = {
        "engines": [engine],
        "nodes": [node],
        "unserved_policies": {"actor": error},
        "refused_engines": {"x": error},
    }
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    lines = printed(100, frame(status, {}, "http://127.0.0.1:1", console))
    assert all(len(line) <= 100 for line in lines)
    assert sum("gpu1.example.org" in line for line in lines) == 2, lines  # its row, and its error
    assert sum("Connection refused" in line for line in lines) <= 4
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    narrow = printed(80, frame(status, {}, "http://127.0.0.1:1", console))
    assert all(len(line) <= 80 for line in narrow)
    heads = [line.split() for line in narrow if line.split()[0] in ("id", "node")]
    assert heads[0][:3] == ["node", "state", "live"] and heads[1][:3] == ["id", "state", "policy"]
    assert not any(word.endswith("…") for head in heads for word in head)


def test_the_rate_of_tokens_counts_running_calls_where_the_engine_reports_them():
    rates = Rates()
    finished = {"id": "a", "tokens": 100, "tokens_per_s": None}
    running = {"id": "b", "tokens": 0, "tokens_per_s": 50.0}
    assert rates.update({"engines": [finished]})["tokens_per_s"] is None
    assert rates.update({"engines": [finished, running]})["tokens_per_s"] == 50.0
    more = rates.update({"engines": [{**finished, "tokens": 200}, running]})["tokens_per_s"]
    assert more is not None and more > 50.0
