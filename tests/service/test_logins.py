"""Sign-ins of the dashboard: codes, cookies and page keys, at a real service."""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollyard.core.access import Access, LoginRecord, TokenRecord
from rollyard.core.failure import Forbidden, Unauthorized
from rollyard.service import sse
from rollyard.service.security import logins
from rollyard.service.security.logins import Logins, read_cookie
from rollyard.service.security.tokens import Tokens, new_token
from tests.service.site import TRAINER, Answer, Site, open_site, task
from tests.worker import free_port

ADMIN = "an-admin-token-of-these-tests"


@dataclass
class Browser:
    """A page that is signed in: its cookie and its key."""

    site: Site
    cookie: str
    page_key: str
    signed_in: Answer

    async def call(self, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any) -> Answer:
        own = {"Cookie": self.cookie, "X-Rollyard-Page": self.page_key, **(headers or {})}
        return await self.site.call(method, path, token="", headers=own, **options)

    async def get(self, path: str = "/v1/login", **options: Any) -> Answer:
        return await self.call("GET", path, **options)


async def sign_in(site: Site, **body: str) -> Browser:
    answer = await site.post("/v1/login", body, token="")
    assert answer.status == 200, answer.body
    return Browser(site, answer.headers["set-cookie"].split(";")[0], answer.body["page_key"], answer)


async def create(site: Site, access: str, **fields: Any) -> tuple[str, str]:
    answer = await site.post("/v1/tokens", {"access": access, **fields})
    assert answer.status == 201, answer.body
    return answer.body["id"], answer.body["token"]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site, None]:
    async with open_site(tmp_path) as running:
        yield running


def refused(answer: Answer, status: int, text: str) -> bool:
    return (
        answer.status == status
        and answer.code == {401: "unauthorized", 403: "forbidden"}[status]
        and (text in answer.body["detail"])
    )


# --- getting in ---------------------------------------------------------------------------------------


async def test_a_code_signs_in_once_as_the_token_that_created_it(site: Site) -> None:
    for token, access in ((site.token, "admin"), (TRAINER, "trainer")):
        created = await site.post("/v1/login/codes", token=token)
        assert (created.status, created.body["expires_s"]) == (201, 900)
        browser = await sign_in(site, code=created.body["code"])
        who = await browser.get()
        assert (who.status, who.body["access"]) == (200, access)
        assert who.body["name"] == (await site.get("/v1/login", token=token)).body["name"]
        assert 43_000 < who.body["expires_at"] - time.time() <= 43_200
        again = await site.post("/v1/login", {"code": created.body["code"]}, token="")
        assert refused(again, 401, "this link has been used or has expired")
        assert "rollyard open" in again.body["remedy"] and "set-cookie" not in again.headers


async def test_an_expired_code_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logins, "CODE_S", 0.0)
    code = (await site.post("/v1/login/codes")).body["code"]
    assert refused(await site.post("/v1/login", {"code": code}, token=""), 401, "has expired")


async def test_a_token_signs_in_unless_it_is_a_nodes(site: Site) -> None:
    browser = await sign_in(site, token=TRAINER)
    assert (browser.signed_in.body["access"], (await browser.get("/v1/runs")).status) == ("trainer", 200)
    _, node = await create(site, "node")
    answer = await site.post("/v1/login", {"token": node}, token="")
    assert refused(answer, 403, "a node's token cannot sign in") and "set-cookie" not in answer.headers
    for token in ("", "wrong", "x" * 64):
        answer = await site.post("/v1/login", {"token": token}, token="")
        assert answer.status == 401 and "set-cookie" not in answer.headers
        assert "rollyard access create reader" in answer.body["remedy"] and "--token" not in answer.body["remedy"]


@pytest.mark.parametrize(
    "body", [{}, {"code": "a", "token": "b"}, {"code": 1}, {"user": "me"}, [], None, {"code": None}]
)
async def test_a_malformed_sign_in_is_refused(site: Site, body: Any) -> None:
    answer = await site.post("/v1/login", body, token="")
    assert answer.status in (400, 422) and "set-cookie" not in answer.headers
    assert (await site.post("/v1/login", {"code": "wrong"}, token="")).status == 401


async def test_a_caller_without_a_token_cannot_send_a_large_body(site: Site) -> None:
    answer = await site.post("/v1/login", {"token": "x" * 17_000}, token="")
    assert (answer.status, answer.code) == (413, "body_too_large")


