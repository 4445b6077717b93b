"""Every refusal of the API, over real HTTP: its status, code and message."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.service.site import OTHER, TRAINER, Site, open_site, task

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL_BYTES = 50_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site, None]:
    folder = tmp_path_factory.mktemp("refusals")
    async with open_site(folder, max_body_bytes=SMALL_BYTES, max_queued=3, hosts=["gpu1", "gpu2:9000"]) as opened:
        await opened.hold()
        yield opened


@pytest.mark.parametrize("token", ["", "wrong-token-wrong-token"])
@pytest.mark.parametrize("path", ["/v1/status", "/v1/rollouts/x", "/v1/nowhere", "/metrics"])
async def test_without_a_known_token_it_is_401(site: Site, path: str, token: str) -> None:
    answer = await site.get(path, token=token)
    assert (answer.status, answer.code) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/docs", "/openapi.json"])
async def test_health_checks_and_documentation_need_no_token(site: Site, path: str) -> None:
    assert (await site.get(path, token="")).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/engines"), ("DELETE", "/v1/engines"), ("DELETE", "/v1/engines/e1"), ("PATCH", "/v1/pools")],
)
async def test_a_trainers_token_is_refused_on_admin_calls(site: Site, method: str, path: str) -> None:
    answer = await site.call(method, path, token=TRAINER, json={"url": "http://127.0.0.1:1"})
    assert (answer.status, answer.code) == (403, "forbidden")


async def test_other_owners_runs_cannot_be_submitted_to_cancelled_or_rescored(site: Site) -> None:
    await site.post("/v1/runs", {"id": "someones"}, token=TRAINER)
    body = {"run": "someones", "id": "r1", "task": task()}
    assert (await site.post("/v1/rollouts", body, token=TRAINER)).status == 202
    refused = [
        await site.post("/v1/rollouts", {"run": "someones", "id": "r2", "task": task()}, token=OTHER),
        await site.call("DELETE", "/v1/rollouts/r1", token=OTHER),
        await site.post("/v1/rollouts/r1/rescore", None, token=OTHER),
    ]
    assert [(answer.status, answer.code) for answer in refused[::2]] == [(404, "not_found")] * 2
    assert refused[1].body["state"] == "cancelled_before_submit", "cancels a rollout of their own, if one is submitted"
    assert (await site.get("/v1/rollouts/r1")).body["state"] == "queued"
    assert (await site.call("GET", "/v1/rollouts/r2")).status == 404
    assert (await site.call("DELETE", "/v1/rollouts/r1", token=TRAINER)).status == 202
    assert (await site.call("DELETE", "/v1/rollouts/unknown", token=OTHER)).status == 202


async def test_a_run_is_deleted_and_acknowledged_only_by_its_owner_or_an_admin(site: Site) -> None:
    for run in ("mine", "theirs"):
        assert (await site.post("/v1/runs", {"id": run}, token=TRAINER)).status == 201
    answer = await site.delete("/v1/runs/mine", token=OTHER)
    assert (answer.status, answer.code) == (404, "not_found")
    answer = await site.post("/v1/runs/mine/ack", {"cursor": "e:0"}, token=OTHER)
    assert (answer.status, answer.code) == (404, "not_found"), "nor may another's traces be deleted"
    assert (await site.post("/v1/runs/mine/ack", {"cursor": "e:0"}, token=TRAINER)).status == 200
    await site.delete_run("mine", token=TRAINER)
    await site.delete_run("theirs")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "localhost", "localhost:1", "127.0.0.2:{port}", "gpu2:9001", "a:b"]
)
async def test_a_foreign_host_is_403(site: Site, host: str) -> None:
    port = site.url.rpartition(":")[2]
    answer = await site.get("/healthz", headers={"Host": host.format(port=port)})
    assert (answer.status, answer.code) == (403, "foreign_host")


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1:{port}", "gpu1", "GPU1:1234", "gpu2:9000"])
async def test_the_services_own_hosts_are_accepted(site: Site, host: str) -> None:
    port = site.url.rpartition(":")[2]
    assert (await site.get("/healthz", headers={"Host": host.format(port=port)})).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", ""])
async def test_another_pages_origin_is_403(site: Site, origin: str) -> None:
    answer = await site.get("/v1/status", headers={"Origin": origin})
    assert (answer.status, answer.code) == (403, "foreign_host")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/rollouts/none",
        "/v1/rollouts/none?wait_s=5",
        "/v1/rollouts/none/traces",
        "/v1/runs/none",
        "/v1/nowhere",
        "/nowhere",
    ],
)
async def test_unknown_ids_and_paths_are_404(site: Site, path: str) -> None:
    answer = await site.get(path)
    assert (answer.status, answer.code) == (404, "not_found")


async def test_other_unknown_ids_are_404(site: Site) -> None:
    answers = [
        await site.post("/v1/rollouts", {"run": "none", "task": task()}),
        await site.delete("/v1/engines/none"),
        await site.delete("/v1/runs/none"),
        await site.post("/v1/runs/none/ack", {"cursor": "e:0"}),
        await site.post("/v1/rollouts/none/rescore"),
    ]
    assert [(answer.status, answer.code) for answer in answers] == [(404, "not_found")] * len(answers)


async def test_an_unsupported_method_is_405(site: Site) -> None:
    answer = await site.call("PUT", "/v1/rollouts")
    assert (answer.status, answer.code) == (405, "request_error")
    assert "POST" in answer.headers["allow"] or "GET" in answer.headers["allow"]


async def test_an_id_with_another_body_is_409(site: Site) -> None:
    body: dict[str, Any] = {"id": "conflict", "task": task()}
    first = await site.post("/v1/rollouts", body)
    again = await site.post("/v1/rollouts", {"rollouts": [body]})
    assert (first.status, again.status) == (202, 202)
    assert first.body == again.body
    other = await site.post("/v1/rollouts", {**body, "task": task("something else")})
    assert (other.status, other.code) == (409, "id_conflict")
    await site.delete("/v1/rollouts/conflict")

    assert (await site.post("/v1/runs", {"id": "run-1", "seed": 1})).status == 201
    assert (await site.post("/v1/runs", {"id": "run-1", "seed": 1})).status == 200
    other = await site.post("/v1/runs", {"id": "run-1", "seed": 2})
    assert (other.status, other.code) == (409, "id_conflict")


async def chunks(count: int) -> AsyncGenerator[bytes, None]:
    for _ in range(count):
        yield b" " * 10_000


async def test_a_body_too_large_is_413_with_or_without_content_length(site: Site) -> None:
    declared = await site.post("/v1/rollouts", {"task": task("x" * SMALL_BYTES)})
    streamed = await site.call("POST", "/v1/rollouts", data=chunks(6))
    for answer in (declared, streamed):
        assert (answer.status, answer.code) == (413, "body_too_large")
        assert answer.body["limit_bytes"] == SMALL_BYTES
    within = await site.call("POST", "/v1/rollouts", data=chunks(5))
    assert (within.status, within.code) == (422, "invalid_request")


@pytest.mark.parametrize(
    ("body", "code", "detail"),
    [
        ({"task": task(environment="shel")}, "unknown_environment", "shel"),
        ({"task": task(agent={"name": "nativ"})}, "unknown_agent", "nativ"),
        ({"task": task(agent={"name": "mini-swe-agent"})}, "agent_missing", "is not installed on this machine"),
        ({"task": task(agent={"options": {"tools": ["saw"]}})}, "unknown_tool", "saw"),
        ({"task": task(data={"instruction": 3})}, "task_invalid", "instruction"),
        ({"task": task(limits={"run": 3})}, "invalid_request", "task.limits.run: "),
        ({"task": task(), "grup": "g"}, "invalid_request", "grup: "),
        ({"rollouts": [{"task": task()}, {"task": task(sampling={"top_p": 2})}]}, "invalid_request",
         "rollouts[1].task.sampling.top_p: "),
        ({"rollouts": [{"task": task(), "id": "no spaces"}]}, "malformed_id", "no spaces"),
        ({"task": task(), "id": ""}, "malformed_id", "''"),
        ({"task": task(), "group": "a/b"}, "malformed_id", "a/b"),
        ({"task": task(), "run": "a/b"}, "malformed_id", "a/b"),
        ({"task": task(), "id": 5}, "invalid_request", "id: "),
        ({"rollouts": []}, "invalid_request", "rollouts: "),
        ([], "invalid_request", ""),
    ],
)  # fmt: skip
async def test_an_invalid_submit_is_422(site: Site, body: Any, code: str, detail: str) -> None:
    answer = await site.post("/v1/rollouts", body)
    assert (answer.status, answer.code) == (422, code)
    assert detail in answer.body["detail"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b'{"task": NaN}', b'"\xff"', b"[" * 5000 + b"]" * 5000, b'{"task": {"a": "\\ud800"}}', b"{}x"]
)
async def test_a_body_that_is_not_json_is_422(site: Site, raw: bytes) -> None:
    answer = await site.call("POST", "/v1/rollouts", data=raw)
    assert (answer.status, answer.code) == (422, "invalid_request")


async def test_a_runtime_that_the_operator_does_not_allow_is_403(site: Site) -> None:
    answer = await site.post("/v1/rollouts", {"task": task(sandbox={"runtime": "bubblewrap"})})
    assert (answer.status, answer.code) == (403, "runtime_not_allowed")


async def test_an_image_outside_the_operators_folders_is_403(tmp_path: Path) -> None:
    images = tmp_path / "images"
    (images / "good").mkdir(parents=True)
    (images / "link").symlink_to("/")
    async with open_site(tmp_path / "site", images=[str(images)], runtimes=["bubblewrap"]) as site:
        await site.hold()
        for image in ("/", str(tmp_path), str(images / ".."), str(images / "link")):
            answer = await site.post("/v1/rollouts", {"task": task(sandbox={"image": image})}, token=TRAINER)
            assert (answer.status, answer.code) == (403, "runtime_not_allowed"), image
        good = await site.post("/v1/rollouts", {"task": task(sandbox={"image": str(images / "good")})})
        assert good.status == 202, good.body


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("stat=ended", "stat"),
        ("state=done", "state"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("wait_s=nan&state=ended", "wait_s"),
        ("wait_s=-1&state=ended", "wait_s"),
        ("wait_s=1", "wait_s"),
        ("state=ended&after=s:1", "cursor"),
        ("after=garbage", "cursor"),
    ],
)
async def test_an_invalid_query_is_422(site: Site, query: str, field: str) -> None:
    answer = await site.get(f"/v1/rollouts?{query}")
    assert (answer.status, answer.code) == (422, "invalid_request")
    assert field in answer.body["detail"]


async def test_malformed_ids_in_paths_are_422(site: Site) -> None:
    for method, path in [
        ("GET", "/v1/rollouts/-a"),
        ("DELETE", "/v1/rollouts/-a"),
        ("GET", "/v1/rollouts/-a/traces"),
        ("POST", "/v1/rollouts/-a/rescore"),
        ("GET", "/v1/runs/-a"),
        ("DELETE", "/v1/engines/-a"),
    ]:
        answer = await site.call(method, path)
        assert (answer.status, answer.code) == (422, "malformed_id"), path


async def test_a_full_queue_is_429_and_stores_nothing(site: Site) -> None:
    body = {"rollouts": [{"id": f"full-{n}", "task": task()} for n in range(4)]}
    answer = await site.post("/v1/rollouts", body)
    assert (answer.status, answer.code) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) > 0
    assert (await site.get("/v1/rollouts/full-0")).status == 404
    assert (await site.post("/v1/rollouts", {"rollouts": body["rollouts"][:3]})).status == 202
    for n in range(3):
        await site.delete(f"/v1/rollouts/full-{n}")


@pytest.mark.parametrize(
    "body",
    [{}, {"init": -1}, {"init": 1.5}, {"runn": 1}, {"init": 10**9}],
    ids=["none", "less", "half", "name", "more"],
)
async def test_invalid_pools_are_422(site: Site, body: dict[str, Any]) -> None:
    answer = await site.call("PATCH", "/v1/pools", json=body)
    assert (answer.status, answer.code) == (422, "invalid_request")


async def test_an_unexpected_error_is_500_without_details(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(**_: object) -> None:
        raise ZeroDivisionError("an internal secret")

    monkeypatch.setattr(type(site.served.app_state.store), "list", lambda self, **options: broken())
    answer = await site.get("/v1/rollouts")
    assert (answer.status, answer.code) == (500, "internal_error")
    assert "secret" not in json.dumps(answer.body)
    assert "an internal secret" in caplog.text


async def test_a_refusal_contains_the_path_of_the_invalid_task(site: Site) -> None:
    bodies = [{"task": task()}, {"task": task()}, {"task": task(environment="shel")}]
    answer = await site.post("/v1/rollouts", {"rollouts": bodies})
    assert (answer.status, answer.code) == (422, "unknown_environment")
    assert answer.body["path"] == "rollouts[2].task"


async def test_a_client_that_disconnects_during_its_body_causes_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_site(tmp_path) as site:
        host, _, port = site.url.removeprefix("http://").partition(":")
        for _ in range(3):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                f"POST /v1/rollouts HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {site.token}\r\n"
                "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{".encode()
            )
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.2)
        assert (await site.get("/healthz")).status == 200
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"mask_truncated": True, "trainable_on_deadline": True}, "set only one of them"),
        (
            {"mode": "eval", "overlong_penalty": {"from_tokens": 1, "to_tokens": 2}},
            "cannot be set for a run of mode eval",
        ),
        ({"overlong_penalty": {"from_tokens": 2, "to_tokens": 2}}, "less than to_tokens"),
        ({"overlong_penalty": {"from_tokens": -1, "to_tokens": 2}}, "0 or more"),
        ({"overlong_penalty": {"from_tokens": 1, "to_tokens": 2, "most": -1}}, "greater than 0"),
        ({"overlong_penalty": {"from_tokens": 1, "to_tokens": 2, "most": 1e7}}, "less than or equal"),
    ],
)
async def test_contradictory_settings_of_a_run_are_refused(site: Site, fields: dict[str, Any], wrong: str) -> None:
    answer = await site.post("/v1/runs", {"id": "odd", **fields})
    assert answer.status == 422 and wrong in str(answer.body), answer.body
