"""`rollyard rollouts`: lists, shows, cancels and rescores rollouts, and gets their traces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollyard.cli._console import (
    AsJson,
    CommandError,
    Token,
    Url,
    connect,
    note,
    number,
    out,
    plain,
    print_json,
    print_lines,
    run,
    seconds,
    show,
    table,
    visible,
)
from rollyard.cli._ids import full_id

if TYPE_CHECKING:
    from rollyard.client import Page, Record, Trajectory
    from rollyard.client._async import TokenTexts

rollouts = typer.Typer(help="Rollouts: list, show, cancel, get traces, rescore.", no_args_is_help=True)

TRACES = 4  # shown at once
UNKNOWN = "cancelled_before_submit"  # the state of a rollout that was cancelled before its submission

Id = Annotated[str, typer.Argument(metavar="ID", help="A rollout's id, or a unique prefix of it.")]
InRun = Annotated[str | None, typer.Option("--run", help="The rollout's run; only needed if two runs have that id.")]


@rollouts.command("list", epilog="Example: rollyard rollouts list --run grpo-7b --state ended --limit 20")
def list_rollouts(
    state: Annotated[str | None, typer.Option(help="queued, init, ready, run, eval or ended.")] = None,
    run_id: Annotated[str | None, typer.Option("--run", help="Only rollouts of this run; or a unique prefix.")] = None,
    group: Annotated[str | None, typer.Option(help="Only rollouts of this group.")] = None,
    after: Annotated[str | None, typer.Option(help="Only rollouts after this cursor.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of rollouts.")] = 50,
    oldest: Annotated[bool, typer.Option("--oldest", help="Oldest first.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List rollouts, newest first: by their end with --state ended, otherwise by their submission."""

    order = "oldest" if oldest else "newest"

    async def work() -> Page:
        async with connect(url, token) as client:
            run = None if run_id is None else (await full_id(client, "run", run_id))[0]
            return await client.list(state=state, run=run, group=group, after=after, limit=limit, order=order)

    from rollyard.cli._results import list_table

    page = run(work())
    if as_json:
        print_lines(record.raw for record in page.rollouts)
    else:
        show(list_table(page.rollouts), "task", "run", "state", "id", optional=("time",))
    if page.next and len(page.rollouts) == limit:
        note(f"there may be more: --after {page.next}")