async def test_off_loopback_there_are_no_codes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "token").write_text(f"{ADMIN}\n")
    async with open_site(tmp_path, host="0.0.0.0", admin_tokens=[ADMIN]) as site:
        assert refused(await site.post("/v1/login/codes"), 403, "sign in with a token")
        browser = await sign_in(site, token=ADMIN)
        assert (await browser.get()).body["access"] == "admin"


async def test_a_sign_in_cannot_create_another(site: Site) -> None:
    browser = await sign_in(site, token=site.token)
    assert refused(await browser.call("POST", "/v1/login/codes"), 403, "this call needs a token")


# --- the cookie and the page's key ----------------------------------------------------------------------


async def test_the_cookie_is_closed_to_scripts_other_sites_and_other_services(site: Site) -> None:
    browser = await sign_in(site, token=site.token)
    port = site.url.rpartition(":")[2]
    name, *attributes = browser.signed_in.headers["set-cookie"].split("; ")
    assert name.startswith(f"rollyard_login_{port}=") and len(name.partition("=")[2]) >= 43
    assert attributes == ["Path=/v1", "Max-Age=43200", "HttpOnly", "SameSite=Strict"]
    behind_a_proxy = await site.post(
        "/v1/login", {"token": site.token}, token="", headers={"Origin": f"https://127.0.0.1:{port}"}
    )
    assert behind_a_proxy.headers["set-cookie"].endswith("; SameSite=Strict; Secure")


async def test_under_tls_the_cookie_is_secure_and_pages_of_http_are_foreign(tmp_path: Path) -> None:
    async with open_site(tmp_path, tls="own", data_dir=tmp_path / "data") as site:
        site.url = site.url.partition("#")[0]
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        options: dict[str, Any] = {"token": "", "ssl": trusting}
        answer = await site.post("/v1/login", {"token": site.token}, **options)
        assert answer.headers["set-cookie"].endswith("; SameSite=Strict; Secure")
        own = {"Origin": site.url}
        assert (await site.post("/v1/login", {"token": site.token}, **options, headers=own)).status == 200
        plain = {"Origin": site.url.replace("https://", "http://")}
        refusal = await site.post("/v1/login", {"token": site.token}, **options, headers=plain)
        assert (refusal.status, refusal.code) == (403, "foreign_host")


async def test_a_cookie_alone_is_not_accepted(site: Site) -> None:
    """Another program on the machine that receives the cookie does not have the page's key."""
    browser = await sign_in(site, token=site.token)
    assert (await browser.get()).status == 200
    only_cookie = await site.get("/v1/login", token="", headers={"Cookie": browser.cookie})
    assert refused(only_cookie, 401, "needs a bearer token")
    for key in ("", "1", "none", browser.page_key[:-1], browser.page_key + "x", browser.cookie.partition("=")[2]):
        assert refused(await browser.get(headers={"X-Rollyard-Page": key}), 401, "this sign-in has ended")
    only_key = await site.get("/v1/login", token="", headers={"X-Rollyard-Page": browser.page_key})
    assert refused(only_key, 401, "this page is not signed in")
    other = await sign_in(site, token=site.token)
    assert (await other.get(headers={"X-Rollyard-Page": browser.page_key})).status == 401, (
        "each sign-in has its own key"
    )


async def test_a_token_beside_a_cookie_decides(site: Site) -> None:
    browser = await sign_in(site, token=site.token)
    bearer = {"Authorization": f"Bearer {TRAINER}"}
    assert (await browser.get(headers=bearer)).body["access"] == "trainer"
    assert (await browser.get(headers={"Authorization": "Bearer wrong"})).status == 401


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("", None),
        ("rollyard_login_1", ""),
        ("rollyard_login_1=abc", "abc"),
        ('a={"json": 1}; b; =; ;;rollyard_login_1=abc; x="', "abc"),
        ("rollyard_login_10=no; xrollyard_login_1=no", None),
        ("rollyard_login_1=first; rollyard_login_1=second", "first"),
    ],
)
def test_cookies_of_other_programs_do_not_matter(header: str, value: str | None) -> None:
    assert read_cookie(header, "rollyard_login_1") == value


# --- other origins --------------------------------------------------------------------------------------

FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "http://127.0.0.1:1"},  # another port of this host: the same site, which gets the cookie
    {"Origin": "http://127.0.0.1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


async def test_pages_of_other_origins_are_refused_with_and_without_the_cookie(site: Site) -> None:
    browser = await sign_in(site, token=site.token)
    for headers in FOREIGN:
        for method, path in (("GET", "/v1/runs"), ("POST", "/v1/runs"), ("GET", "/metrics"), ("POST", "/v1/login")):
            for call in (browser.call, site.call):
                answer = await call(method, path, headers=headers, json={} if method == "POST" else None)
                assert (answer.status, answer.code) == (403, "foreign_host"), (headers, method, path)
    assert (await site.get("/v1/runs")).body["runs"] == []


async def test_the_own_page_is_accepted(site: Site) -> None:
    browser = await sign_in(site, token=site.token)
    port = site.url.rpartition(":")[2]
    for headers in (
        {"Origin": site.url, "Sec-Fetch-Site": "same-origin"},
        {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}"},
        {"Sec-Fetch-Site": "none"},
    ):
        answer = await browser.call("POST", "/v1/runs", headers=headers, json={"id": "mine"})
        assert answer.status in (200, 201), answer.body
        assert (await browser.get("/v1/runs", headers=headers)).status == 200


# --- the end of a sign-in ---------------------------------------------------------------------------------


async def test_signing_out_is_final(tmp_path: Path) -> None:
    async with open_site(tmp_path, port=free_port()) as site:
        browser, other = await sign_in(site, token=site.token), await sign_in(site, token=site.token)
        answer = await browser.call("DELETE", "/v1/login")
        assert answer.status == 204
        assert answer.headers["set-cookie"].split("; ")[1:3] == ["Path=/v1", "Max-Age=0"]
        assert refused(await browser.get(), 401, "this sign-in has ended")
        assert refused(await browser.call("DELETE", "/v1/login"), 401, "this sign-in has ended")
        assert (await other.get()).status == 200, "another browser stays signed in"
        assert (await site.delete("/v1/login")).status == 422, "a token has no sign-in"
    async with open_site(tmp_path, port=int(site.url.rpartition(":")[2])) as again:
        browser.site = other.site = again
        assert ((await browser.get()).status, (await other.get()).status) == (401, 200)


async def test_a_stream_of_events_ends_with_its_sign_in(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    browser = await sign_in(site, token=site.token)
    headers = {"Cookie": browser.cookie, "X-Rollyard-Page": browser.page_key}
    async with asyncio.timeout(90), site.http.get(f"{site.url}/v1/events", headers=headers) as reply:
        assert reply.status == 200
        assert (await browser.call("DELETE", "/v1/login")).status == 204
        assert b"data:" not in await reply.content.read()


async def test_a_sign_in_survives_a_restart_and_is_stored_as_a_digest(tmp_path: Path) -> None:
    async with open_site(tmp_path, port=free_port()) as site:
        browser = await sign_in(site, token=TRAINER)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "data").glob("rollyard.db*"))
    for secret in (browser.cookie.partition("=")[2], browser.page_key):
        assert secret.encode() not in stored
    async with open_site(tmp_path, port=int(site.url.rpartition(":")[2])) as again:
        browser.site = again
        assert (await browser.get()).body["access"] == "trainer"
    async with open_site(tmp_path, port=int(site.url.rpartition(":")[2]), trainer_tokens=[]) as again:
        browser.site = again
        assert refused(await browser.get(), 401, "the token of this sign-in is no longer valid")


async def test_a_sign_in_expires(tmp_path: Path) -> None:
    async with open_site(tmp_path, login_s=0.05) as site:
        browser = await sign_in(site, token=site.token)
        await asyncio.sleep(max(0.0, browser.signed_in.body["expires_at"] - time.time()))
        assert refused(await browser.get(), 401, "this sign-in has ended")
        await sign_in(site, token=site.token)
        assert len(await site.served.app_state.store.logins()) == 1, "expired ones are deleted"


async def test_a_sign_in_ends_with_its_token(site: Site) -> None:
    """A rotation ends the sign-ins too: a program that had the old secret may have signed in with it."""
    for end in ("DELETE /v1/tokens/{}", "POST /v1/tokens/{}/rotate"):
        id, token = await create(site, "reader")
        browser = await sign_in(site, token=token)
        code = (await site.post("/v1/login/codes", token=token)).body["code"]
        assert (await browser.get("/v1/runs")).status == 200
        method, _, path = end.partition(" ")
        ended = await site.call(method, path.format(id), json={} if method == "POST" else None)
        assert ended.status in (200, 204), ended.body
        assert refused(await browser.get("/v1/runs"), 401, "the token of this sign-in is no longer valid")
        assert (await site.post("/v1/login", {"code": code}, token="")).status == 401
        if method == "POST":
            assert (await sign_in(site, token=ended.body["token"])).signed_in.body["name"] == id


