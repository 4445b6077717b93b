"""Dropped connections, a full queue, a restart: what is retried, what is not, and when the client gives up."""

import asyncio

import pytest
from aiohttp import web

from rollyard.client import AsyncClient, ServiceUnreachable, _transport
from rollyard.core.failure import InvalidRequest, QueueFull, StoreLost
from tests.client.served import Proxy, RunningService, served, task


async def test_a_submit_whose_response_was_lost_is_one_rollout(service: RunningService):
    async with Proxy(service.url) as proxy, AsyncClient(proxy.url, service.token) as client:
        proxy.cut_replies = 2
        records = await client.submit([task()])
        assert proxy.connections == 3
        async with AsyncClient(service.url, service.token) as direct:
            await direct.wait(records[0].id, timeout_s=30)
            assert [record.id for record in (await direct.list(state="ended")).rollouts] == [records[0].id]


async def test_a_call_without_an_id_is_not_sent_twice(service: RunningService):
    async with Proxy(service.url) as proxy, AsyncClient(proxy.url, service.token) as client:
        (record,) = await client.submit([task()])
        await client.wait(record.id, timeout_s=30)
    async with Proxy(service.url) as proxy, AsyncClient(proxy.url, service.token) as client:
        proxy.cut_replies = 1
        with pytest.raises(ServiceUnreachable, match="did not answer"):
            await client.rescore(record.id)
        assert proxy.connections == 1


async def test_an_unreachable_service_raises_at_once_without_retries(unused_tcp_port: int):
    async with AsyncClient(f"http://127.0.0.1:{unused_tcp_port}", "t", retry_s=0) as client:
        with pytest.raises(ServiceUnreachable, match="cannot connect to") as caught:
            await client.status()
    assert "rollyard serve" in caught.value.remedy
    for url in ("not a url", "127.0.0.1:8127", "ftp://host", "http://", "http://host:x", "http://[::1"):
        with pytest.raises(InvalidRequest, match=r"is not an? (HTTP )?URL"):
            AsyncClient(url, "t")


async def test_a_service_that_accepts_but_never_responds_times_out():
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.transport.abort()
        ended.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with AsyncClient(url, "t", timeout_s=0.1, retry_s=0) as client:
            with pytest.raises(ServiceUnreachable, match=r"did not answer GET /v1/status within 0.1 s"):
                await client.status()
        await asyncio.wait_for(ended.wait(), 20)


async def test_a_full_queue_is_retried_until_retry_s(tmp_path):
    async with served(tmp_path, max_queued=1) as service, AsyncClient(service.url, service.token) as client:
        await client.resize_pools(init=0)
        (first,) = await client.submit([task()])
        async with AsyncClient(service.url, service.token, retry_s=0) as hasty:
            with pytest.raises(QueueFull):
                await hasty.submit([task()])
        second = asyncio.create_task(client.submit([task()], ids=["second"]))
        await client.cancel(first.id)
        assert [record.id for record in await asyncio.wait_for(second, 30)] == ["second"]


async def test_a_client_survives_a_restart_of_the_service(tmp_path, unused_tcp_port: int):
    async with served(tmp_path, port=unused_tcp_port) as service:
        async with AsyncClient(service.url, service.token) as client:
            await client.resize_pools(init=0)
            (record,) = await client.submit([task()])
        patient = AsyncClient(service.url, service.token)
        await patient.__aenter__()
        waiting = asyncio.create_task(patient.wait_all([record.id]))
        await asyncio.sleep(0)
    async with served(tmp_path, port=unused_tcp_port):
        (ended,) = await asyncio.wait_for(waiting, 50)
        assert ended.reward == 1.0
        await patient.__aexit__(None, None, None)


async def test_events_continue_after_a_dropped_connection(service: RunningService):
    async with Proxy(service.url) as proxy, AsyncClient(proxy.url, service.token) as client:
        events = client.events()
        first = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
        while not proxy.connections:
            await asyncio.sleep(0)
        async with AsyncClient(service.url, service.token) as direct:
            (record,) = await direct.submit([task("NEVER")])
            async with asyncio.timeout(90):
                event = await first
                while event.state != "run":
                    event = await anext(events)
                proxy.break_all()
                await direct.cancel(record.id)
                while event.state != "ended":
                    event = await anext(events)
        assert (event.rollout, event.outcome) == (record.id, "cancelled")
        await events.aclose()  # type: ignore[attr-defined]


async def test_repeatable_calls_are_retried_after_a_lost_store_and_the_outage_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(_transport, "QUIET_S", 0.0)
    methods: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        methods.append(request.method)
        if len(methods) == 1:
            body = {"code": "store_lost", "detail": "it is away", "status": 503}
            return web.json_response(body, status=503, headers={"Retry-After": "0"})
        return web.json_response({"runs": []})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with AsyncClient(url, "t" * 16, retry_s=30) as client:
            assert list(await client.list_runs()) == [] and methods == ["GET", "GET"]
            assert [record.getMessage() for record in caplog.records if record.name == "rollyard.client"] == [
                f"it is away; trying again for 30 s. {StoreLost.remedy}",
                f"{url} answers again",
            ]
            methods.clear()
            with pytest.raises(StoreLost, match="it is away"):
                await client.rescore("r1")
            assert methods == ["POST"], "it may have taken effect, so it is not sent again"
    finally:
        await runner.cleanup()
