"""Runs benchmarks and prints their figures, ours and the peers' side by side.

    {"bench": NAME, "metrics": {…}, "versus": {PEER: {…}}, "machine": {…}}

Metric names carry their unit, and a peer's metrics have the same names.
"""

from __future__ import annotations

import inspect
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Coroutine, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rollyard.cli._console import CommandError, note, number, out, print_json, run, show, table
from rollyard.cli._deadline import REMEDY
from rollyard.cli.commands.bench import BENCHES


def report(name: str, options: Mapping[str, object], *, quick: bool, peers: bool, as_json: bool) -> None:
    """Measures `name`, or `all`, and prints the result. Options that are None keep the benchmark's default."""
    if name == "all":
        if chosen := [option for option, value in options.items() if value is not None]:
            raise CommandError(
                f"{chosen[0]} is an option of one benchmark", f"remove --{chosen[0].replace('_', '-')}", 2
            )
        run_all(quick=quick, peers=peers, as_json=as_json)
        return
    measure = getattr(import_module(f"bench.{name}"), f"bench_{name}")
    requested: dict[str, object] = {"quick": quick, "peers": peers, **options}
    known = inspect.signature(measure).parameters
    for option, value in options.items():
        if value is not None and option not in known:
            raise CommandError(f"benchmark {name} has no option {option}", f"remove --{option.replace('_', '-')}", 2)
    chosen = {key: value for key, value in requested.items() if key in known and value is not None}
    note(f"measuring {name}{' (quick)' if quick else ''}; the machine should be idle")
    measured = _measured(name, measure(**chosen))
    result = {
        "bench": name,
        "metrics": measured["metrics"],
        "versus": measured.get("versus") or {},
        "machine": machine(),
    }
    if as_json:
        print_json(result)
    else:
        show_result(result)


def _measured(name: str, measuring: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """Runs a bench. The error for a timeout names the bench."""
    try:
        return run(measuring)
    except subprocess.TimeoutExpired as error:
        argv = error.cmd if isinstance(error.cmd, str) else shlex.join(map(str, error.cmd))
        raise CommandError(f"bench {name}: waited {error.timeout:g} s for the end of `{argv}`", REMEDY) from error
    except TimeoutError as error:
        raise CommandError(f"bench {name}: ran out of time{f' ({error})' if str(error) else ''}", REMEDY) from error


def run_all(*, quick: bool, peers: bool, as_json: bool) -> None:
    """Runs each bench in its own process, with its own memory and children. If one fails, the others still run."""
    options = [flag for flag, is_on in (("--quick", quick), ("--no-peers", not peers), ("--json", as_json)) if is_on]
    failed: list[str] = []
    for name in BENCHES:
        argv = [sys.executable, "-m", "rollyard", "bench", name, *options]
        if subprocess.run(argv, check=False).returncode != 0:
            failed.append(name)
    if failed:
        raise CommandError(
            f"{len(failed)} of {len(BENCHES)} benchmarks failed: {', '.join(failed)}", "the reasons are above"
        )


def machine() -> dict[str, object]:
    """Describes the machine, without which the figures mean little."""
    from rollyard.core.version import __version__

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "rollyard": __version__,
    }


def _cpu() -> str:
    """Returns the model's name; ARM kernels report only its numbers."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    except OSError:
        pass
    part = " ".join(fields[key] for key in ("cpu implementer", "cpu part") if key in fields)
    return fields.get("model name") or " ".join(filter(None, (platform.machine(), part)))


def show_result(result: Mapping[str, Any]) -> None:
    """Prints our figures and the peers' side by side."""
    versus: Mapping[str, Any] = result["versus"]
    figures_table = table("metric", "rollyard", *versus, right=("rollyard", *versus))
    names = dict.fromkeys(result["metrics"])
    for peer in versus.values():
        names |= dict.fromkeys(peer)
    for metric in names:
        own = result["metrics"].get(metric)
        figures_table.add_row(metric, number(own), *(_beside(peer.get(metric), own) for peer in versus.values()))
    show(figures_table)
    for line in picture(result):
        out().print(line, markup=False, highlight=False)
    out().print("  ".join(f"{key}: {value}" for key, value in result["machine"].items()), markup=False)


HEADLINES = (
    "echo_p50_ms",
    "cell_p50_ms",
    "bubblewrap_start_p50_ms",
    "peak_turns_per_s",
    "run_throughput_ratio",
    "tokens_per_s_32",
)
"""The main metrics: drawn as bars, if there is a peer to compare with."""

WIDTH = 40


def picture(result: Mapping[str, Any]) -> list[str]:
    """Returns one bar for us and one per peer; logarithmic if they differ by more than a factor of 100."""
    lines: list[str] = []
    for metric in HEADLINES:
        figures = {"rollyard": result["metrics"].get(metric)}
        figures |= {name: peer.get(metric) for name, peer in result["versus"].items()}
        known = {name: value for name, value in figures.items() if isinstance(value, int | float) and value > 0}
        if len(known) < 2 or "rollyard" not in known:
            continue
        least, most = min(known.values()), max(known.values())
        is_log = most > 100 * least
        lines.append(f"{metric}{' (logarithmic)' if is_log else ''}")
        for name, value in known.items():
            share = (1 + math.log10(value / least)) / (1 + math.log10(most / least)) if is_log else value / most
            lines.append(f"  {name:<16.16} {'█' * max(1, round(WIDTH * share))} {number(value)}")
    return lines


def _beside(other: object, own: object) -> str:
    """Returns a peer's figure, and its ratio to our own."""
    text = number(other)
    if isinstance(other, int | float) and isinstance(own, int | float) and own and other is not own:
        text += f" ({number(round(other / own, 2))}×)"
    return text
