"""A small resources server in the style of NeMo Gym, for testing the environment `gym`: real HTTP, no Gym needed.

    async with GymServer() as server:
        environment = GymEnvironment({"counter": server.url})

or as a separate process, which prints one line of JSON with its `url` when it is ready; `--rows 8` prints rows of its
dataset instead:

    python -m rollyard.testing.gym_server --port 9001

A session is a counter with two tools. The reward is 1 if the counter has the value that the row expects and the last
message contains that number. A session is identified by a signed cookie, a new one with each reply: only the newest is
accepted, so a client that does not carry cookies forward fails. Counters are in memory, as in Gym's own servers: a
restart loses them. A count above `MOST` causes an intentional failure.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hmac
import json
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from uuid import uuid4

from aiohttp import web

MOST = 1_000_000

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "increment_counter",
        "description": "Adds to the counter.",
        "parameters": {
            "type": "object",
            "properties": {"count": {"type": "integer"}},
            "required": ["count"],
            "additionalProperties": False,
        },
        "strict": True,
    },
    {
        "type": "function",
        "name": "get_counter_value",
        "description": "Returns the value of the counter.",
        "parameters": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
        "strict": True,
    },
]


def row(initial: int = 3, *counts: int) -> dict[str, Any]:
    """Returns a row of its dataset: start at `initial`, add `counts`. Its `solution` is for the importer's `oracle`."""
    instruction = f"Add {', then '.join(map(str, counts)) or 'nothing'}; then get the counter's value and tell it."
    expected = initial + sum(counts)
    steps: list[dict[str, Any]] = [{"tool": "increment_counter", "arguments": {"count": count}} for count in counts]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": instruction}], "tools": TOOLS},
        "initial_count": initial,
        "expected_count": expected,
        "solution": [*steps, {"tool": "get_counter_value", "arguments": {}}, {"answer": f"It stands at {expected}."}],
    }


@dataclass(slots=True)
class Counter:
    """The state of one session."""

    value: int
    serial: int = 0  # of its newest cookie
    calls: int = 0


class Refused(Exception):
    """A response with a status other than 200."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class GymServer:
    """The server, started by `async with`. Port 0 selects any free port; a restart uses the same one."""

    cookie = "CounterServer___counter"

    def __init__(self, *, port: int = 0) -> None:
        self.port = port
        self.counters: dict[str, Counter] = {}
        self.verified: list[Mapping[str, Any]] = []  # the bodies of /verify requests
        self._runner: web.ServerRunner | None = None
        self._paths: Mapping[str, Callable[[Counter, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]] = {
            "/increment_counter": self.increment_counter,
            "/get_counter_value": self.get_counter_value,
            "/verify": self.verify,
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._runner = web.ServerRunner(web.Server(self.answer))
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self.counters.clear()

    # --- HTTP

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and request.path == "/":
            return web.json_response({"status": "ok"})
        session = self._session(request.cookies.get(self.cookie, ""))
        body: Mapping[str, Any] = await request.json()
        try:
            if request.path == "/seed_session":
                counter = Counter(_integer(body, "initial_count"))
                session = uuid4().hex
                self.counters[session] = counter
                reply: Mapping[str, Any] = {}
            elif request.path not in self._paths:
                raise Refused(404, "Not Found")
            elif session is None:
                raise Refused(400, "Session not initialized. Please call seed_session first.")
            else:
                reply = await self._paths[request.path](self.counters[session], body)
            response = web.json_response(reply)
        except Refused as error:
            response = web.json_response({"detail": str(error)}, status=error.status)
        if session is not None:
            self.counters[session].serial += 1
            response.set_cookie(self.cookie, self._signed(session, self.counters[session].serial), httponly=True)
        return response

    def _session(self, cookie: str) -> str | None:
        """Returns the session of a cookie, if the cookie is the newest of a known session."""
        try:
            session = base64.b64decode(cookie.partition(".")[0]).decode().partition(":")[0]
        except ValueError:
            return None
        counter = self.counters.get(session)
        return session if counter is not None and cookie == self._signed(session, counter.serial) else None

    def _signed(self, session: str, serial: int) -> str:
        """Signs as Gym does, with a key that is not secret."""
        payload = base64.b64encode(f"{session}:{serial}".encode())
        return f"{payload.decode()}.{hmac.digest(self.cookie.encode(), payload, 'sha256').hex()}"

    # --- tools and verification

    async def increment_counter(self, counter: Counter, body: Mapping[str, Any]) -> Mapping[str, Any]:
        count = _integer(body, "count")
        counter.calls += 1
        if abs(count) > MOST:
            raise Refused(500, "OverflowError('the counter is full')")
        counter.value += count
        return {"success": True}

    async def get_counter_value(self, counter: Counter, body: Mapping[str, Any]) -> Mapping[str, Any]:
        counter.calls += 1
        return {"count": counter.value}

    async def verify(self, counter: Counter, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.verified.append(body)
        expected = _integer(body, "expected_count")
        is_right = counter.value == expected
        is_answered = str(expected) in re.findall(r"\d+", _last_words(body["response"]))
        parts = {"counted": float(is_right), "told": float(is_answered)}
        return {**body, "reward": float(is_right and is_answered), "reward_components": parts, "calls": counter.calls}


def _integer(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(422, f"body.{name}: Input should be a valid integer")
    return value


def _last_words(response: Mapping[str, Any]) -> str:
    last = response["output"][-1]
    return "".join(part["text"] for part in last["content"]) if last["type"] == "message" else ""


async def serve(server: GymServer) -> None:
    """Serves until SIGTERM or SIGINT. The first line of output is JSON with the url."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with server:
        sys.stdout.write(json.dumps({"url": server.url}) + "\n")
        sys.stdout.flush()
        await stopped.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rollyard.testing.gym_server", description="A resources server in the style of NeMo Gym."
    )
    parser.add_argument("--port", type=int, default=0, help="Port to listen on; 0 takes any free one.")
    parser.add_argument("--rows", type=int, default=0, help="Print this many rows of the dataset and exit.")
    args = parser.parse_args()
    for number in range(args.rows):
        sys.stdout.write(json.dumps(row(number, number + 1, 2 * number + 1)) + "\n")
    if not args.rows:
        asyncio.run(serve(GymServer(port=args.port)))


if __name__ == "__main__":
    main()
