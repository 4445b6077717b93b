"""A service with something to see in every view: groups with and without spread, failures, a draw with a batch, evals,
and a rollout that runs until the service closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollyard.core import id_of
from rollyard.testing.script import FolderTokenizer, Reply, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.service.site import Site, engine_table, finish, open_site, shell, task
from tests.service.skill import CHECK, member_of

RUN = "default"
"""The run of rollouts that name none."""

RUNNING = "running"
FAILED = "failed"


def acts(turn: Turn) -> Reply:
    """Even members of a group solve their task, after a look around; `running` waits for its model."""
    if "<|im_start|>" not in turn.text:
        return Reply("ok")  # the probe
    rollout_id = id_of(turn.session_id)
    if rollout_id == RUNNING and turn.number > 0:
        return Reply(finish(), latency_s=3600.0)
    is_even = "-" not in rollout_id or member_of(rollout_id)[1] % 2 == 0
    commands = ["echo looking; ls -la /", *(["touch done"] if is_even else [])]
    if turn.number < len(commands):
        return Reply("<think>I look first.</think>" + shell(commands[turn.number]))
    return Reply(finish())


def graded(name: str, **data: Any) -> dict[str, Any]:
    body = task(name)
    body["data"] |= {"checks": CHECK, **data}
    return body


@asynccontextmanager
async def open_world(folder: Path, **values: Any) -> AsyncGenerator[Site, None]:
    engine = ScriptedEngine(acts, tokenizer=FolderTokenizer(tokenizer_dir()))
    values = {"drain_s": 0, **values}
    async with engine, open_site(folder, engines=[engine_table(engine)], **values) as site:
        await fill(site)
        yield site


async def fill(site: Site) -> None:
    await _post(site, "/v1/groups", {"id": "mixed", "task": graded("write a file"), "size": 4})
    await _post(site, "/v1/groups", {"id": "same", "task": task("all of them pass"), "size": 2})
    await _post(site, "/v1/rollouts", {"id": FAILED, "task": graded("cannot start", setup=["echo no >&2; exit 3"])})
    tasks = [graded(f"task {number}") for number in range(3)]
    await _post(site, "/v1/draws", {"id": "d", "source": {"tasks": tasks}, "group_size": 2, "epochs": 1})
    for name in ("e1", "e2"):
        await _post(site, "/v1/evals", {"id": name, "source": {"tasks": tasks[:2]}, "k": 2})
    await _post(site, "/v1/draws/d/batches", {"want": 2, "number": 1})
    async with asyncio.timeout(120):
        for group in ("mixed", "same"):
            while (await site.get(f"/v1/groups/{group}?wait_s=20")).body["state"] == "open":
                pass
        await site.ended(FAILED)
        while (await site.get("/v1/draws/d/batches/1?wait_s=20")).body["state"] != "closed":
            pass
        for name in ("e1", "e2"):
            while (await site.get(f"/v1/evals/{name}?wait_s=20")).body["state"] == "running":
                pass
    limits = {"init_s": 30, "run_s": 3600, "eval_s": 30, "model_s": 3600}
    await site.submit(RUNNING, task=task("never ends", limits=limits))


async def _post(site: Site, path: str, body: dict[str, Any]) -> None:
    answer = await site.post(path, body)
    assert answer.status < 300, answer.body


ADDRESSES = {
    "/": "/",
    "/runs": "/runs",
    "/runs/{run}": "/runs/default",
    "/rollouts": "/rollouts",
    "/rollouts/{run}/{id}": "/rollouts/default/mixed-0",
    "/groups/{run}/{id}": "/groups/default/mixed",
    "/draws": "/draws",
    "/draws/{run}/{id}": "/draws/default/d",
    "/evals": "/evals",
    "/evals/compare": "/evals/compare?a=e1/e1&b=e2/e2",
    "/evals/{run}/{id}": "/evals/e1/e1",
    "/engines": "/engines",
    "/nodes": "/nodes",
}
"""An address of each view, with something to see there."""