@rollouts.command("show", epilog="Example: rollyard rollouts show s_01-3 --tokens")
def show_rollout(
    id: Id,
    wait_s: Annotated[float, typer.Option("--wait-s", min=0, help="Seconds to wait for its end.")] = 0.0,
    messages: Annotated[bool, typer.Option("--messages", help="Also show the messages.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also show the sampled tokens with their logprobs, long turns folded.")
    ] = False,
    only_turn: Annotated[int | None, typer.Option("--turn", min=1, help="With --tokens: this turn, unfolded.")] = None,
    only_trace: Annotated[int | None, typer.Option("--trace", min=0, help="With --tokens: only this trace.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write its page to a file that needs no service and no network.")
    ] = None,
    atif: Annotated[Path | None, typer.Option("--atif", help="Write it to a file in ATIF v1.7 (JSON).")] = None,
    in_run: InRun = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show one rollout: its state, outcome and failure. Or write it to a file, to look at or to share."""
    if html is not None or atif is not None:
        _export(id, in_run, wait_s, html=html, atif=atif, url=url, token=token, as_json=as_json)
        return
    if (only_turn is not None or only_trace is not None) and not tokens:
        raise CommandError("--turn and --trace select tokens", "add --tokens", 2)

    async def work() -> tuple[Record, Trajectory | None, TokenTexts]:
        async with connect(url, token) as client:
            full, run = await full_id(client, "rollout", id, in_run)
            record = await client.get(full, wait_s=wait_s, run=run)
            if not (messages or tokens):
                return record, None, []
            texts = await client.token_texts(full, run=run) if tokens else []
            return record, await client.trajectory(full, run=run), texts

    record, trajectory, texts = run(work())
    if as_json:
        body = trajectory.record.raw if trajectory else record.raw
        if texts:
            for trace, its_texts in zip(body["trajectory"]["traces"], texts, strict=True):
                trace["texts"] = its_texts
        print_json(body)
        return
    from rollyard.cli._results import outcome, task_label

    grid = table("", "")
    grid.show_header = False
    task, failure, timings = record.task, record.failure or {}, record.timings or {}
    grid.add_row("outcome", outcome(record))
    rows = {
        "id": record.id,
        "run": record.run + (f", group {record.group} [{record.index}]" if record.group else ""),
        "task": task_label(task),
        "state": f"{record.state}, attempt {record.attempt}",
        "reward": number(record.reward) + ("" if record.trainable or record.reward is None else " (not trainable)"),
        "failure": f"{failure.get('detail')} (blame: {failure.get('blame')})" if failure else "",
        "components": ", ".join(f"{k} {number(v)}" for k, v in ((record.score or {}).get("components") or {}).items()),
        "summary": ", ".join(f"{k} {_one_line(v)}" for k, v in (record.summary or {}).items() if v),
        "timings": ", ".join(f"{k.removesuffix('_s')} {seconds(v)}" for k, v in timings.items() if v),
        "lost": "; ".join(f"attempt {item.get('attempt')}: {item.get('code')}" for item in record.lost),
        "rescored": ", ".join(number(item.get("reward")) for item in record.scores),
    }
    for name, value in rows.items():
        if value:
            grid.add_row(name, plain(value))
    show(grid)
    for message in trajectory.messages if trajectory and messages else ():
        out().print(f"\n[bold]{plain(message.get('role'))}[/]")
        out().print(visible(_text_of(message)), markup=False)

    if tokens and trajectory is not None:
        _show_tokens(trajectory, texts, only_trace, only_turn)


def _text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, and a line for each tool call."""
    calls = message.get("tool_calls") or []
    texts = [str(message.get("content") or ""), *map(_call_line, calls if isinstance(calls, list) else [calls])]
    return "\n".join(text for text in texts if text)


def _call_line(call: Any) -> str:
    """A tool call as an agent program wrote it, in any format."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return f"→ {call}"
    return f"→ {function.get('name')} {function.get('arguments')}"


def _one_line(value: object) -> str:
    """An object of the summary as `(memory cgroup, disk monitor)`, not as Python writes it."""
    if not isinstance(value, dict):
        return str(value)
    return "(" + ", ".join(f"{name} {_one_line(inner)}" for name, inner in value.items()) + ")"


def _export(
    id: str,
    in_run: str | None,
    wait_s: float,
    *,
    html: Path | None,
    atif: Path | None,
    url: str | None,
    token: str | None,
    as_json: bool,
) -> None:
    from rollyard.cli._exporting import export_rollout

    async def work() -> dict[str, Any]:
        async with connect(url, token) as client:
            return await export_rollout(client, id, in_run, wait_s, html=html, atif=atif)

    written = run(work())
    if as_json:
        print_json(written)
        return
    for file in filter(None, (html, atif)):
        note(f"{written['id']} is in {file}")
    if html is not None:
        out().print(html.absolute().as_uri(), markup=False, soft_wrap=True)


def _show_tokens(trajectory: Trajectory, texts: TokenTexts, only_trace: int | None, only_turn: int | None) -> None:
    from rollyard.cli._token_view import counts, legend, show_trace, turn_count

    traces = trajectory.traces
    if not traces:
        raise CommandError(f"rollout {trajectory.record.id} left no tokens", "see its failure above")
    if only_trace is not None and only_trace >= len(traces):
        raise CommandError(f"there is no trace {only_trace}", f"the last one is {len(traces) - 1}", 2)
    shown = [trace for trace in traces if only_trace in (None, trace.index)]
    if only_turn is not None and only_turn > (most := max(map(turn_count, shown))):
        raise CommandError(f"there is no turn {only_turn}", f"the last one is {most}", 2)
    console = out()
    for trace in shown[:TRACES]:
        why = "" if trace.trainable else f"; not trainable: {trace.reason}"
        fork = f"; {trace.fork_reason}" if trace.fork_reason else ""
        console.print(f"\n[bold]trace {trace.index}[/]: {counts(trace)}{plain(fork)}{plain(why)}")
        if trace.logprobs is not None:
            console.print(legend())
        if texts[trace.index] is None:
            console.print(f"No engine serves {plain(trace.model)} now: ids are shown instead of texts.")
        messages = trajectory.messages if len(traces) == 1 else ()
        show_trace(console, trace, texts[trace.index], messages, only_turn=only_turn)
    if len(shown) > TRACES:
        console.print(f"\n… traces {TRACES} to {len(traces) - 1} are left out; --trace N shows one of them")


@rollouts.command("cancel", epilog="Example: rollyard rollouts cancel s_01-3 s_01-4")
def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="ID…", help="Rollouts to cancel: ids or unique prefixes.")],
    in_run: InRun = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Cancel rollouts. One that is not submitted yet is cancelled when it is."""

    async def work() -> dict[str, str]:
        async with connect(url, token) as client:
            found = [await full_id(client, "rollout", id, in_run) for id in ids]
            return {id: await client.cancel(id, run=run) for id, run in found}

    for id, state in run(work()).items():
        if as_json:
            print_json({"id": id, "state": state})
        else:
            was = "it is not known: it is cancelled when it is submitted" if state == UNKNOWN else f"it was in {state}"
            out().print(f"{id}: cancelled ({was})", markup=False)


@rollouts.command("traces", epilog="Example: rollyard rollouts traces s_01-3 --out traces.arrow")
def traces(
    id: Id,
    file: Annotated[Path | None, typer.Option("--out", help="Write them to a file: .jsonl or .arrow.")] = None,
    in_run: InRun = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show the training sequences of a rollout, or write them to a file."""
    from rollyard.cli._results import check_out, write_trajectories

    if file is not None:
        check_out(file)

    async def work() -> Trajectory:
        async with connect(url, token) as client:
            full, run = await full_id(client, "rollout", id, in_run)
            trajectory = await client.trajectory(full, run=run)
            if file is not None:
                await write_trajectories(client, [trajectory.record], file)
            return trajectory

    trajectory = run(work())
    if as_json:
        parts = trajectory.record.raw.get("trajectory") or {}
        print_lines(parts.get("traces") or ())
        return
    if not trajectory.traces:
        raise CommandError(f"rollout {id} left no traces", "see its failure: rollyard rollouts show")
    grid = table(
        "trace", "tokens", "sampled", "calls", "versions", "logprobs", "trainable", right=("tokens", "sampled")
    )
    for trace in trajectory.traces:
        versions = sorted({int(version) for version in trace.versions[trace.mask == 1]})
        grid.add_row(
            str(trace.index),
            number(len(trace)),
            number(int(trace.mask.sum())),
            str(len(trace.spans)),
            ", ".join(map(str, versions)),
            "none" if trace.logprobs is None else trace.logprobs_kind,
            "yes" if trace.trainable else f"no: {trace.reason}",
        )
    show(grid)


@rollouts.command("rescore", epilog="Example: rollyard rollouts rescore s_01-3")
def rescore(id: Id, in_run: InRun = None, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Evaluate a rollout again, from its stored artifacts. The terminal record stays; the new score is appended."""

    async def work() -> Record:
        async with connect(url, token) as client:
            full, run = await full_id(client, "rollout", id, in_run)
            return await client.rescore(full, run=run)

    record = run(work())
    if as_json:
        print_json(record.raw)
        return
    latest = record.scores[-1].get("reward") if record.scores else None
    out().print(f"{record.id}: {number(latest)} (originally: {number(record.reward)})", markup=False)
