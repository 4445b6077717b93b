"""`rollyard eval`: n samples of each task by one version of a policy, and pass@k with intervals.

The service does it (`POST /v1/evals`): this command hands in the tasks, waits, and shows. The name makes the ids, and
they the sampling seeds: the same command with the same `--run` takes up what is there already, and on another service
samples alike. With `--engine` the whole service is in this process, in a folder that is
gone afterwards; images and installed agents are the settings'.
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

from rollyard.cli._console import AsJson, CommandError, Token, Url, connect, err, note, print_json, run, show
from rollyard.cli._tasks import TaskLine, read_defaults, read_tasks
from rollyard.cli.submit import RETRY_S

if TYPE_CHECKING:
    from rollyard.cli._evaluation import EvalReport
    from rollyard.client import AsyncClient, Evaluation, Record
    from rollyard.core import RollyardError
    from rollyard.service.settings import Settings

SHARED = ("images", "agents", "python")
"""Below the settings' data folder: what a service in this process uses of it."""

DRAIN_S = 1.0  # when it ends nothing is under way, unless it was interrupted

LOOK_S = 2.0  # between two looks at how far it is
PAGE = 1000  # records that are read at once


def evaluate(
    files: Annotated[list[str], typer.Argument(metavar="TASKS…", help="JSON lines, one task each; - reads stdin.")],
    k: Annotated[int, typer.Option(min=1, help="pass@1 to pass@K are told.")] = 4,
    n: Annotated[int | None, typer.Option(min=1, help="Samples of each task, K or more. [default: K]")] = None,
    policy: Annotated[str | None, typer.Option(help="Whose engines sample. [default: default]")] = None,
    run_id: Annotated[
        str | None, typer.Option("--run", help="The run's name; the same again goes on with it. [default: a new one]")
    ] = None,
    defaults: Annotated[
        str | None, typer.Option(help="A partial task as JSON, laid under each task: sampling, limits, agent.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks.")] = None,
    threshold: Annotated[float, typer.Option(help="The reward from which a sample counts as correct.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of the intervals.")] = 0,
    max_missing: Annotated[
        float, typer.Option(min=0, max=1, help="Ends with 1 if a larger share of the samples has no score.")
    ] = 0.05,
    by: Annotated[str | None, typer.Option(help="A key of the tasks' data: numbers for each of its values.")] = None,
    pool_share: Annotated[
        float | None, typer.Option(help="Of the service's RUN slots, at most. [default: 0.25, with --engine 1]")
    ] = None,
    on_update: Annotated[
        str | None, typer.Option(help="hold: a change of weights waits for its end; fail: it fails. [default: hold]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write trajectories there: .jsonl (all) or .arrow (traces).")] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="URL", help="Without a service: this engine, and a service in this process.")
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="With --engine: its tokenizer, if it does not say where it is.")] = "",
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Sample each task several times and tell how often it is solved: pass@1 to pass@K, with intervals.

    A sample that failed for a reason outside of the policy has no score: it is left out of the numbers and told.
    """
    from rollyard.cli._evaluation import by_table, evaluation_table, tell_missing
    from rollyard.client._bodies import given
    from rollyard.core import new_id

    if n is not None and n < k:
        raise CommandError(f"pass@{k} cannot be told from {n} samples of a task", "give --n of K or more", 2)
    if engine is not None and (url or token):
        raise CommandError("--engine starts a service in this process", "leave --url and --token away", 2)
    if tokenizer and engine is None:
        raise CommandError("--tokenizer says something of --engine", "name the engine", 2)
    laid = read_defaults(defaults)
    if out is not None:
        from rollyard.cli._results import check_out

        check_out(out)
    tasks = read_tasks(files, limit)
    if not tasks:
        raise CommandError(f"there is no task in {', '.join(files)}", "write one JSON object per line")
    name = run_id or new_id("eval")
    wanted = given(
        policy=policy,
        k=k,
        samples=n,
        threshold=threshold,
        max_missing=max_missing,
        seed=seed,
        by=by,
        pool_share=1.0 if pool_share is None and engine is not None else pool_share,
        on_update=on_update,
        defaults=laid,
    )
    job = _Job(tasks, name, wanted, out)
    try:
        if engine is None:
            found = run(job.on_service(url, token))
        else:
            found = run(job.alone(engine, tokenizer, policy or "default"))
    except KeyboardInterrupt:
        if engine is None:
            note(f"rollyard: interrupted; what was submitted goes on. To go on with it: --run {name}")
        raise
    if as_json:
        print_json(found.as_body())
    else:
        show(evaluation_table(found))
        if by is not None:
            show(by_table(found, by))
    tell_missing(found)
    if found.state != "done":
        note(f"it has failed: {found.detail}")
        raise typer.Exit(1)


class _Job:
    """What is to be evaluated, wherever the service is. `wanted` are the words of `AsyncClient.evaluate`."""

    def __init__(self, tasks: Sequence[TaskLine], name: str, wanted: Mapping[str, Any], out: Path | None) -> None:
        self._tasks = tasks
        self._name = name
        self._wanted = wanted
        self._out = out

    async def on_service(self, url: str | None, token: str | None) -> EvalReport:
        async with connect(url, token) as quick:
            await quick.status()  # nobody there, or the wrong token: known at once, not after all the retries
        async with connect(url, token, retry_s=RETRY_S) as client:
            return await self._evaluate(client)

    async def alone(self, engine: str, tokenizer: str, policy: str) -> EvalReport:
        async with _service(engine, tokenizer, policy) as client:
            return await self._evaluate(client)

    async def _evaluate(self, client: AsyncClient) -> EvalReport:
        from rollyard.cli._evaluation import read_evaluation

        began = time.monotonic()
        found = await _watch(client, await self._begin(client))
        if found.result is None:
            raise CommandError(f"evaluation {found.id} is {found.state}: {found.raw.get('detail') or found.reason}")
        records = await _records(client, found.run)
        if self._out is not None:
            from rollyard.cli._results import write_trajectories

            await write_trajectories(client, records, self._out)
            note(f"trajectories are in {self._out}")
        return read_evaluation(found, [line.place for line in self._tasks], records, time.monotonic() - began)

    async def _begin(self, client: AsyncClient) -> Evaluation:
        from rollyard.core import RollyardError
        from rollyard.core.failure import IdConflict

        try:
            with suppress(TimeoutError):  # it has begun
                tasks = [line.task for line in self._tasks]
                return await client.evaluate(tasks, id=self._name, timeout_s=0.0, **self._wanted)
        except IdConflict as error:
            what = f"there is an evaluation or a run {self._name} already, with other tasks or by other rules"
            raise CommandError(what, "give the command as it was, or another --run") from error
        except RollyardError as error:
            raise _with_place(error, self._tasks) from error
        return await client.get_eval(self._name)


def _with_place(error: RollyardError, tasks: Sequence[TaskLine]) -> Exception:
    """The service names the task by its number in the call; a person wants the file and the line."""
    found = re.match(r"source, task (\d+): (?:task\.?:? ?)?", error.detail)
    if found is None or int(found[1]) >= len(tasks):
        return error
    remedy = f"{error.remedy} (nothing was begun)".strip()
    return CommandError(f"{tasks[int(found[1])].place}: {error.detail[found.end() :]}", remedy)


async def _watch(client: AsyncClient, found: Evaluation) -> Evaluation:
    """Waits for its end, with a bar on a terminal's stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = err()
    if not console.is_terminal:
        note(f"{found.total} rollouts submitted to run {found.run}")
    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=found.total)
        while not found.is_ended:
            bar.update(task, completed=found.done)
            found = await client.get_eval(found.id, wait_s=LOOK_S)
    return found


