"""Tables and frames in a terminal of 100 columns: one line per row, and nothing wraps."""

import io
from typing import Any

from rich.console import Console

from rollyard.cli._console import shorten
from rollyard.cli._results import list_table
from rollyard.cli.commands.runs import results_table
from rollyard.cli.commands.top import Rates, frame
from rollyard.client import Record


def printed(width: int, grid: Any, *give_way: str) -> list[str]:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, color_system=None)
    if give_way:
        shorten(grid, console, *give_way)
    console.print(grid)
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


def test_the_rate_of_tokens_counts_running_calls_where_the_engine_reports_them():
    rates = Rates()
    finished = {"id": "a", "tokens": 100, "tokens_per_s": None}
    running = {"id": "b", "tokens": 0, "tokens_per_s": 50.0}
    assert rates.update({"engines": [finished]})["tokens_per_s"] is None
    assert rates.update({"engines": [finished, running]})["tokens_per_s"] == 50.0
    more = rates.update({"engines": [{**finished, "tokens": 200}, running]})["tokens_per_s"]
    assert more is not None and more > 50.0
