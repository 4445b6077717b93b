"""Shows rollouts: a table of results, and trajectories as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.cli._console import CommandError, as_clause, number, plain, seconds, table
from rollyard.core.files import replacing

if TYPE_CHECKING:
    from rich.table import Table

    from rollyard.client import AsyncClient, Record

ROWS = 60  # of a table; --json has all
_STYLES = {"completed": "green", "truncated": "yellow", "failed": "red", "cancelled": "dim"}


def results_table(records: Sequence[Record], title: str | None = None) -> Table:
    """Creates a table with one row per rollout: its outcome, tokens and durations."""
    columns = ("id", "outcome", "reward", "turns", "tokens", "init", "run", "eval")
    grid = table(*columns, title=title, right=columns[2:])
    for record in records[:ROWS]:
        summary, timings = record.summary or {}, record.timings or {}
        grid.add_row(
            record.id,
            outcome(record),
            "–" if record.reward is None else f"{record.reward:.3g}",
            number(summary.get("turns")),
            number(summary.get("sampled_tokens")),
            *(seconds(timings.get(name)) for name in ("init_s", "run_s", "eval_s")),
        )
    if len(records) > ROWS:
        grid.caption = f"… and {len(records) - ROWS} more; --json has them all"
    return grid


def list_table(records: Sequence[Record]) -> Table:
    """Creates a table of rollouts of any run: the state of each; if it has ended, its outcome or failure code."""
    columns = ("id", "run", "task", "state", "reward", "turns", "tokens", "time")
    grid = table(*columns, right=columns[4:])
    for record in records:
        summary, timings = record.summary or {}, record.timings or {}
        spent_s = sum(timings.get(name) or 0.0 for name in ("init_s", "run_s", "eval_s"))
        grid.add_row(
            record.id,
            plain(record.run),
            plain(task_label(record.task)),
            outcome(record, is_short=True),
            "–" if record.reward is None else f"{record.reward:.3g}",
            number(summary.get("turns")),
            number(summary.get("sampled_tokens")),
            seconds(spent_s),
        )
    return grid


def task_label(task: Mapping[str, Any]) -> str:
    """Returns the environment, and the first of a few fields that tell its tasks apart."""
    data = task.get("data") or {}
    texts = (data.get(name) for name in ("id", "name", "instance_id", "family", "instruction", "question", "prompt"))
    label = next((" ".join(text.split()) for text in texts if isinstance(text, str) and text.strip()), "")
    return f"{task.get('environment', '')}: {label}" if label else str(task.get("environment", ""))


def outcome(record: Record, *, is_short: bool = False) -> str:
    """Returns the outcome with its failure code, or only the code, coloured; the state if it has not ended."""
    if record.outcome is None:
        return record.state
    code = (record.failure or {}).get("code")
    text = record.outcome if code in (None, record.outcome) else code if is_short else f"{record.outcome} ({code})"
    style = _STYLES.get(record.outcome, "")
    return f"[{style}]{plain(text)}[/]" if style else plain(text)


def summary_line(records: Sequence[Record]) -> str:
    """Summarizes all records in one line."""
    outcomes: dict[str, int] = {}
    for record in records:
        outcomes[record.outcome or record.state] = outcomes.get(record.outcome or record.state, 0) + 1
    rewards = [record.reward for record in records if record.reward is not None]
    parts = [f"{count} {name}" for name, count in sorted(outcomes.items())]
    if rewards:
        parts.append(f"mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)}")
    tokens = sum((record.summary or {}).get("sampled_tokens") or 0 for record in records)
    parts.append(f"{tokens:,} tokens sampled")
    return ", ".join(parts)


def failure_lines(records: Sequence[Record]) -> list[str]:
    """Returns a line for each kind of failure without a reward: its first rollout, the reason, and what to do."""
    from rollyard.core.failure import CODES

    by_code: dict[str, list[Record]] = {}
    for record in records:
        if record.reward is None and record.failure is not None:
            by_code.setdefault(str(record.failure.get("code")), []).append(record)
    lines: list[str] = []
    for code, failed in by_code.items():
        reason = " ".join(str((failed[0].failure or {}).get("detail")).split())
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        remedy = CODES[code].remedy if code in CODES else ""
        lines.append(f"rollyard: {failed[0].id}{others}: {reason}" + (f" — {as_clause(remedy)}" if remedy else ""))
    return lines


def check_out(path: Path) -> None:
    """Raises `CommandError` if the file cannot be written, before the work starts."""
    if path.suffix not in (".jsonl", ".json", ".arrow"):
        raise CommandError(f"{path}: unknown file format", "use a name that ends in .jsonl or .arrow", 2)
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}", "give another file with --out") from error


async def write_trajectories(client: AsyncClient, records: Sequence[Record], path: Path) -> None:
    """Writes JSON lines (record, messages and traces) or Arrow (only traces, one row each, as returned by the service).

    A rollout without a trajectory is written as its record alone in JSON lines, and has no row in Arrow.
    """
    if path.suffix == ".arrow":
        await _write_arrow(client, records, path)
        return
    import msgspec

    from rollyard.core.failure import Gone, NotFound

    with replacing(path) as file:
        for record in records:
            body: Mapping[str, Any]
            try:
                body = (await client.trajectory(record.id, run=record.run)).record.raw
            except (Gone, NotFound):
                body = record.raw
            file.write(msgspec.json.encode(body) + b"\n")


async def _write_arrow(client: AsyncClient, records: Sequence[Record], path: Path) -> None:
    import pyarrow as pa

    from rollyard.core.failure import Gone, NotFound

    writer: pa.ipc.RecordBatchFileWriter | None = None
    with replacing(path) as file:
        for record in records:
            try:
                stream = await client.traces_arrow(record.id, run=record.run)
            except (Gone, NotFound):
                continue
            with pa.ipc.open_stream(stream) as reader:
                if writer is None:
                    writer = pa.ipc.new_file(file, reader.schema)
                for batch in reader:
                    writer.write_batch(batch)
        if writer is None:
            raise CommandError("no rollout left a trace", f"{path} was not written")
        writer.close()
