"""`rollyard eval`: n samples of each task from one version of a policy, and pass@k with confidence intervals.

The service runs the evaluation (`POST /v1/evals`); this command submits the tasks, waits, and shows the result. The
run's name determines the ids, and these the sampling seeds: the same command with the same `--run` continues an
existing evaluation, and uses the same seeds on another service. With `--engine`, a whole service runs in this process,
in a temporary folder; images and installed agents are those of the settings' data folder.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollyard.cli._console import (
    AsJson,
    CommandError,
    Token,
    Url,
    connect,
    err,
    note,
    plain,
    print_json,
    run,
    show,
    show_in_parts,
)
from rollyard.cli._tasks import TaskLine, read_defaults, read_tasks
from rollyard.cli.commands.submit import RETRY_S

if TYPE_CHECKING:
    from rollyard.cli._evaluation import EvalReport
    from rollyard.client import AsyncClient, Evaluation, Record
    from rollyard.core import RollyardError
    from rollyard.core.engine import EngineSpec
    from rollyard.service.settings import Settings

SHARED = ("images", "agents", "python")
"""Subfolders of the settings' data folder that a service in this process uses."""

DRAIN_S = 1.0  # nothing runs at the end, unless it was interrupted

POLL_S = 2.0  # between two polls of the progress
PAGE = 1000  # records per request


