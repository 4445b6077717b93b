"""Requests generated from the service's own OpenAPI document, valid and invalid, sent with a token of every scope.

Every response arrives within `ANSWER_S`, is not a 5xx unless an engine is unreachable, and the service keeps running.
Each request is sent once with each token: that of the tenant that owns the runs, rollouts and draws of its ids, and
those of others; every tenth is also sent without a token, and with an unknown one.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok

from rollyard.cli.rig import engine_process, service
from rollyard.client import AsyncClient
from rollyard.testing.tokenizer_files import tokenizer_dir

WAITING = {"/v1/sessions", "/v1/sessions/{session_id}/reward"}
ANSWER_S = 30.0
"""Far longer than any response takes on a busy machine: a call that takes longer hangs."""

ACCESSES = ("admin", "trainer", "submitter", "reader", "node")
STREAMS = ("/v1/events",)  # without an end
TASK = {"environment": "math", "data": {"question": "1 + 1?", "answer": "2"}}


@dataclass
class Fuzzed:
    """Counts of responses, and the responses that must not occur."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter[int])
    wrong: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Target:
    """A running service with some contents. `ids`: ids of existing objects, by the name of a path parameter."""

    url: str
    pid: int
    tokens: Mapping[str, str]
    ids: Mapping[str, list[str]]
    document: dict[str, Any]


@asynccontextmanager
async def target(folder: Path) -> AsyncGenerator[Target, None]:
    script = {"rules": [], "default": ["ok"]}
    (folder / "script.json").write_text(json.dumps(script))
    async with engine_process(folder, 0.0) as (_, engine), service(folder, {"log_level": "error"}) as served:
        tokens: dict[str, str] = {}
        async with AsyncClient(served.url, served.token) as client:
            for access in ACCESSES:
                tokens[access] = (await client.create_token(access, name=access))["token"]
            listed = [str(one["id"]) for one in await client.list_tokens()]
            await client.add_engine(engine, id="e1", tokenizer=str(tokenizer_dir()))
        async with AsyncClient(served.url, tokens["trainer"]) as client:
            await client.create_run("hers")
            records = await client.submit([TASK, TASK], ids=["r1", "r2"], run="hers")
            groups = await client.submit([TASK], ids=["g1"], group_size=2, run="hers")
            await client.draw("hers", tasks=[TASK], id="d1")
        ids = {
            "run_id": ["hers", "default"],
            "rollout_id": [record.id for record in (*records, *groups)],
            "group_id": ["g1"],
            "draw_id": ["d1"],
            "token_id": listed,
            "name": ["default"],
        }
        document = requests.get(f"{served.url}/openapi.json", timeout=ANSWER_S).json()
        yield Target(served.url, served.process.pid, tokens, ids, document)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def cases(document: dict[str, Any], count: int, number: int) -> Iterator[Case]:
    """About `count` cases, the same for each number, spread over all operations; half of them are invalid."""
    schema = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    each = max(1, count // (2 * len(operations)))
    for operation, mode in itertools.product(operations, (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)):
        yield from _generate(operation.as_strategy(generation_mode=mode), each, number)


def _generate(strategy: SearchStrategy[Case], count: int, number: int) -> list[Case]:
    generated: list[Case] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]
    )
    @given(strategy)
    def make(case: Case) -> None:
        generated.append(case)

    make()
    return generated


def send(at: Target, count: int, number: int) -> Fuzzed:
    """Sends about `count` requests."""
    fuzzed, rng = Fuzzed(), random.Random(number)
    with requests.Session() as session:
        for place, case in enumerate(cases(at.document, count // len(at.tokens), number)):
            _name_what_is_there(case, at.ids, rng)
            strangers = {"nobody": None, "a stranger": "ryt_" + "x" * 43} if place % 10 == 0 else {}
            for scope, token in {**at.tokens, **strangers}.items():
                _send_one(session, at.url, case, scope, token, fuzzed)
    return fuzzed


def _name_what_is_there(case: Case, ids: Mapping[str, list[str]], rng: random.Random) -> None:
    """Replaces every second random id by that of an existing object, and sets waits to 0."""
    parameters: dict[str, Any] = dict(case.path_parameters or {})
    for name in parameters.keys() & ids.keys():
        if rng.random() < 0.5:
            parameters[name] = rng.choice(ids[name])
    case.path_parameters = parameters
    if case.operation.path in WAITING and not case.query:
        case.query = {"wait_s": 0.05}  # by default they wait as long as the answer may take
    for part in (case.query, case.body):
        if isinstance(part, dict):
            for name in part.keys() & {"wait_s", "timeout_s", "drain_s"}:
                part[name] = 0


def _send_one(session: requests.Session, url: str, case: Case, scope: str, token: str | None, fuzzed: Fuzzed) -> None:
    what = f"{case.method} {case.formatted_path} as {scope}"
    request: dict[str, Any] = case.as_transport_kwargs(base_url=url)
    headers = {key: value for key, value in dict(request.pop("headers", None) or {}).items() if _is_header(key, value)}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with session.request(**request, headers=headers, timeout=ANSWER_S, stream=True) as answer:
            if case.operation.path not in STREAMS:
                _ = answer.content
            status = answer.status_code
            text = "" if status < 500 else answer.text[:500]
    except requests.RequestException as error:
        fuzzed.wrong.append(f"{what}: {type(error).__name__}: {error}; sent {str(case.body)[:300]}")
        return
    fuzzed.sent += 1
    fuzzed.statuses[status] += 1
    if status >= 500 and '"engine_unavailable"' not in text:
        fuzzed.wrong.append(f"{what}: {status} {text}; sent {str(case.body)[:300]}")


def _is_header(name: str, value: str) -> bool:
    """Whether the client's library can send the header at all; raw bytes have their own test."""
    return name.lower() not in ("host", "content-length", "transfer-encoding") and value.isprintable()
