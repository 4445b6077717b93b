"""`make soak`: runs the full-size scenarios, prints one table, and exits with 1 if anything was lost or left behind."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollyard.cli._console import note, plain, seconds, show, table
from tests.soak.scenarios import SCENARIOS, Figures, Scenario
from tests.worker import Ownership


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one scenario."""

    name: str
    took_s: float
    figures: Figures
    error: str = ""


def run_one(scenario: Scenario) -> Row:
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"rollyard-soak-{scenario.name}-") as folder:
        try:
            figures, error = asyncio.run(scenario.run(Path(folder))), ""  # type: ignore[arg-type]
        except Exception as trouble:
            traceback.print_exc()
            figures, error = {}, f"{type(trouble).__name__}: {trouble}"
    return Row(scenario.name, time.monotonic() - started_at, figures, error)


def run_all(scenarios: Sequence[Scenario], *, as_json: bool) -> int:
    """Runs the scenarios and returns the exit status."""
    rows: list[Row] = []
    for number, scenario in enumerate(scenarios, 1):
        note(f"{number} of {len(scenarios)}: {scenario.name} ({scenario.what})")
        rows.append(run_one(scenario))
        note(f"{scenario.name}: {'FAILED' if rows[-1].error else 'ok'} after {seconds(rows[-1].took_s)}")
    if as_json:
        for row in rows:
            print(json.dumps({"scenario": row.name, "took_s": round(row.took_s, 1), "error": row.error, **row.figures}))
    else:
        results_table = table("scenario", "result", "time", "figures", right=("time",))
        for row in rows:
            figures = ", ".join(f"{name} {value}" for name, value in row.figures.items())
            results_table.add_row(
                row.name, plain(row.error.splitlines()[0][:120]) if row.error else "ok", seconds(row.took_s), figures
            )
        show(results_table)
    return int(any(row.error for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; default: all")
    parser.add_argument("--json", action="store_true", dest="as_json", help="one JSON object per scenario on stdout")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in names]:
        parser.error(f"there is no scenario {', '.join(unknown)}; there are: {', '.join(names)}")
    owned = Ownership()
    owned.take()
    try:
        return run_all(
            [one for one in SCENARIOS if not chosen.names or one.name in chosen.names], as_json=chosen.as_json
        )
    finally:
        owned.give_back()


if __name__ == "__main__":
    sys.exit(main())