def evaluate(
    files: Annotated[list[str], typer.Argument(metavar="TASKS…", help="JSON lines, one task each; - reads stdin.")],
    k: Annotated[int, typer.Option(min=1, help="Report pass@1 to pass@K.")] = 4,
    n: Annotated[int | None, typer.Option(min=1, help="Samples per task, K or more. [default: K]")] = None,
    policy: Annotated[str | None, typer.Option(help="Policy to evaluate. [default: default]")] = None,
    run_id: Annotated[
        str | None, typer.Option("--run", help="The run's name; an existing one is continued. [default: a new one]")
    ] = None,
    defaults: Annotated[
        str | None, typer.Option(help="Defaults of each task, a partial task as JSON: sampling, limits, agent.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N tasks.")] = None,
    threshold: Annotated[float, typer.Option(help="Minimum reward of a correct sample.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling and of the intervals.")] = 0,
    max_missing: Annotated[
        float, typer.Option(min=0, max=1, help="Exit with 1 if a larger share of the samples has no score.")
    ] = 0.05,
    by: Annotated[
        str | None, typer.Option(help="Also report by this key of the tasks' data, one row per value.")
    ] = None,
    pool_share: Annotated[
        float | None, typer.Option(help="Maximum share of the service's RUN slots. [default: 0.25, with --engine 1]")
    ] = None,
    on_update: Annotated[
        str | None,
        typer.Option(help="hold: a weight update waits for the end; fail: the evaluation fails. [default: hold]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write trajectories to a file: .jsonl (all) or .arrow (traces).")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Use this engine, and a service in this process.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="With --engine: its tokenizer, a folder or hub name. [default: found by its model]")
    ] = "",
    kind: Annotated[
        str | None, typer.Option(help="With --engine: its API, vllm, sglang, openai or prorl. [default: vllm]")
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Sample each task several times and report how often it is solved: pass@1 to pass@K, with intervals.

    A sample that failed for a reason outside the policy has no score: it is left out of the numbers and reported.
    """
    from rollyard.cli._evaluation import by_table, evaluation_table, report_missing
    from rollyard.cli._local_play import given_engine
    from rollyard.client._bodies import without_none
    from rollyard.core import new_id

    if n is not None and n < k:
        raise CommandError(f"pass@{k} cannot be computed from {n} samples of a task", "give --n of K or more", 2)
    if engine is not None and (url or token):
        raise CommandError("--engine starts a service in this process", "omit --url and --token", 2)
    own = given_engine(engine, kind, tokenizer, policy)
    task_defaults = read_defaults(defaults)
    if out is not None:
        from rollyard.cli._results import check_out

        check_out(out)
    tasks = read_tasks(files, limit)
    if not tasks:
        raise CommandError(f"there is no task in {', '.join(files)}", "write one JSON object per line")
    name = run_id or new_id("eval")
    arguments = without_none(
        policy=policy,
        k=k,
        samples=n,
        threshold=threshold,
        max_missing=max_missing,
        seed=seed,
        by=by,
        pool_share=1.0 if pool_share is None and engine is not None else pool_share,
        on_update=on_update,
        defaults=task_defaults,
    )
    job = _Job(tasks, name, arguments, out)
    try:
        if own is None:
            report = run(job.on_service(url, token))
        else:
            report = run(job.in_process(own))
    except KeyboardInterrupt:
        if engine is None:
            note(f"rollyard: interrupted; submitted rollouts keep running. To continue: --run {name}")
        raise
    if as_json:
        print_json(report.as_body())
    else:
        show_in_parts(evaluation_table(report))
        if by is not None:
            show(by_table(report, by), plain(by), optional=("missing", "mean reward"))
    report_missing(report)
    if job.unwritten is not None:
        raise job.unwritten
    if report.state != "done":
        note(f"the evaluation failed: {report.detail}")
        raise typer.Exit(1)


class _Job:
    """One evaluation, on a running service or in this process. `arguments` are those of `AsyncClient.evaluate`."""

    def __init__(self, tasks: Sequence[TaskLine], name: str, arguments: Mapping[str, Any], out: Path | None) -> None:
        self._tasks = tasks
        self._name = name
        self._arguments = arguments
        self._out = out
        self.unwritten: CommandError | None = None  # why the trajectories are not in the file

    async def on_service(self, url: str | None, token: str | None) -> EvalReport:
        async with connect(url, token) as quick:
            await quick.status()  # an unreachable service or a wrong token fails at once, without retries
        async with connect(url, token, retry_s=RETRY_S) as client:
            return await self._evaluate(client)

    async def in_process(self, engine: EngineSpec) -> EvalReport:
        async with _service(engine) as client:
            return await self._evaluate(client)

    async def _evaluate(self, client: AsyncClient) -> EvalReport:
        from rollyard.cli._evaluation import read_evaluation

        started_at = time.monotonic()
        evaluation = await _watch(client, await self._begin(client))
        if evaluation.result is None:
            raise CommandError(
                f"evaluation {evaluation.id} is {evaluation.state}: {evaluation.raw.get('detail') or evaluation.reason}"
            )
        records = await _records(client, evaluation.run)
        if self._out is not None:
            from rollyard.cli._results import write_trajectories
            from rollyard.core.texts import os_reason

            try:
                await write_trajectories(client, records, self._out)
                note(f"trajectories are in {self._out}")
            except OSError as error:
                what = f"{self._out} cannot be written: {os_reason(error)}"
                again = f"free some space or give another --out, then run the command again with --run {self._name}"
                self.unwritten = CommandError(what, again)
        return read_evaluation(evaluation, [line.place for line in self._tasks], records, time.monotonic() - started_at)

    async def _begin(self, client: AsyncClient) -> Evaluation:
        from rollyard.core import RollyardError
        from rollyard.core.failure import IdConflict

        try:
            with suppress(TimeoutError):  # it has started
                tasks = [line.task for line in self._tasks]
                return await client.evaluate(tasks, id=self._name, timeout_s=0.0, **self._arguments)
        except IdConflict as error:
            raise CommandError(error.detail, "repeat the original command, or give another --run") from error
        except RollyardError as error:
            raise _with_place(error, self._tasks) from error
        return await client.get_eval(self._name)


def _with_place(error: RollyardError, tasks: Sequence[TaskLine]) -> Exception:
    """Replaces the number of a task in a service's error with its file and line."""
    match = re.match(r"source, task (\d+): (?:task\.?:? ?)?", error.detail)
    if match is None or int(match[1]) >= len(tasks):
        return error
    remedy = f"{error.remedy.removesuffix('.')} (nothing was started)".strip()
    return CommandError(f"{tasks[int(match[1])].place}: {error.detail[match.end() :]}", remedy)


async def _watch(client: AsyncClient, evaluation: Evaluation) -> Evaluation:
    """Waits for the end, with a progress bar if stderr is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = err()
    if not console.is_terminal:
        note(f"{evaluation.total} rollout{'' if evaluation.total == 1 else 's'} submitted to run {evaluation.run}")
    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=evaluation.total)
        while not evaluation.is_ended:
            bar.update(task, completed=evaluation.done)
            evaluation = await client.get_eval(evaluation.id, wait_s=POLL_S)
    return evaluation


async def _records(client: AsyncClient, run_id: str) -> list[Record]:
    """Returns all its rollouts, ordered by task and sample."""
    records: list[Record] = []
    after: str | None = None
    while (page := await client.list(state="ended", run=run_id, after=after, limit=PAGE)).rollouts:
        records += page.rollouts
        after = page.next
    return sorted(records, key=lambda record: (_task_number(record), record.index))


def _task_number(record: Record) -> int:
    number = (record.group or "").rpartition(".")[2]
    return int(number) if number.isdecimal() else -1


@asynccontextmanager
async def _service(engine: EngineSpec) -> AsyncGenerator[AsyncClient, None]:
    """Runs a whole service on a free loopback port, with one engine."""
    from rollyard.cli._local_play import add_engine
    from rollyard.client import AsyncClient
    from rollyard.service.server import serve
    from rollyard.service.settings import load_settings

    settings = load_settings({}, os.environ).settings
    with tempfile.TemporaryDirectory(prefix="rollyard-eval-") as folder:
        own = _in_folder(settings, Path(folder))
        async with serve(own) as served:
            await add_engine(served.app_state.router, engine)
            async with AsyncClient(served.url, own.token_path.read_text().strip()) as client:
                yield client


def _in_folder(settings: Settings, folder: Path) -> Settings:
    """Returns settings for a service in a temporary folder that shares the installed images and agents."""
    for name in SHARED:
        shared = settings.data_dir.absolute() / name
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / name).symlink_to(shared)
    judges = tuple(engine for engine in settings.engines if engine.role == "judge")
    return settings.model_copy(
        update={
            "host": "127.0.0.1",
            "port": 0,
            "data_dir": folder,
            "store": "",
            "token_file": None,
            "admin_tokens": (),
            "trainer_tokens": (),
            "engines": judges,
            "drain_s": DRAIN_S,
        }
    )
