"""A whole service on a real port of this loop: SQLite, the local runtime, a scripted engine over HTTP."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp

from rollyard.service import build
from rollyard.service.server import Served, serve
from rollyard.service.settings import Settings
from rollyard.testing.script import FolderTokenizer, Reply, Rules
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir

TRAINER = "trainer-token-of-the-tests"
OTHER = "another-trainer-of-the-tests"


def finish() -> str:
    return "<tool_call>\n" + json.dumps({"name": "finish", "arguments": {}}) + "\n</tool_call>"


def shell(command: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": "shell", "arguments": {"command": command}}) + "\n</tool_call>"


def task(instruction: str = "do it", **fields: Any) -> dict[str, Any]:
    limits = {"init_s": 30, "run_s": 30, "eval_s": 30, "model_s": 20, "max_turns": 4}
    data = {"instruction": instruction, "checks": ["true"]}
    return {"environment": "shell", "data": data, "limits": limits, **fields}


def waiting_task(go: Path, instruction: str = "wait for go at {}.") -> dict[str, Any]:
    """A task for an agent that waits for a file. RUN's deadline is longer than what a test does meanwhile."""
    return task(instruction.format(go), limits={**task()["limits"], "run_s": 600})


@dataclass
class Answer:
    status: int
    body: Any
    headers: Any

    @property
    def code(self) -> str:
        """The code of a problem. Asserts that the problem is complete."""
        assert self.headers["content-type"] == "application/problem+json", self.body
        assert self.body["status"] == self.status
        assert self.body["type"] == "about:blank"
        assert {"title", "detail", "remedy"} <= self.body.keys()
        return self.body["code"]


@dataclass
class Site:
    url: str
    token: str
    http: aiohttp.ClientSession
    served: Served

    async def call(self, method: str, path: str, *, token: str | None = None, **options: Any) -> Answer:
        """`token` "" sends none. `json` in the options is a body."""
        headers = dict(options.pop("headers", {}))
        bearer = self.token if token is None else token
        if bearer:
            headers.setdefault("Authorization", f"Bearer {bearer}")
        async with self.http.request(method, self.url + path, headers=headers, **options) as reply:
            data = await reply.read()
            is_json = "json" in reply.headers.get("content-type", "")
            return Answer(reply.status, json.loads(data) if is_json else data, reply.headers)

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.call("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return await self.call("POST", path, json=body, **options)

    async def put(self, path: str, body: Any = None, **options: Any) -> Answer:
        return await self.call("PUT", path, json=body, **options)

    async def delete(self, path: str, **options: Any) -> Answer:
        return await self.call("DELETE", path, **options)

    async def delete_run(self, run_id: str, token: str | None = None) -> None:
        """Deletes a run and returns when it is deleted."""
        answer = await self.delete(f"/v1/runs/{run_id}", token=token)
        assert answer.status in (202, 204), answer.body
        async with asyncio.timeout(90):
            while (await self.get(f"/v1/runs/{run_id}")).status != 404:
                await asyncio.sleep(0.02)

    async def hold(self) -> None:
        """Stops admission: nothing leaves the queue from now on."""
        assert (await self.call("PATCH", "/v1/pools", json={"init": 0})).status == 200

    async def submit(self, *ids: str, **fields: Any) -> list[dict[str, Any]]:
        rollouts = [{"id": rollout_id, "task": task(), **fields} for rollout_id in ids]
        answer = await self.post("/v1/rollouts", {"rollouts": rollouts})
        assert answer.status == 202, answer.body
        return answer.body["rollouts"]

    async def ended(self, rollout_id: str) -> dict[str, Any]:
        async with asyncio.timeout(90):
            while True:
                answer = await self.get(f"/v1/rollouts/{rollout_id}?wait_s=20")
                assert answer.status == 200, answer.body
                if answer.body["state"] == "ended":
                    return answer.body


def settings(folder: Path, **values: Any) -> Settings:
    return Settings.model_validate(
        {
            "data_dir": folder / "data",
            "port": 0,
            "runtimes": ["local"],
            "trainer_tokens": [TRAINER, OTHER],
            "health_s": 0.2,
            "drain_s": 20,
            **values,
        }
    )


@asynccontextmanager
async def open_site(folder: Path, *, engines_s: float = 60.0, **values: Any) -> AsyncGenerator[Site, None]:
    """A running service. Opening it again below the same folder is a restart. The start waits up to `engines_s` for the
    engines, since most tests use them at once."""
    chosen = settings(folder, **values)
    async with AsyncExitStack() as stack:
        with patch.object(build, "ENGINES_S", engines_s):
            served = await stack.enter_async_context(serve(chosen))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Site(served.url, chosen.token_path.read_text().strip(), http, served)


def scripted(*turns: Reply | str) -> ScriptedEngine:
    """An engine that replies with these turns in every conversation; a probe gets a short reply."""
    replies = tuple(Reply(turn) if isinstance(turn, str) else turn for turn in turns or (finish(),))
    return ScriptedEngine(Rules(rules=(("<|im_start|>", replies),)), tokenizer=FolderTokenizer(tokenizer_dir()))


def engine_table(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    return {"id": "e1", "url": engine.url, "tokenizer": str(tokenizer_dir()), **fields}
