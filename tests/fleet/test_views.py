"""What people see of a rollout while a node runs it: its messages and its calls, asked of the node on demand."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollyard.core import State
from rollyard.fleet import view_sender, views
from rollyard.fleet.messages import Key, Lease, Moved, Orders, View, ViewRequest, encode
from rollyard.fleet.views import IN_ALL, MOST_VIEW_BYTES, PER_NODE, RATE_BYTES, NodeViews, ViewPace
from rollyard.pipeline.message_page import PAGE_BYTES
from rollyard.testing.script import Reply
from tests.agents.harness_parts import PROGRAM, call
from tests.fleet.fleet_site import loop_node, node_token, nodes_of, open_head, until
from tests.fleet.test_head import Hand
from tests.service.site import OTHER, Site, engine_table, finish, scripted, shell, task

Body = dict[str, Any]


async def read(site: Site, query: str = "") -> Body:
    answer = await site.get(f"/v1/rollouts/r1/messages{query}")
    assert answer.status == 200, answer.body
    return answer.body


async def parts(site: Site) -> list[Body]:
    answer = await site.get("/v1/rollouts/r1/timeline")
    assert answer.status == 200, answer.body
    return answer.body["attempts"][-1]["parts"]


async def seen(site: Site, is_there: Callable[[Body], bool]) -> Body:
    """Reads the messages until they are as expected."""
    async with asyncio.timeout(90):
        while not is_there(body := await read(site)):
            await asyncio.sleep(0.02)
    return body


def roles(body: Body) -> list[str]:
    return [message["role"] for message in body["messages"]]


def waits_for(flag: Path) -> str:
    return shell(f"until [ -e {flag} ]; do sleep 0.05; done; echo {flag.name} is there")


# --- a real node ----------------------------------------------------------------------------------------


async def test_messages_and_calls_of_a_nodes_rollout_are_visible_and_grow(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    async with (
        scripted(waits_for(one), waits_for(two), finish()) as engine,
        open_head(tmp_path, engines=[engine_table(engine)]) as site,
        loop_node(site, tmp_path, "n1"),
    ):
        await site.submit("r1")
        first = await seen(site, lambda body: roles(body)[-1:] == ["assistant"])
        assert (first["state"], first["attempt"], first["turns"], first["available"]) == ("run", 1, 1, True)
        assert first["sampled_tokens"] > 0 and first["next"] == len(first["messages"])
        async with asyncio.timeout(90):
            while "tool" not in (kinds := {part["kind"]: part for part in await parts(site)}):
                await asyncio.sleep(0.02)
        assert kinds["model"]["end_s"] is not None and kinds["model"]["name"] == "e1"
        assert kinds["tool"]["end_s"] is None and kinds["tool"]["start_s"] >= kinds["run"]["start_s"]

        one.touch()
        second = await seen(site, lambda body: roles(body).count("assistant") == 2)
        assert second["messages"][: first["next"]] == first["messages"]
        rest = await read(site, f"?after={first['next']}")
        assert rest["messages"] == second["messages"][first["next"] :] and rest["next"] == second["next"]
        assert "one is there" in rest["messages"][0]["content"]
        beyond = await read(site, "?after=1000")
        assert (beyond["messages"], beyond["next"], beyond["available"]) == ([], second["next"], True)

        two.touch()
        record = await site.ended("r1")
        assert (record["reward"], record["attempt"], record["summary"]["node"]) == (1.0, 1, "n1")
        stored = (await site.get("/v1/rollouts/r1?include=trajectory")).body["trajectory"]["messages"]
        assert stored[: second["next"]] == second["messages"] and (await read(site))["messages"] == stored


async def test_an_agent_programs_requests_are_visible_while_a_node_runs_it(tmp_path: Path) -> None:
    options = {"command": ["python3", "-c", PROGRAM, "{{instruction}}"], "env": {"BASE_URL": "{{base_url}}"}}
    async with (
        scripted(call("sh", command="echo hello"), Reply("never", stall_after=0)) as engine,
        open_head(tmp_path, engines=[engine_table(engine)], runtimes=["bubblewrap"]) as site,
        loop_node(site, tmp_path, "n1"),
    ):
        body = {"id": "r1", "task": task(agent={"name": "command", "options": options})}
        assert (await site.post("/v1/rollouts", {"rollouts": [body]})).status == 202
        before = (await site.get("/v1/rollouts/r1/requests")).body
        assert before == {"requests": [], "dropped": 0, "is_complete": False}
        async with asyncio.timeout(90):
            while len((shown := (await site.get("/v1/rollouts/r1/requests")).body)["requests"]) < 2:
                await asyncio.sleep(0.02)
        assert (await read(site))["state"] == "run" and shown["is_complete"]
        first, second = shown["requests"]
        assert first["new_messages"] == [{"role": "user", "content": "do it"}]
        assert [message["role"] for message in second["new_messages"]] == ["assistant", "tool"]
        await site.delete("/v1/rollouts/r1")  # the engine never ends its second reply
        await site.ended("r1")


async def test_a_node_whose_network_is_down_shows_nothing_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "flag"
    async with (
        scripted(waits_for(flag), finish()) as engine,
        open_head(tmp_path, engines=[engine_table(engine)], node_lease_s=60) as site,
        loop_node(site, tmp_path, "n1") as node,
    ):
        await site.submit("r1")
        await seen(site, lambda body: roles(body)[-1:] == ["assistant"])
        node.is_cut = True
        monkeypatch.setattr(views, "VIEW_S", 0.2)
        hidden = await read(site)
        assert (hidden["state"], hidden["messages"], hidden["available"]) == ("run", [], False)
        assert {"run"} <= {part["kind"] for part in await parts(site)}
        node.is_cut = False
        monkeypatch.setattr(views, "VIEW_S", 30.0)
        await seen(site, lambda body: roles(body)[-1:] == ["assistant"])
        flag.touch()
        assert (await site.ended("r1"))["attempt"] == 1


async def test_a_view_that_cannot_be_made_does_not_end_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "flag"

    def broken(_: object) -> bytes:
        raise ValueError("broken")

    monkeypatch.setattr(view_sender, "_calls", broken)
    monkeypatch.setattr(views, "VIEW_S", 0.5)
    async with (
        scripted(waits_for(flag), finish()) as engine,
        open_head(tmp_path, engines=[engine_table(engine)]) as site,
        loop_node(site, tmp_path, "n1"),
    ):
        await site.submit("r1")
        await seen(site, lambda body: roles(body)[-1:] == ["assistant"])
        assert "model" not in [part["kind"] for part in await parts(site)]
        flag.touch()
        record = await site.ended("r1")
        assert (record["attempt"], record["reward"]) == (1, 1.0)
        assert "model" in [part["kind"] for part in await parts(site)], "the record has the calls"


# --- a node whose messages the test sends ---------------------------------------------------------------


@asynccontextmanager
async def running(folder: Path, *, sends_views: bool = True) -> AsyncGenerator[tuple[Site, Hand, Key], None]:
    """A hand runs r1, and has confirmed all orders."""
    async with (
        scripted() as engine,
        open_head(folder, engines=[engine_table(engine)], node_lease_s=600) as site,
    ):
        hand = Hand(site.served.app_state.head)
        hand.join(sends_views=sends_views)
        await site.submit("r1")
        (key,) = await hand.leased(1)
        assert (await read(site))["available"], "before RUN there are no messages anywhere"
        await hand.send_report(Moved(key, State.RUN))
        await assert_not_asked(hand)  # no client reads
        yield site, hand, key


async def assert_not_asked(hand: Hand) -> None:
    for _ in range(2):
        orders = await hand.poll(wait_s=0.3)
        hand.got = orders.number
        assert orders.views == []


async def asked(hand: Hand) -> list[ViewRequest]:
    """Polls until the head asks for something."""
    async with asyncio.timeout(90):
        while not (orders := await hand.poll()).views:
            hand.got = orders.number
    hand.got = orders.number
    return orders.views


async def test_readers_of_the_same_share_one_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "VIEW_S", 60.0)
    async with running(tmp_path) as (site, hand, key):
        reading = [asyncio.create_task(read(site, "?after=1")) for _ in range(3)]
        (request,) = await asked(hand)
        assert (request.key, request.after) == (key, 1)
        await assert_not_asked(hand)  # again
        page = b'[{"role":"user","content":"x"}]'
        site.served.app_state.head.view(View("hand", request.id, 3, 40, page, 2))
        for body in await asyncio.gather(*reading):
            assert body["messages"] == [{"role": "user", "content": "x"}] and body["available"]
            assert (body["next"], body["turns"], body["sampled_tokens"], body["attempt"]) == (2, 3, 40, 1)


async def test_a_node_that_does_not_answer_delays_its_reader_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "VIEW_S", 0.3)
    async with running(tmp_path) as (site, hand, _):
        reading = asyncio.create_task(read(site))
        (request,) = await asked(hand)
        body = await reading
        assert (body["state"], body["messages"], body["next"], body["available"]) == ("run", [], 0, False)
        site.served.app_state.head.view(View("hand", request.id, 1, 1, b'["late"]', 1))
        assert (await read(site))["messages"] == [], "a late view is dropped"
        assert [part["kind"] for part in await parts(site)][-1] == "run"
        assert (await nodes_of(site))["hand"]["live"] == 1


async def test_an_older_node_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "VIEW_S", 600.0)
    async with running(tmp_path, sends_views=False) as (site, hand, _):
        assert not (await read(site))["available"] and await parts(site)
        await assert_not_asked(hand)


def test_an_older_node_reads_orders_that_ask_for_views() -> None:
    class OlderOrders(msgspec.Struct, frozen=True):
        number: int
        leases: list[Lease] = []

    data = encode(Orders(7, views=[ViewRequest("v", Key("r1", 1), 0)]))
    assert msgspec.msgpack.decode(data, type=OlderOrders) == OlderOrders(7)


async def test_readers_of_a_node_that_dies_are_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "VIEW_S", 600.0)
    async with running(tmp_path) as (site, hand, _):
        queries = ("?after=0", "?after=1", "?after=2")  # the last waits for a slot
        reading = [asyncio.create_task(read(site, query)) for query in queries]
        timeline = asyncio.create_task(parts(site))
        await asked(hand)
        nodes = site.served.app_state.head.nodes
        nodes.mark_lost(nodes.named("hand"), "was killed")
        async with asyncio.timeout(90):
            for body in await asyncio.gather(*reading):
                assert body["messages"] == []
            await timeline
            await until(site)
            await seen(site, lambda body: body["state"] == "queued")


async def test_who_may_not_read_a_rollout_makes_the_head_ask_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (site, hand, _):
        for path in ("messages", "timeline"):
            assert (await site.get(f"/v1/rollouts/r1/{path}", token=OTHER)).code == "not_found"
            assert (await site.get(f"/v1/rollouts/r1/{path}", token=node_token(site))).code == "forbidden"
        await assert_not_asked(hand)
        view = encode(View("hand", "v"))
        assert (await site.call("POST", "/v1/fleet/view", data=view, token=OTHER)).code == "forbidden"


async def test_the_head_takes_no_view_above_the_bound_or_of_an_unknown_node(tmp_path: Path) -> None:
    async with running(tmp_path) as (site, _, _):
        token = node_token(site)
        large = encode(View("hand", "v", messages=b" " * MOST_VIEW_BYTES))
        assert (await site.call("POST", "/v1/fleet/view", data=large, token=token)).status == 413
        page = encode(View("hand", "v", messages=b" " * PAGE_BYTES))
        assert (await site.call("POST", "/v1/fleet/view", data=page, token=token)).status == 200
        stranger = encode(View("other", "v"))
        assert (await site.call("POST", "/v1/fleet/view", data=stranger, token=token)).code == "node_unknown"


# --- bounds ---------------------------------------------------------------------------------------------


def node_views(pace: ViewPace) -> tuple[NodeViews, asyncio.Event]:
    news = asyncio.Event()
    return NodeViews(pace, news, is_supported=True), news


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_few_views_are_awaited_of_a_node_and_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "VIEW_S", 600.0)
    pace = ViewPace()
    nodes = [node_views(pace)[0] for _ in range(IN_ALL)]
    reading = [asyncio.create_task(one.ask(Key("r", 1), after)) for one in nodes for after in range(2 * PER_NODE)]
    await turns()
    requests = [one.take() for one in nodes]
    assert max(map(len, requests)) == PER_NODE and sum(map(len, requests)) == IN_ALL
    for one, sent in zip(nodes, requests, strict=True):
        for request in sent:
            one.receive(View("n", request.id))
    await turns()
    assert sum(task.done() for task in reading) == IN_ALL
    for one in nodes:
        one.close()
    answered = {view.id for view in await asyncio.gather(*reading) if view is not None}
    assert answered == {request.id for sent in requests for request in sent}


async def test_views_wait_while_the_rate_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    pace = ViewPace(clock=lambda: now)
    one, news = node_views(pace)
    pace.spend(60 * RATE_BYTES)
    monkeypatch.setattr(views, "VIEW_S", 0.05)
    assert await one.ask(Key("r", 1), 0) is None
    assert one.take() == [] and not news.is_set(), "nothing was sent"
    now += 61.0
    monkeypatch.setattr(views, "VIEW_S", 600.0)
    reading = asyncio.create_task(one.ask(Key("r", 1), 0))
    async with asyncio.timeout(90):
        await news.wait()
    (request,) = one.take()
    one.receive(View("n", request.id))
    assert await reading == View("n", request.id)


async def test_a_cancelled_reader_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "VIEW_S", 600.0)
    one, _ = node_views(ViewPace())
    first, second = (asyncio.create_task(one.ask(Key("r", 1), 0)) for _ in range(2))
    await turns()
    first.cancel()
    assert await second is None
    assert one.take() == []
    third = asyncio.create_task(one.ask(Key("r", 1), 0))
    await turns()
    (request,) = one.take()
    one.receive(View("n", request.id))
    assert await third == View("n", request.id)


def test_a_log_of_calls_has_a_bound() -> None:
    rows = [["tool", turn, 1.5, None, "x" * 100, 0] for turn in range(2000)]
    sent = view_sender._calls({"calls": rows, "calls_dropped": 3, "evidence": "x" * 100_000_000})
    assert msgspec.json.decode(sent) == {"calls": rows, "calls_dropped": 3}
    hostile = [["tool", turn, 1.5, None, "\x01" * 100, 0] for turn in range(2000)]
    assert view_sender._calls({"calls": hostile}) == b"{}"
