"""`rollyard submit`: submits tasks from JSON lines, and waits until their rollouts end.

The ids are made here, from a prefix and the task's number: the same command with the same `--id-prefix` names the same
rollouts, so an interrupted command can be repeated.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollyard.cli._console import AsJson, CommandError, Token, Url, connect, note, print_json, run, show
from rollyard.cli._tasks import FIELDS, NOTHING, TaskLine, listed, scan_tasks

if TYPE_CHECKING:
    from rollyard.client import AsyncClient, TaskProblem
    from rollyard.core import RollyardError

RETRY_S = 600.0  # how long to wait for a service that restarts or is full


def submit(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="JSON lines, one task each; - reads stdin.")],
    run_id: Annotated[
        str | None, typer.Option("--run", help="Run of the rollouts; created if missing. [default: default]")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Create the run for this policy; without --run, it has the policy's name.")
    ] = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="Rollouts per task, as a group.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N tasks.")] = None,
    priority: Annotated[int | None, typer.Option(help="Higher goes first within the run.")] = None,
    id_prefix: Annotated[
        str | None, typer.Option(help="Ids are PREFIX-0, PREFIX-1…; the same prefix names the same rollouts.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until all have ended.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Write trajectories to a file: .jsonl (all) or .arrow (traces).")
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Submit tasks, show their progress, and print the results.

    Each line is one task: {"environment": "math", "data": {"question": "2+2?", "answer": "4"}}. All mistakes are
    listed by line before anything is submitted. Exits with 1 if a rollout ended without a reward.
    """
    from rollyard.core import new_id

    if out is not None and not wait:
        raise CommandError("--out needs the rollouts to end", "omit --no-wait", 2)
    if out is not None:
        from rollyard.cli._results import check_out

        check_out(out)
    lines = list(islice(scan_tasks(files), limit))
    if not lines:
        raise CommandError(f"there is no task in {', '.join(files)}", "write one JSON object per line")
    tasks = [line for line in lines if isinstance(line, TaskLine)]
    if len(tasks) < len(lines):
        raise run(_all_mistakes(lines, run_id or policy or "default", url, token))
    prefix = id_prefix or new_id("s")
    work = _submit(tasks, run_id, policy, group_size, priority, prefix, wait, out, url, token, as_json)
    try:
        is_good = run(work)
    except KeyboardInterrupt:
        note(f"rollyard: interrupted; submitted rollouts keep running. To watch them again: --id-prefix {prefix}")
        raise
    if not is_good:
        raise typer.Exit(1)


async def _submit(
    tasks: Sequence[TaskLine],
    run_id: str | None,
    policy: str | None,
    group_size: int | None,
    priority: int | None,
    prefix: str,
    wait: bool,
    out: Path | None,
    url: str | None,
    token: str | None,
    as_json: bool,
) -> bool:
    from rollyard.cli._results import failure_lines, results_table, summary_line, write_trajectories
    from rollyard.cli._watching import watch
    from rollyard.core import RollyardError
    from rollyard.core.texts import os_reason

    async with connect(url, token) as quick:
        status = await quick.status()  # an unreachable service or a wrong token fails at once, without retries
    async with connect(url, token, retry_s=RETRY_S) as client:
        where = run_id or policy or "default"
        await _ensure_run(client, where, policy)
        if mistakes := await Mistakes.found(client, tasks, where):
            raise mistakes.listed(tasks)
        ids = [f"{prefix}-{number}" for number in range(len(tasks))]
        try:
            records = await client.submit(
                [line.task for line in tasks], run=where, ids=ids, group_size=group_size, priority=priority
            )
        except RollyardError as error:
            raise with_place(error, tasks, group_size or 1) from error
        unserved = (await client.status()).get("unserved_policies") or {}
        if reason := unserved.get(await _policy_of(client, where)):
            note(f"rollyard: {reason}; the rollouts wait")
        if wait:
            started_at = time.monotonic()
            records = await watch(client, records, url=url, token=token, after=status.get("last_event"))
            note(f"{summary_line(records)}; {time.monotonic() - started_at:.1f} s")
        unwritten: CommandError | None = None
        if out is not None:
            try:
                await write_trajectories(client, records, out)
                note(f"trajectories are in {out}")
            except OSError as error:
                again = f"then run the command again with --id-prefix {prefix}, which submits nothing twice"
                what = f"{out} cannot be written: {os_reason(error)}"
                unwritten = CommandError(what, f"free some space or give another --out, {again}")
    if as_json:
        for record in records:
            print_json(record.raw)
    else:
        show(results_table(records), "outcome", "id")
    for line in failure_lines(records):
        note(line)
    if unwritten is not None:
        raise unwritten
    return not wait or all(record.reward is not None for record in records)