async def test_a_sign_in_does_not_outlive_its_token(site: Site) -> None:
    _, token = await create(site, "reader", expires_s=60)
    browser = await sign_in(site, token=token)
    assert browser.signed_in.body["expires_at"] <= time.time() + 60
    max_age = browser.signed_in.headers["set-cookie"].partition("Max-Age=")[2].partition(";")[0]
    assert 0 < int(max_age) <= 60


# --- what a sign-in may do --------------------------------------------------------------------------------


async def test_a_readers_sign_in_changes_nothing(site: Site) -> None:
    """Each call that changes something, as the API's description lists them."""
    await site.hold()
    await site.post("/v1/runs", {"id": "a-run"})
    submitted = await site.post("/v1/rollouts", {"run": "a-run", "id": "r-1", "task": task()})
    assert submitted.status == 202
    _, token = await create(site, "reader")
    browser = await sign_in(site, token=token)
    assert (await browser.get("/v1/rollouts/r-1?run=a-run")).status == 200
    values = {"run_id": "a-run", "rollout_id": "r-1", "name": "default"}
    schema = (await site.get("/openapi.json")).body
    calls = [
        (method.upper(), path)
        for path, methods in schema["paths"].items()
        for method, call in methods.items()
        if method != "get" and call.get("tags") not in (["gateway"], ["login"])
    ]
    assert len(calls) > 25
    body = {"run": "a-run", "task": task(), "tasks": [task()]}
    for method, path in calls:
        for name in (part[1:-1] for part in path.split("/") if part.startswith("{")):
            path = path.replace(f"{{{name}}}", values.get(name, "r-1"))
        answer = await browser.call(method, f"{path}?run=a-run", json=body)
        assert answer.status in (400, 403, 404, 422), (method, path, answer.status, answer.body)
    assert (await site.get("/v1/rollouts/r-1?run=a-run")).body["state"] == "queued"
    assert [run["id"] for run in (await site.get("/v1/runs")).body["runs"]] == ["a-run"]
    assert len((await site.get("/v1/tokens")).body["tokens"]) == 1


# --- bounds -------------------------------------------------------------------------------------------------


def two_callers() -> tuple[Tokens, list[Any]]:
    tokens = Tokens([ADMIN], [TRAINER])
    return tokens, [tokens.caller(f"Bearer {token}") for token in (ADMIN, TRAINER)]


def test_a_callers_codes_are_bounded_and_push_out_no_others() -> None:
    tokens, (admin, trainer) = two_callers()
    open_logins = Logins(tokens, lifetime_s=60)
    kept = open_logins.new_code(admin)
    codes = [open_logins.new_code(trainer) for _ in range(logins.MOST_CODES + 1)]
    with pytest.raises(Unauthorized):
        open_logins.from_code(codes[0])
    assert open_logins.from_code(codes[1]) == trainer and open_logins.from_code(codes[-1]) == trainer
    assert open_logins.from_code(kept) == admin


def test_a_callers_sign_ins_are_bounded_and_end_no_others() -> None:
    tokens, (admin, trainer) = two_callers()
    open_logins = Logins(tokens, lifetime_s=60)
    kept = open_logins.open(admin)
    first, *others = [open_logins.open(trainer) for _ in range(logins.MOST_LOGINS + 1)]
    assert [login.ended for login in others] == [()] * (logins.MOST_LOGINS - 1) + [(first.record,)]
    with pytest.raises(Unauthorized, match="has ended"):
        open_logins.find(first.cookie, first.page_key)
    for login in (kept, others[0], others[-1]):
        assert open_logins.find(login.cookie, login.page_key)[1] == login.record


def test_sign_ins_of_unknown_owners_and_of_nodes_are_refused() -> None:
    tokens, (admin, _) = two_callers()
    node, _ = new_token(TokenRecord("tok_1", Access.NODE, ""))
    tokens.put(node)
    stale = LoginRecord("00", "nobody", "11", time.time(), time.time() + 60)
    open_logins = Logins(tokens, lifetime_s=60, records=[stale])
    assert open_logins.open(admin).ended == ()
    with pytest.raises(Forbidden, match="a node's token"):
        open_logins.new_code(next(caller for caller in tokens.callers if caller.name == "tok_1"))
