"""The HTTP API of a draw, scripted from its contract, with everything that can happen to a connection.

The client is tested against it where the service must misbehave: interrupted responses, refusals, a restart between two
pages, invalid pages. A test decides when groups are ready.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pyarrow as pa
from aiohttp import web

from rollyard.core import Span
from rollyard.service.schemas.arrow import SCHEMA

SIZE = 2  # rollouts of a group
PAGE_SCHEMA = pa.schema(
    [
        *SCHEMA,
        pa.field("group", pa.string(), nullable=False),
        pa.field("rollout_index", pa.int32(), nullable=False),
    ]
)


def trace_row(rollout: str, index: int = 0, siblings: int = 1, tokens: int = 3) -> dict[str, Any]:
    return {
        "rollout_id": rollout,
        "attempt": 1,
        "index": index,
        "siblings": siblings,
        "policy": "default",
        "model": "m",
        "logprobs_kind": "processed",
        "trainable": True,
        "reward": 1.0,
        "token_ids": list(range(tokens)),
        "mask": [0] + [1] * (tokens - 1),
        "logprobs": [0.0] + [-0.5] * (tokens - 1),
        "versions": [-1] + [3] * (tokens - 1),
        "spans": [msgspec.to_builtins(Span(1, tokens, 1, "stop", "p", "s", "e0", "q", 0))],
        "reason": None,
        "fork_reason": None,
        "sampling": {"temperature": 0.7},
        "columns": {},
    }


def group_object(place: int, batch: int) -> dict[str, Any]:
    """Group number `place` of the draw: its member 1 was lost to infrastructure, and spare 2 replaced it."""
    id = f"g{place}"
    members = [
        {"index": k, "rollout": f"{id}-{k}", "is_member": k != 1, "state": "ended", "reward": 1.0 if k != 1 else None}
        for k in reversed(range(SIZE + 1))
    ]
    records = [
        {"id": f"{id}-{k}", "group": id, "index": k, "state": "ended", "reward": float(k == 0), "trainable": True}
        for k in (2, 0)
    ]
    return {
        "id": id,
        "run": "r",
        "draw": "d",
        "state": "delivered",
        "size": SIZE,
        "task": {"environment": "math"},
        "stats": {"members": SIZE, "mean": 0.5},
        "admitted_version": 2,
        "oldest_version": 2,
        "newest_version": 3,
        "staleness": 1,
        "epoch": 0,
        "item": place,
        "batch": batch,
        "cursor": f"d:{place}",
        "members": members,
        "rollouts": records,
    }


def arrow_page(page: dict[str, Any], rows: list[dict[str, Any]]) -> bytes:
    """One row per trace, with the page in the metadata."""
    schema = PAGE_SCHEMA.with_metadata({b"page": json.dumps(page).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for row in rows:
            full = {**row, "sampling": json.dumps(row["sampling"]), "columns": list(row["columns"].items())}
            group, _, index = row["rollout_id"].rpartition("-")
            writer.write_batch(
                pa.RecordBatch.from_pylist([{**full, "group": group, "rollout_index": int(index)}], schema=schema)
            )
    return sink.getvalue().to_pybytes()


class ScriptedDraws:
    """One draw, `d`, with `total` groups, of which `ready` can be delivered."""

    def __init__(self, *, total: int = 100, ready: int = 100) -> None:
        self.total = total
        self.ready = ready
        self.batches: dict[int, dict[str, Any]] = {}
        self.acked = 0
        self.calls: list[str] = []  # "METHOD path?query", in order of arrival
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.cut_replies = 0  # the next ones are interrupted
        self.refusals = 0  # the next ones get 503, draining
        self.spoil: Any = None  # called with a page before it is sent
        self.is_stopping = False
        self.evaluations = [{"state": "running", "done": 0}]  # one per request; the last is repeated
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> ScriptedDraws:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application(middlewares=[self._misbehave])
        app.router.add_route("*", "/v1/draws", self._draw)
        app.router.add_route("*", "/v1/draws/d", self._draw)
        app.router.add_post("/v1/draws/d/batches", self._open)
        app.router.add_get("/v1/draws/d/batches/{number}", self._get_batch)
        app.router.add_get("/v1/draws/d/groups", self._groups)
        app.router.add_post("/v1/draws/d/{what:ack|rewind|tasks}", self._post)
        app.router.add_route("*", "/v1/evals{id:.*}", self._eval)
        self.is_stopping = False
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops as if killed: waiting calls get no response. The state is kept for the next start."""
        assert self._runner is not None
        self.is_stopping = True
        await self.release(0)
        await self._runner.cleanup()

    async def release(self, count: int) -> None:
        async with self._changed:
            self.ready += count
            self._changed.notify_all()

    async def asked(self, path: str, times: int) -> None:
        """Waits until this many calls of that path have arrived."""
        async with asyncio.timeout(90), self._changed:
            await self._changed.wait_for(lambda: len([call for call in self.calls if path in call]) >= times)

    @web.middleware
    async def _misbehave(self, request: web.Request, handler: Any) -> web.StreamResponse:
        async with self._changed:
            self.calls.append(f"{request.method} {request.path_qs}")
            self._changed.notify_all()
        if request.method == "POST":
            self.bodies.append((request.path, await request.json()))
        if self.refusals:
            self.refusals -= 1
            problem = {"code": "draining", "detail": "shutting down", "status": 503}
            return web.json_response(problem, status=503, headers={"Retry-After": "0"})
        reply: web.Response = await handler(request)
        if self.cut_replies or self.is_stopping:
            self.cut_replies -= not self.is_stopping
            assert isinstance(reply.body, bytes) and request.transport is not None
            broken = web.StreamResponse(headers={"Content-Length": str(len(reply.body))})
            await broken.prepare(request)
            await broken.write(reply.body[: len(reply.body) // 2])
            request.transport.abort()
        return reply

    # --- the contract ---------------------------------------------------------------------------------

    @property
    def _delivered(self) -> int:
        return sum(self._count(number) for number in self.batches)

    def _count(self, number: int) -> int:
        batch = self.batches[number]
        available = min(self.ready, self.total) - batch["first"]
        return max(0, min(batch["want"], available))

    def _object(self) -> dict[str, Any]:
        state = {"state": "ended", "reason": "exhausted"} if self._delivered >= self.total else {"state": "active"}
        figures = {"admitted": self.total, "delivered": self._delivered}
        return {"id": "d", "run": "r", **state, "batch": len(self.batches), "acked": self.acked, "figures": figures}

    def _batch(self, number: int) -> dict[str, Any]:
        batch, count = self.batches[number], self._count(number)
        is_last = batch["first"] + count >= self.total
        last = f"d:{batch['first'] + count}" if count else None
        return {
            "draw": "d",
            "number": number,
            "want": batch["want"],
            "state": "closed" if count == batch["want"] or is_last else "open",
            "version": 3,
            "delivered": count,
            "after": f"d:{batch['first']}",
            "last": last,
            "reason": "exhausted" if is_last and count < batch["want"] else None,
            "is_last": is_last,
            "figures": {"admitted": count, "reward_before": 0.5},
        }

    async def _draw(self, request: web.Request) -> web.Response:
        if request.method == "GET" and request.path == "/v1/draws":
            return web.json_response({"draws": [self._object()]})
        return web.json_response(self._object())

    async def _open(self, request: web.Request) -> web.Response:
        body = await request.json()
        number = body["number"]
        if number not in self.batches:
            assert number == len(self.batches) + 1, "batches are opened one after another"
            if self._delivered >= self.total:  # nothing is left to read
                ended = {"state": "closed", "delivered": 0, "after": f"d:{self.total}", "is_last": True}
                return web.json_response({"draw": "d", **body, **ended})
            self.batches[number] = {"want": body["want"], "first": self._delivered}
        assert body["want"] == self.batches[number]["want"], "the service returns a conflict for this"
        return web.json_response(self._batch(number))

    async def _get_batch(self, request: web.Request) -> web.Response:
        return web.json_response(self._batch(int(request.match_info["number"])))

    async def _groups(self, request: web.Request) -> web.Response:
        number, after = int(request.query["batch"]), int(request.query["after"].removeprefix("d:"))
        limit, wait_s = int(request.query["limit"]), float(request.query["wait_s"])

        def places() -> list[int]:
            end = self.batches[number]["first"] + self._count(number)
            return list(range(after + 1, min(end, after + limit) + 1))

        def is_answered() -> bool:
            return bool(places()) or self._batch(number)["state"] == "closed" or self.is_stopping

        async with self._changed:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(is_answered)
            except TimeoutError:
                pass
        groups = [group_object(place, number) for place in places()]
        next_cursor = groups[-1]["cursor"] if groups else f"d:{after}"
        page = {"groups": groups, "next": next_cursor, "batch": self._batch(number)}
        rows = [trace_row(record["id"], k, 2) for group in groups for record in group["rollouts"] for k in range(2)]
        if self.spoil is not None:
            self.spoil(page, rows)
        return web.Response(body=arrow_page(page, rows), content_type="application/vnd.apache.arrow.stream")

    async def _eval(self, request: web.Request) -> web.Response:
        looked = len(self.evaluations) > 1 and request.method == "GET"
        state = self.evaluations.pop(0) if looked else self.evaluations[0]
        return web.json_response({"id": "ev", "run": "ev", "version": 3, "total": 8, **state})

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.match_info["what"] == "tasks":
            return web.json_response({"accepted": len(body["tasks"]), "total": 9}, status=202)
        if request.match_info["what"] == "ack":
            self.acked = body["batch"]
            return web.json_response({"acked": self.acked, "deleted": 7})
        for number in [number for number in self.batches if number > body["batch"]]:
            del self.batches[number]
        return web.json_response(self._object())
