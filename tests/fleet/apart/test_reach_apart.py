"""Nodes on separate machines that cannot reach an engine, or lack its tokenizer: no rollout is lost."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollyard.testing.script import Reply
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.fleet.apart.networks import HERE, Machine, at_address, machines
from tests.fleet.fleet_site import ProcessNode, nodes_of, open_head
from tests.service.site import Site, engine_table, finish, scripted

WIDE = {"host": "0.0.0.0", "plain_http_nodes": True, "node_lease_s": 10}


@asynccontextmanager
async def node_at(machine: Machine, site: Site, folder: Path, name: str, *more: str) -> AsyncGenerator[ProcessNode]:
    port = urlsplit(site.url).port
    token = site.served.app_state.settings.node_token_path
    node = ProcessNode(f"http://{HERE}:{port}", token, folder, name, within=[*machine.within, *more], is_plain=True)
    try:
        await nodes_are(site, lambda nodes: name in nodes)
        yield node
    finally:
        node.close()


async def nodes_are(site: Site, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(90):
        while not is_so(nodes := await nodes_of(site)):
            await asyncio.sleep(0.05)
    return nodes


def reaches(name: str, is_reachable: bool) -> Callable[[dict[str, Any]], bool]:
    return lambda nodes: (nodes[name]["engines"].get("e1") or {}).get("is_reachable") is is_reachable


def wide_head(folder: Path, **values: Any) -> AbstractAsyncContextManager[Site]:
    token_file = folder / "admin-token"
    token_file.parent.mkdir(exist_ok=True)
    token_file.write_text("admin-token-of-the-tests")
    token_file.chmod(0o600)
    return open_head(folder, **{**WIDE, "admin_tokens": [f"@{token_file}"], "token_file": token_file, **values})


async def test_a_node_without_a_route_to_the_engine_loses_no_rollouts(tmp_path: Path) -> None:
    ids = [f"r{number}" for number in range(24)]
    with machines(2) as (first, second):
        async with (
            scripted(Reply(finish(), latency_s=0.5)) as engine,
            at_address(urlsplit(engine.url).port or 0) as url,
            wide_head(
                tmp_path, engines=[engine_table(engine, url=url)], max_attempts=1, engine_wait_s=3, node_lease_s=20
            ) as site,
            node_at(first, site, tmp_path, "n1"),
            node_at(second, site, tmp_path, "n2"),
        ):
            await nodes_are(site, lambda nodes: reaches("n1", True)(nodes) and reaches("n2", True)(nodes))
            await site.submit(*ids)
            await nodes_are(site, lambda nodes: nodes["n1"]["live"] > 0 and nodes["n2"]["live"] > 0)
            port = urlsplit(url).port or 0
            first.drop(HERE, port)
            records = [await site.ended(one) for one in ids]
            assert {record["outcome"] for record in records} == {"completed"}, [it["failure"] for it in records]
            assert {record["reward"] for record in records} == {1.0}
            lost = [lost for record in records for lost in record["lost"]]
            assert {it["node"] for it in lost} <= {"n1"} and {it["code"] for it in lost} <= {"engine_unavailable"}
            nodes = await nodes_are(site, reaches("n1", False))
            assert nodes["n1"]["state"] == "up" and nodes["n1"]["engines"]["e1"]["error"], nodes["n1"]
            await site.submit("later")
            assert (await site.ended("later"))["summary"]["node"] == "n2"
            first.let(HERE, port)
            await nodes_are(site, reaches("n1", True))


async def test_a_node_without_the_tokenizer_gets_it_from_the_head(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir(), folder)
    hide = f'mount -t tmpfs none {folder} && exec "$@"'
    with machines(1) as (machine,):
        async with (
            scripted() as engine,
            at_address(urlsplit(engine.url).port or 0) as url,
            wide_head(tmp_path, engines=[engine_table(engine, url=url, tokenizer=str(folder))]) as site,
            node_at(machine, site, tmp_path, "n1", "unshare", "--mount", "sh", "-c", hide, "sh") as node,
        ):
            await site.submit("r1")
            record = await site.ended("r1")
            assert (record["reward"], record["attempt"]) == (1.0, 1), record
            (cached,) = (node.folder / "tokenizers").iterdir()
            for name in ("tokenizer.json", "tokenizer_config.json"):
                assert (cached / name).read_bytes() == (folder / name).read_bytes()


async def test_an_engine_at_a_loopback_address_is_refused_or_gets_no_rollouts(tmp_path: Path) -> None:
    with machines(1) as (machine,):
        async with scripted() as engine:
            table = engine_table(engine)
            async with wide_head(tmp_path / "strict", engines=[{**table, "id": "e0"}]) as site:
                answer = await site.post("/v1/engines", table)
                assert (answer.status, answer.code) == (422, "invalid_request")
                assert "loopback_engines" in answer.body["detail"] and "every node reaches" in answer.body["detail"]
                status = (await site.get("/v1/status")).body
                assert "loopback" in status["refused_engines"]["e0"] and status["engines"] == []
            async with (
                wide_head(tmp_path, engines=[table], loopback_engines=True) as site,
                node_at(machine, site, tmp_path, "n1"),
            ):
                await site.submit("r1")
                await nodes_are(site, lambda nodes: bool((nodes["n1"]["engines"].get("e1") or {}).get("error")))
                async with asyncio.timeout(90):
                    while not (status := (await site.get("/v1/status")).body)["unserved_policies"]:
                        await asyncio.sleep(0.05)
                assert status["engines"][0]["is_loopback"] and status["states"]["queued"] == 1
                assert "node n1 cannot use e1" in status["unserved_policies"]["default"]
                async with at_address(urlsplit(engine.url).port or 0) as url:
                    assert (await site.delete("/v1/engines/e1")).status == 204
                    assert (await site.post("/v1/engines", {**table, "url": url})).status == 201
                    record = await site.ended("r1")
                    assert (record["reward"], record["attempt"], record["lost"]) == (1.0, 1, [])
