"""`rollyard demo --scripted`: eight rollouts on this machine, without a model.

A service and a scripted engine on loopback, real bubblewrap sandboxes, eight tasks of two environments. Only the
engine is not real: it is an HTTP server with vLLM's API and scripted replies. It solves most tasks, gets one wrong and
reaches a limit with another, as a model would.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rollyard.cli._exporting import write_kept_page
from rollyard.cli.demo.following import RUN, follow
from rollyard.cli.demo.view import show_page, task_name, waiting
from rollyard.cli.rig import rig
from rollyard.client import AsyncClient, Record

WITHIN_S = 150.0
HERE = Path(__file__).parent
SCRIPT = HERE / "demo_script.json"
TASKS = HERE / "demo_tasks.jsonl"  # the repository's examples/tasks.jsonl is this file


async def run_scripted(console: Console) -> tuple[list[Record], Path]:
    """Returns the records of the rollouts, and the page with them. Raises if one fails outside its policy."""
    console.print("[bold]Rollyard[/]: a service on loopback, a sandbox per rollout, tokens in and out.")
    console.print("A [bold]scripted engine[/] replaces the model: it has vLLM's API and scripted replies.\n")
    script = json.loads(SCRIPT.read_text())
    tasks = [json.loads(line) for line in TASKS.read_text().splitlines()]
    slots = {"run_slots": 4, "init_slots": 2, "eval_slots": 2}
    async with AsyncExitStack() as stack:
        with waiting(console, "Starting the engine and the service"):
            bench = await stack.enter_async_context(rig(script, latency_s=0.3, settings=slots))
        await bench.client.create_run(RUN)
        records = await follow(console, bench.client, tasks, WITHIN_S)
        console.print(_table(records, console.width))
        await _show_one(console, bench.client, records[0])
        page = await write_kept_page(bench.client, records, "demo")
    broken = [record for record in records if record.failure and record.failure["blame"] != "policy"]
    if broken:
        raise RuntimeError(f"{broken[0].id} failed: {broken[0].failure}")
    console.print("\nNext: [bold]rollyard serve --engine URL[/], then [bold]rollyard submit examples/tasks.jsonl[/]")
    show_page(console, page)
    return records, page


def _table(records: list[Record], width: int) -> Table:
    table = Table(title="Eight rollouts (times in seconds)", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("task", no_wrap=True, max_width=max(18, width - 66))
    table.add_column("outcome", no_wrap=True, min_width=10)
    for name in ("reward", "turns", "tokens", "init", "run", "eval"):
        table.add_column(name, justify="right", no_wrap=True, min_width=max(4, len(name)))
    for record in records:
        timings, summary = record.timings or {}, record.summary or {}
        table.add_row(
            task_name(record.task),
            str(record.outcome) if not record.failure else record.failure["code"],
            "–" if record.reward is None else f"{record.reward:.2f}",
            str(summary.get("turns")),
            str(summary.get("sampled_tokens")),
            *(f"{timings[name]:.2f}" for name in ("init_s", "run_s", "eval_s")),
        )
    return table


async def _show_one(console: Console, client: AsyncClient, record: Record) -> None:
    """Shows what a trainer would get for the first rollout."""
    for trace in await client.traces(record.id):
        sampled = trace.mask == 1
        console.print(
            f"\nThe first one's trace: {len(trace.token_ids)} tokens, {int(sampled.sum())} sampled "
            f"in {len(trace.spans)} calls. Its first sampled tokens and their logprobs:"
        )
        assert trace.logprobs is not None
        pairs = zip(trace.token_ids[sampled][:8], trace.logprobs[sampled][:8], strict=True)
        console.print("  " + "  ".join(f"{token}: {logprob:.3f}" for token, logprob in pairs))