async def _all_mistakes(
    lines: Sequence[TaskLine | CommandError], run_id: str, url: str | None, token: str | None
) -> CommandError:
    """Returns the error for a file with unreadable lines. Mistakes of the others are listed too, if a service
    answers."""
    from rollyard.core import DEFAULT_RUN, RollyardError
    from rollyard.core.failure import NotFound

    tasks = [line for line in lines if isinstance(line, TaskLine)]
    found = Mistakes()
    if not tasks:
        return found.listed(lines)
    try:
        async with connect(url, token) as client:
            try:
                found = await Mistakes.found(client, tasks, run_id)
            except NotFound:  # the run is created when something is submitted; like the default run, without defaults
                found = await Mistakes.found(client, tasks, DEFAULT_RUN)
    except (RollyardError, TimeoutError):
        note("the service did not answer: of the other tasks only the text was checked")
    return found.listed(lines)


@dataclass(slots=True)
class Mistakes:
    """What a service finds wrong with tasks, by their place. `unlisted` others are only counted."""

    by_place: dict[str, TaskProblem] = field(default_factory=dict)
    unlisted: int = 0

    @classmethod
    async def found(cls, client: AsyncClient, tasks: Sequence[TaskLine], run_id: str) -> Mistakes:
        check = await client.check([line.task for line in tasks], run=run_id)
        by_place = {tasks[problem.index].place: problem for problem in check.problems}
        return cls(by_place, check.bad - len(by_place))

    def __bool__(self) -> bool:
        return bool(self.by_place)

    def listed(self, lines: Sequence[TaskLine | CommandError]) -> CommandError:
        """Prints all mistakes in the order of the lines, and returns the error that ends the command."""
        from rollyard.core import CODES

        texts: list[str] = []
        remedies: dict[str, None] = {}  # in order, each once
        bad = self.unlisted
        for line in lines:
            if isinstance(line, CommandError):
                texts.append(line.what)
                remedy = line.remedy.removeprefix(NOTHING)
                remedies[remedy[:1].upper() + remedy[1:].rstrip(".") + "."] = None
            elif line.place in self.by_place:
                problem = self.by_place[line.place]
                texts += [f"{line.place}: {detail}" for detail in problem.details]
                remedies[(CODES[problem.code].remedy if problem.code in CODES else "") or FIELDS] = None
            else:
                continue
            bad += 1
        return listed(texts, bad, len(lines), remedy=" ".join(remedies), unlisted=self.unlisted)


async def _ensure_run(client: AsyncClient, run_id: str, policy: str | None) -> None:
    """Creates the run if it does not exist. Raises `CommandError` if it has another policy."""
    from rollyard.core.failure import NotFound

    if run_id == "default" and policy is None:  # the service creates this one
        return
    try:
        existing = await client.get_run(run_id)
    except NotFound:
        await client.create_run(run_id, policy=policy)
    else:
        if policy not in (None, existing.get("policy")):
            raise CommandError(
                f"run {run_id} has policy {existing.get('policy')}, not {policy}", "give another run with --run"
            )


async def _policy_of(client: AsyncClient, run_id: str) -> str:
    return "default" if run_id == "default" else str((await client.get_run(run_id)).get("policy"))


def with_place(error: RollyardError, tasks: Sequence[TaskLine], group_size: int) -> Exception:
    """Replaces the number of a rollout in a service's error with the file and line of its task."""
    submitted = int(str(error.data.get("submitted", 0)))
    match = re.search(r"rollouts\[(\d+)\](?:\.task\.?)?", f"{error.data.get('path', '')} {error.detail}")
    index = (submitted + int(match[1])) // group_size if match else len(tasks)
    if match is None or index >= len(tasks):
        return error
    detail = error.detail.replace(match[0], "").lstrip(": ")
    submitted_text = "nothing was submitted" if not submitted else f"{submitted} rollouts before it were submitted"
    return CommandError(
        f"{tasks[index].place}: {detail}", f"{error.remedy.removesuffix('.')} ({submitted_text})".strip()
    )
