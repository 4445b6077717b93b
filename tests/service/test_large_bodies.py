"""Bodies whose cost would stop the service for everyone: they are refused, or read in pieces and in turns."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.arrow import _group
from rollyard.core import loop_yield
from rollyard.core.failure import InvalidRequest
from rollyard.core.loop_yield import LoopYield
from rollyard.service import json_body
from rollyard.service.schemas import requests
from rollyard.service.schemas import task as task_schema
from rollyard.service.schemas.body import check_body
from rollyard.service.schemas.draws import DrawBody
from rollyard.service.schemas.evals import EvalBody
from rollyard.service.schemas.group_pages import groups_page, json_page
from rollyard.service.schemas.records import encode
from rollyard.service.schemas.requests import RewardBody, SubmitBody
from tests.service.site import Site, open_site, task

Values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(value=Values, levels=st.integers(0, 3))
def test_reading_in_pieces_gives_what_one_call_gives(value: Any, levels: int) -> None:
    data = msgspec.json.encode(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "SMALL_BYTES", 1)
        assert json_body._in_pieces(data, levels) == msgspec.json.decode(data)  # pyright: ignore[reportPrivateUsage]


async def test_a_body_with_too_many_values_is_refused_for_every_route_and_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_body, "MOST_PIECE_VALUES", 12_000)
    monkeypatch.setattr(json_body, "MOST_VALUES", 60_000)
    values = b"[" + b",".join([b"[]"] * (json_body.MOST_PIECE_VALUES + 1)) + b"]"
    piece = b'{"task":{"environment":"shell","data":{"z":' + values + b"}}}"
    whole = b'{"tasks":[' + b",".join([values] * 6) + b"]}"
    async with open_site(tmp_path) as site:
        reader = (await site.post("/v1/tokens", {"access": "reader"})).body["token"]
        for path in ("/v1/rollouts", "/v1/tasks/check", "/v1/groups", "/v1/draws", "/v1/sessions", "/v1/engines"):
            answer = await site.call("POST", path, data=piece)
            assert answer.status in (403, 422), path
            if path != "/v1/engines":
                assert "a part of the body has more than" in answer.body["detail"], path
        for token in (reader, site.token):
            answer = await site.call("POST", "/v1/tasks/check", data=whole, token=token)
            assert answer.code == "invalid_request" and "send it in several calls" in answer.body["detail"]


async def test_a_large_body_is_decoded_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    decode = json_body.decode

    def watched(data: bytes) -> object:
        threads.append(threading.current_thread().name)
        return decode(data)

    monkeypatch.setattr(json_body, "decode", watched)
    async with open_site(tmp_path) as site:
        answer = await site.post("/v1/tasks/check", {"tasks": [task("x" * json_body.SMALL_BYTES)] * 3})
        assert (answer.status, answer.body["bad"]) == (200, 0)
    assert threads and threading.main_thread().name not in threads


def test_the_errors_of_a_body_are_few_however_wrong_it_is() -> None:
    for body, model in (
        ({"rollouts": [1] * 100_000}, SubmitBody),
        ({"task": {}, **dict.fromkeys(map(str, range(100_000)), 1)}, requests.SingleBody),
        ({"source": {"tasks": [1] * 100_000}}, DrawBody),
        ({"source": {"push": True, "options": dict.fromkeys(map(str, range(100_000)), 1)}}, DrawBody),
        ({"reward": 1.0, "metrics": dict.fromkeys(map(str, range(100_000)), "x")}, RewardBody),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check_body(body, model)
        assert len(caught.value.data["fields"]) == 1, model  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [{"tasks": [{"a": 1}]}, {"tasks": None, "push": True}, {"environment": "e"}])
def test_the_identity_of_a_source_is_what_was_sent(source: dict[str, Any]) -> None:
    for model in (DrawBody, EvalBody):
        body = {"id": "x", "run": "r", "source": source, "seed": 1}
        if model is EvalBody and "push" in source:
            continue
        checked = check_body(body, model)
        assert checked.identity() == checked.model_dump(exclude_unset=True, exclude={"id"})  # type: ignore[attr-defined]


async def _call(site: Site, path: str, body: Any) -> None:
    answer = await site.post(path, body)
    assert answer.status in (200, 201, 202), answer.body


async def test_other_work_continues_between_two_tasks_of_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = LoopYield.step

    async def counted(self: LoopYield) -> None:
        nonlocal steps
        steps += 1
        await step(self)

    monkeypatch.setattr(LoopYield, "step", counted)
    async with open_site(tmp_path) as site:
        await site.hold()
        for path, body in (
            ("/v1/rollouts", {"rollouts": [{"task": task()} for _ in range(5)]}),
            ("/v1/tasks/check", {"tasks": [task()] * 5}),
            ("/v1/groups", {"groups": [{"task": task(), "size": 1} for _ in range(5)]}),
            ("/v1/draws", {"source": {"tasks": [task()] * 5}, "group_size": 1}),
        ):
            steps = 0
            await _call(site, path, body)
            assert steps >= (5 if "check" in path or "draws" in path else 10), path  # once more when they are encoded
        await _call(site, "/v1/draws", {"id": "p", "source": {"push": True}, "group_size": 1})
        steps = 0
        await _call(site, "/v1/draws/p/tasks", {"tasks": [task()] * 5})
        assert steps >= 5


async def test_a_runs_defaults_cannot_make_a_small_call_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_schema, "MOST_DEFAULTS_BYTES", 2000)
    monkeypatch.setattr(task_schema, "MOST_MERGED_BYTES", 3000)
    async with open_site(tmp_path) as site:
        await site.hold()
        large = {"data": {"setup": ["x" * 2000]}}
        assert (await site.post("/v1/runs", {"id": "r", "defaults": large})).code == "invalid_request"
        answer = await site.post("/v1/evals", {"source": {"tasks": [task()]}, "defaults": large})
        assert answer.code == "invalid_request" and "defaults: " in answer.body["detail"]
        fits = {"data": {"setup": ["x" * 1000]}}
        assert len(json.dumps(fits)) < 1500
        await _call(site, "/v1/runs", {"id": "r", "defaults": fits})
        for path, name, one in (
            ("/v1/rollouts", "rollouts", {"task": task()}),
            ("/v1/tasks/check", "tasks", task()),
            ("/v1/groups", "groups", {"task": task(), "size": 1}),
        ):
            await _call(site, path, {"run": "r", name: [one] * 2})
            answer = await site.post(path, {"run": "r", name: [one] * 3})
            assert answer.code == "invalid_request" and "at most 2 tasks in one call" in answer.body["detail"], path


async def test_the_loop_runs_while_a_page_of_groups_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_yield, "AFTER_S", 0.0)
    groups, turns = [_group(1), _group(2)], 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    page = await json_page(groups, "d:2", None, with_traces=True)
    counting.cancel()
    assert turns >= sum(len(group.rollouts) for group in groups)
    assert page == encode(groups_page(groups, "d:2", None))
