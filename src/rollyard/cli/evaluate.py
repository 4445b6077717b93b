"""`rollyard eval`: n samples of each task by one policy, and pass@k with intervals.

The run's name makes the ids, and they the sampling seeds: the same command with the same `--run` takes up what is there
already, and on another service samples alike. With `--engine` the whole service is in this process, in a folder that is
gone afterwards; images and installed agents are the settings'.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollyard.cli._console import AsJson, Token, Trouble, Url, connect, note, print_json, run, show
from rollyard.cli._tasks import TaskLine, read_defaults, read_tasks
from rollyard.cli.submit import RETRY_S, watch, with_place

if TYPE_CHECKING:
    from rollyard.cli._evaluation import Evaluation, Rules
    from rollyard.client import AsyncClient, Record
    from rollyard.core import Json
    from rollyard.service.settings import Settings

SHARED = ("images", "agents", "python")
"""Below the settings' data folder: what a service in this process uses of it."""

DRAIN_S = 1.0  # when it ends nothing is under way, unless it was interrupted


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
    from rollyard.cli._evaluation import Rules, evaluation_table, tell_missing
    from rollyard.core import new_id

    if n is not None and n < k:
        raise Trouble(f"pass@{k} cannot be told from {n} samples of a task", "give --n of K or more", 2)
    if engine is not None and (url or token):
        raise Trouble("--engine starts a service in this process", "leave --url and --token away", 2)
    if tokenizer and engine is None:
        raise Trouble("--tokenizer says something of --engine", "name the engine", 2)
    laid = read_defaults(defaults)
    if out is not None:
        from rollyard.cli._results import check_out

        check_out(out)
    tasks = read_tasks(files, limit)
    if not tasks:
        raise Trouble(f"there is no task in {', '.join(files)}", "write one JSON object per line")
    name = run_id or new_id("eval")
    rules = Rules(k, n or k, threshold, seed)
    job = _Job(tasks, name, policy, laid, rules, out)
    try:
        if engine is None:
            found = run(job.on_service(url, token))
        else:
            found = run(job.alone(engine, tokenizer))
    except KeyboardInterrupt:
        if engine is None:
            note(f"rollyard: interrupted; what was submitted goes on. To go on with it: --run {name}")
        raise
    if as_json:
        print_json(found.as_body())
    else:
        show(evaluation_table(found))
    tell_missing(found)
    if found.missing_share > max_missing:
        note(f"{found.missing_share:.1%} of the samples have no score, which is more than --max-missing allows")
        raise typer.Exit(1)


class _Job:
    """What is to be evaluated, wherever the service is."""

    def __init__(
        self,
        tasks: Sequence[TaskLine],
        name: str,
        policy: str | None,
        defaults: dict[str, Json] | None,
        rules: Rules,
        out: Path | None,
    ) -> None:
        self._tasks = tasks
        self._name = name
        self._policy = policy
        self._defaults = defaults
        self._rules = rules
        self._out = out

    async def on_service(self, url: str | None, token: str | None) -> Evaluation:
        async with connect(url, token) as quick:
            await quick.status()  # nobody there, or the wrong token: known at once, not after all the retries
        async with connect(url, token, retry_s=RETRY_S) as client:
            return await self._evaluate(client)

    async def alone(self, engine: str, tokenizer: str) -> Evaluation:
        async with _service(engine, tokenizer, self._policy or "default") as client:
            return await self._evaluate(client)

    async def _evaluate(self, client: AsyncClient) -> Evaluation:
        from rollyard.cli._evaluation import Evaluation, Sampled
        from rollyard.core import RollyardError
        from rollyard.core.failure import IdConflict

        began = time.monotonic()
        remedy = "give the command as it was, or another --run"
        try:
            made = await client.create_run(
                self._name, mode="eval", policy=self._policy, defaults=self._defaults, seed=self._rules.seed
            )
        except IdConflict as error:
            what = f"there is a run {self._name} already, with another mode, policy, seed or defaults"
            raise Trouble(what, remedy) from error
        n = self._rules.n
        try:
            records: Sequence[Record] = await client.submit(
                [line.task for line in self._tasks],
                run=self._name,
                ids=[f"{self._name}-{number}" for number in range(len(self._tasks))],
                group_size=n,
            )
        except IdConflict as error:
            raise Trouble(f"run {self._name} has sampled other tasks: {error.detail}", remedy) from error
        except RollyardError as error:
            raise with_place(error, self._tasks, n) from error
        records = await watch(client, records)
        if self._out is not None:
            from rollyard.cli._results import write_trajectories

            await write_trajectories(client, records, self._out)
            note(f"trajectories are in {self._out}")
        sampled = tuple(
            Sampled(line.place, tuple(records[at * n : (at + 1) * n])) for at, line in enumerate(self._tasks)
        )
        policy = str(made.get("policy", ""))
        return Evaluation(self._name, policy, self._rules, sampled, time.monotonic() - began)


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
            await add_engine(served.house.router, engine, tokenizer, policy)
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