async def _records(client: AsyncClient, run_id: str) -> list[Record]:
    """All its rollouts, in the order of tasks and samples."""
    found: list[Record] = []
    after: str | None = None
    while (page := await client.list(state="ended", run=run_id, after=after, limit=PAGE)).rollouts:
        found += page.rollouts
        after = page.next
    return sorted(found, key=lambda record: (_task_number(record), record.index))


def _task_number(record: Record) -> int:
    number = (record.group or "").rpartition(".")[2]
    return int(number) if number.isdecimal() else -1


@asynccontextmanager
async def _service(engine: str, tokenizer: str, policy: str) -> AsyncGenerator[AsyncClient, None]:
    """A whole service on a free port of loopback, with one engine."""
    from rollyard.cli._playing import add_engine
    from rollyard.client import AsyncClient
    from rollyard.service.server import serve
    from rollyard.service.settings import load_settings

    settings = load_settings({}, os.environ).settings
    with tempfile.TemporaryDirectory(prefix="rollyard-eval-") as folder:
        own = _in_folder(settings, Path(folder))
        async with serve(own) as served:
            await add_engine(served.app_state.router, engine, tokenizer, policy)
            async with AsyncClient(served.url, own.token_path.read_text().strip()) as client:
                yield client


def _in_folder(settings: Settings, folder: Path) -> Settings:
    """The settings for a service that leaves nothing behind; what is installed is shared."""
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
