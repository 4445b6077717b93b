"""Every route of the API × every kind of token × the caller's own work and that of another.

The routes are read from the OpenAPI document: one that is not in `ROUTES` below fails the test.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollyard.sandbox.breaker import FAILURES
from rollyard.testing.script import Reply
from tests.service.site import TRAINER, Answer, Site, engine_table, finish, open_site, scripted, task

CALLERS = ("admin", "owner", "submitter", "reader", "auditor", "stranger", "node", "nobody")
"""owner: the trainer that owns the work. submitter, reader: bound to its runs. auditor: a reader of all runs. stranger:
another trainer."""

ADMINS = {"admin"}
OPERATORS = {"admin", "auditor"}
MANAGERS = {"admin", "owner"}
WRITERS = {"admin", "owner", "submitter"}
READERS = {*WRITERS, "reader", "auditor"}
TENANTS = {*READERS, "stranger"}
EVERYONE: set[str] = set(CALLERS)

TASKS = {"tasks": [task()]}


@dataclass(frozen=True)
class Route:
    """`may`: the callers that are admitted. In the body, `@` is replaced by the caller's name."""

    may: set[str]
    body: Mapping[str, Any] | None = None
    query: str = ""


ROUTES: Mapping[str, Route] = {
    "POST /v1/runs": Route(MANAGERS, {"id": "a-new-@"}),
    "GET /v1/runs": Route(TENANTS),
    "GET /v1/runs/{run_id}": Route(READERS),
    "GET /v1/runs/{run_id}/series": Route(READERS),
    "DELETE /v1/runs/{run_id}": Route(MANAGERS),
    "POST /v1/runs/{run_id}/ack": Route(MANAGERS, {"cursor": "e:0"}),
    "POST /v1/rollouts": Route(WRITERS, {"run": "a-run", "task": task()}),
    "POST /v1/tasks/check": Route(WRITERS, {"run": "a-run", "tasks": [task()]}),
    "GET /v1/rollouts": Route(READERS, query="?run=a-run"),
    "GET /v1/results": Route(READERS, query="?run=a-run"),
    "GET /v1/rollouts/{rollout_id}": Route(READERS),
    "DELETE /v1/rollouts/{rollout_id}": Route(WRITERS, query="?run=a-run"),
    "GET /v1/rollouts/{rollout_id}/messages": Route(READERS),
    "GET /v1/rollouts/{rollout_id}/traces": Route(READERS),
    "GET /v1/rollouts/{rollout_id}/texts": Route(READERS),
    "GET /v1/rollouts/{rollout_id}/timeline": Route(READERS),
    "GET /v1/rollouts/{rollout_id}/requests": Route(READERS),
    "GET /v1/rollouts/{rollout_id}/artifacts": Route(READERS),
    "GET /v1/rollouts/{rollout_id}/artifacts/{name}": Route(READERS),
    "POST /v1/rollouts/{rollout_id}/rescore": Route(WRITERS),
    "POST /v1/groups": Route(WRITERS, {"run": "a-run", "task": task(), "size": 1}),
    "GET /v1/groups": Route(READERS, query="?run=a-run"),
    "GET /v1/groups/{group_id}": Route(READERS),
    "DELETE /v1/groups/{group_id}": Route(WRITERS),
    "POST /v1/draws": Route(MANAGERS, {"run": "a-run", "source": TASKS}),
    "GET /v1/draws": Route(TENANTS),
    "GET /v1/draws/{draw_id}": Route(READERS),
    "DELETE /v1/draws/{draw_id}": Route(MANAGERS),
    "POST /v1/draws/{draw_id}/batches": Route(MANAGERS, {"want": 1}),
    "GET /v1/draws/{draw_id}/batches": Route(READERS),
    "GET /v1/draws/{draw_id}/batches/{number}": Route(READERS),
    "GET /v1/draws/{draw_id}/groups": Route(READERS),
    "POST /v1/draws/{draw_id}/tasks": Route(MANAGERS, {"tasks": [task()]}),
    "POST /v1/draws/{draw_id}/ack": Route(MANAGERS, {"batch": 0}),
    "POST /v1/draws/{draw_id}/rewind": Route(MANAGERS, {"batch": 0, "version": 0}),
    "POST /v1/evals": Route(WRITERS, {"id": "new-@", "run": "a-eval-@", "source": TASKS, "on_update": "fail"}),
    "GET /v1/evals": Route(TENANTS),
    "GET /v1/evals/{eval_id}": Route(READERS),
    "GET /v1/evals/{eval_id}/tasks": Route(READERS),
    "DELETE /v1/evals/{eval_id}": Route(WRITERS),
    "GET /v1/ids": Route(READERS, query="?kind=rollout&prefix=a&run=a-run"),
    "POST /v1/sessions": Route(WRITERS, {"run": "a-run"}, query="?wait_s=0"),
    "GET /v1/sessions/{session_id}": Route(READERS),
    "POST /v1/sessions/{session_id}/reward": Route(WRITERS, {"reward": 1.0}, query="?wait_s=0"),
    "DELETE /v1/sessions/{session_id}": Route(WRITERS, query="?run=a-run"),
    "POST /v1/engines": Route(ADMINS, {"url": "http://127.0.0.1:9", "id": "new"}),
    "GET /v1/engines": Route(TENANTS),
    "DELETE /v1/engines/{engine_id}": Route(ADMINS),
    "DELETE /v1/engines": Route(ADMINS),
    "GET /v1/policies": Route(TENANTS),
    "GET /v1/policies/{name}": Route(TENANTS),
    "GET /v1/policies/{name}/versions": Route(TENANTS),
    "POST /v1/policies/{name}/pause": Route(MANAGERS, {"wait_s": 0}),
    "POST /v1/policies/{name}/renew": Route(MANAGERS, {}),
    "POST /v1/policies/{name}/resume": Route(MANAGERS, {"version": 1}),
    "PUT /v1/policies/{name}/owner": Route(ADMINS, {"owner": None}),
    "POST /v1/tokens": Route(ADMINS, {"access": "reader"}),
    "GET /v1/tokens": Route(ADMINS),
    "POST /v1/tokens/{token_id}/rotate": Route(ADMINS, {}),
    "PUT /v1/tokens/{token_id}/quota": Route(ADMINS, {}),
    "DELETE /v1/tokens/{token_id}": Route(ADMINS),
    "GET /v1/audit": Route(ADMINS),
    "POST /v1/login": Route(EVERYONE, {}),  # 422 here: it takes a token or a code in its body
    "GET /v1/login": Route(TENANTS),
    "DELETE /v1/login": Route(TENANTS),  # 422 here: for browsers
    "POST /v1/login/codes": Route(TENANTS),
    "GET /v1/nodes": Route(TENANTS),  # 404 here: no fleet
    "POST /v1/nodes/{name}/drain": Route(ADMINS),
    "POST /v1/nodes/{name}/resume": Route(ADMINS),
    "GET /v1/status": Route(TENANTS),
    "GET /v1/overview": Route(TENANTS),
    "PATCH /v1/pools": Route(ADMINS, {"init": 0}),
    "GET /v1/events": Route(TENANTS),
    "GET /metrics": Route(OPERATORS),
    "GET /healthz": Route(EVERYONE),
    "GET /readyz": Route(EVERYONE),
}

LAST = (
    "DELETE /v1/runs/{run_id}",
    "DELETE /v1/engines/{engine_id}",
    "DELETE /v1/engines",
    "PUT /v1/policies/{name}/owner",
)
"""They change what the other routes need."""

NOT_THERE = ("/nodes", "/traces", "/texts", "/artifacts/")
"""404 even for callers that are admitted: there is no fleet here, and no rollout has ended."""


@dataclass
class RunningService:
    """A service with the work of one trainer: one object of each kind for each caller that may delete it."""

    site: Site
    tokens: dict[str, str] = field(default_factory=dict[str, str])
    ids: dict[str, str] = field(default_factory=dict[str, str])

    async def call(self, caller: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        options = {} if body is None else {"json": body}
        return await self.site.call(method, path, token=self.tokens[caller], **options)

    async def make(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self.call("owner", "POST", path, body)
        assert answer.status in (200, 201, 202), answer.body


@asynccontextmanager
async def service(folder: Path) -> AsyncGenerator[RunningService, None]:
    async with scripted(Reply(finish())) as engine, open_site(folder, engines=[engine_table(engine)]) as site:
        await site.hold()
        running = RunningService(site, {"admin": site.token, "nobody": ""})
        kinds: dict[str, dict[str, Any]] = {
            "owner": {"access": "trainer", "runs": ["a-*"], "policies": ["default"]},
            "submitter": {"access": "submitter", "runs": ["a-*"]},
            "reader": {"access": "reader", "runs": ["a-*"]},
            "auditor": {"access": "reader"},
            "stranger": {"access": "trainer"},
            "node": {"access": "node"},
            "spare": {"access": "reader"},
        }
        for name, body in kinds.items():
            answer = await site.post("/v1/tokens", {"name": name, **body})
            assert answer.status == 201, answer.body
            running.tokens[name], running.ids[name] = answer.body["token"], answer.body["id"]
        for path, body in (
            ("/v1/runs", {"id": "a-run"}),
            *(("/v1/runs", {"id": f"a-{one}"}) for one in CALLERS),
            *(("/v1/rollouts", {"run": "a-run", "id": f"r-{one}", "task": task()}) for one in CALLERS),
            *(("/v1/groups", {"run": "a-run", "id": f"g-{one}", "task": task(), "size": 1}) for one in CALLERS),
            *(("/v1/draws", {"run": "a-run", "id": f"d-{one}", "source": {"push": True}}) for one in CALLERS),
            *(("/v1/draws", {"run": "a-run", "id": f"x-{one}", "source": {"push": True}}) for one in CALLERS),
            *(("/v1/evals", {"id": f"e-{one}", "run": f"a-e-{one}", "source": TASKS}) for one in CALLERS),
            *(("/v1/sessions?wait_s=0", {"run": "a-run", "id": f"s-{one}"}) for one in CALLERS),
            *((f"/v1/draws/d-{one}/batches", {"want": 1}) for one in CALLERS),
        ):
            await running.make(path, body)
        yield running


def filled(route: str, caller: str, running: RunningService) -> tuple[str, str]:
    """The route's method, and its path with the ids of the objects for that caller."""
    method, _, path = route.partition(" ")
    draw = "x" if route.startswith("DELETE") else "d"
    values = {
        "run_id": f"a-{caller}",
        "rollout_id": f"r-{caller}",
        "group_id": f"g-{caller}",
        "draw_id": f"{draw}-{caller}",
        "eval_id": f"e-{caller}",
        "session_id": f"s-{caller}",
        "engine_id": "e1",
        "token_id": running.ids["spare"],
        "number": "1",
        "name": "default",
    }
    return method, path.format(**values)


async def test_each_route_admits_exactly_the_callers_it_should(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        schema = (await running.site.get("/openapi.json")).body
        known = {
            f"{method.upper()} {path}"
            for path, calls in schema["paths"].items()
            for method, call in calls.items()
            if call.get("tags") != ["gateway"]
        }
        assert known == set(ROUTES), "a route without an entry, or an entry without a route"
        order = [name for name in ROUTES if name not in LAST] + list(LAST)
        wrong: list[str] = []
        for name in order:
            route = ROUTES[name]
            for caller in sorted(CALLERS, key=lambda one: one in route.may):  # callers that are refused come first
                method, path = filled(name, caller, running)
                body = None if route.body is None else json.loads(json.dumps(route.body).replace("@", caller))
                if name == "GET /v1/events":  # it does not end
                    async with running.site.http.get(
                        f"{running.site.url}{path}", headers={"Authorization": f"Bearer {running.tokens[caller]}"}
                    ) as reply:
                        status = reply.status
                else:
                    status = (await running.call(caller, method, path + route.query, body)).status
                if caller == "nobody" and caller not in route.may:
                    is_right = status == 401
                elif caller in route.may:
                    is_right = status not in (401, 403, 500) and (
                        status != 404 or any(part in path for part in NOT_THERE)
                    )
                else:
                    is_right = status in (403, 404)
                if not is_right:
                    wrong.append(f"{caller}: {method} {path} → {status}")
        assert not wrong, "\n".join(wrong)


async def test_other_tenants_work_is_not_found_and_not_listed(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        for path in (
            *("/v1/runs/a-run", "/v1/rollouts/r-owner", "/v1/rollouts/r-owner/traces", "/v1/groups/g-owner"),
            *("/v1/draws/d-owner", "/v1/draws/d-owner/groups", "/v1/evals/e-owner", "/v1/sessions/s-owner"),
            *("/v1/rollouts?run=a-run", "/v1/rollouts/r-owner?run=a-run", "/v1/events?run=a-run"),
        ):
            there, nowhere = (
                await running.call("stranger", "GET", path),
                path.replace("owner", "zzz").replace("a-run", "zzz"),
            )
            not_there = await running.call("stranger", "GET", nowhere)
            assert (there.status, there.code) == (not_there.status, not_there.code) == (404, "not_found"), path
        for path in ("/v1/runs", "/v1/rollouts", "/v1/rollouts?group=g-owner", "/v1/draws", "/v1/evals", "/v1/status"):
            answer = await running.call("stranger", "GET", path)
            assert answer.status == 200 and "a-run" not in json.dumps(answer.body), path
            for caller in ("owner", "reader", "auditor", "admin"):
                assert "a-" in json.dumps((await running.call(caller, "GET", path)).body), (caller, path)


async def test_images_of_other_tenants_tasks_are_shown_to_operators_only(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        breakers = running.site.served.app_state.resources.breakers
        for _ in range(FAILURES):
            breakers.failed("local", "registry/secret-project", "its entry point printed a secret")
            breakers.failed("local", None, "no user namespaces")
        for path in ("/v1/status", "/v1/overview"):
            for caller in sorted(TENANTS):
                shown = json.dumps((await running.call(caller, "GET", path)).body)
                assert "no user namespaces" in shown, (path, caller)
                assert ("secret" in shown) == (caller in OPERATORS), (path, caller)


async def test_failing_starts_of_a_tenant_are_not_shown_to_others(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        app_state = running.site.served.app_state
        run = app_state.pipeline.run_of("a-run")
        assert run is not None
        app_state.resources.breakers.failed("local", None, "printed by a set-up", run.owner)
        for path in ("/v1/status", "/v1/overview"):
            assert "printed by" not in json.dumps((await running.call("stranger", "GET", path)).body), path
        for caller in ("owner", "admin"):
            assert "printed by" in json.dumps((await running.call(caller, "GET", "/v1/status")).body), caller


async def test_the_same_ids_in_two_runs_are_different_objects(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        for path, body in (
            ("/v1/runs", {"id": "b-run"}),
            ("/v1/rollouts", {"run": "b-run", "id": "r-owner", "group": "g-owner", "index": 0, "task": task("theirs")}),
            ("/v1/groups", {"run": "b-run", "id": "g-owner", "task": task("theirs"), "size": 1}),
            ("/v1/draws", {"run": "b-run", "id": "d-owner", "source": {"push": True}}),
            ("/v1/sessions?wait_s=0", {"run": "b-run", "id": "s-owner"}),
        ):
            answer = await running.call("stranger", "POST", path, body)
            assert answer.status in (201, 202), answer.body
        for caller, instruction in (("owner", "do it"), ("stranger", "theirs")):
            rollout = (await running.call(caller, "GET", "/v1/rollouts/r-owner")).body
            assert (rollout["id"], rollout["task"]["data"]["instruction"]) == ("r-owner", instruction)
            group = (await running.call(caller, "GET", "/v1/groups/g-owner")).body
            assert [member["rollout"] for member in group["members"]] == ["g-owner-0"]
            assert group["task"]["data"]["instruction"] == instruction
        listed = (await running.call("owner", "GET", "/v1/rollouts?group=g-owner")).body["rollouts"]
        assert [(one["id"], one["run"], one["group"]) for one in listed] == [("g-owner-0", "a-run", "g-owner")]
        both = await running.call("admin", "GET", "/v1/rollouts/r-owner")
        assert both.code == "ambiguous_id" and both.body["runs"] == ["a-run", "b-run"]
        assert (await running.call("admin", "GET", "/v1/rollouts/r-owner?run=b-run")).body["run"] == "b-run"
        assert (await running.call("stranger", "DELETE", "/v1/rollouts/r-owner")).body["state"] == "ended"
        assert (await running.call("owner", "GET", "/v1/rollouts/r-owner")).body["state"] == "queued"


async def test_a_cancel_before_submit_affects_only_the_callers_run(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        answer = await running.call("stranger", "DELETE", "/v1/rollouts/tomorrow")
        assert answer.body["state"] == "cancelled_before_submit"
        assert (await running.call("stranger", "DELETE", "/v1/rollouts/tomorrow?run=a-run")).code == "not_found"
        body = {"run": "a-run", "id": "tomorrow", "task": task()}
        assert (await running.call("owner", "POST", "/v1/rollouts", body)).body["rollouts"][0]["state"] == "queued"
        mine = {"id": "tomorrow", "task": task()}
        ended = (await running.call("stranger", "POST", "/v1/rollouts", mine)).body["rollouts"][0]
        assert (ended["state"], ended["outcome"], ended["run"]) == (
            "ended",
            "cancelled",
            f"default.{running.ids['stranger']}",
        )


async def test_a_name_that_a_token_is_bound_to_is_reserved_for_it(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        for name in ("a-later", "default", f"default.{running.ids['owner']}"):
            assert (await running.call("stranger", "POST", "/v1/runs", {"id": name})).code == "forbidden"
        assert (await running.call("owner", "POST", "/v1/runs", {"id": "b-run"})).code == "forbidden"
        assert (await running.call("owner", "POST", "/v1/rollouts", {"task": task()})).code == "forbidden"
        refused = await running.call("stranger", "POST", "/v1/evals", {"id": "e", "run": "a-run", "source": TASKS})
        assert refused.code == "forbidden"
        bound = {"access": "trainer", "policies": ["mine"]}
        token = (await running.site.post("/v1/tokens", bound)).body["token"]
        assert (await running.site.post("/v1/runs", {"id": "c-run"}, token=token)).code == "forbidden"
        assert (await running.site.post("/v1/runs", {"id": "c-run", "policy": "mine"}, token=token)).status == 201


async def test_an_evaluation_of_another_owners_policy_does_not_hold_back_weights(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        body = {"id": "e", "source": TASKS}
        assert (await running.call("stranger", "POST", "/v1/evals", body)).code == "forbidden"
        assert (await running.call("stranger", "POST", "/v1/evals", {**body, "on_update": "fail"})).status == 201


async def test_a_policy_belongs_to_the_first_trainer_that_changes_it_unless_an_admin_sets_another(
    tmp_path: Path,
) -> None:
    async with scripted(Reply(finish())) as engine:
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:
            bodies = [(await site.post("/v1/tokens", {"access": "trainer"})).body for _ in range(2)]
            (one, first), (two, second) = ((body["id"], body["token"]) for body in bodies)
            resume = "/v1/policies/default/resume"
            assert (await site.post(resume, {"version": 1}, token=first)).body["owner"] == one
            assert (await site.post(resume, {"version": 2}, token=second)).code == "forbidden"
            assert (await site.call("PUT", "/v1/policies/default/owner", json={"owner": two})).body["owner"] == two
        async with open_site(tmp_path, engines=[engine_table(engine)]) as site:  # the owner is stored
            assert (await site.post(resume, {"version": 2}, token=first)).code == "forbidden"
            assert (await site.post(resume, {"version": 2}, token=second)).status == 200
            assert (await site.post(resume, {"version": 3})).status == 200, "an admin may always"


async def test_a_trainer_cannot_take_a_policy_while_an_admin_gives_it_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        owner = (await site.post("/v1/tokens", {"access": "trainer"})).body["id"]
        store, stored, may_go = site.served.app_state.store, asyncio.Event(), asyncio.Event()
        put_owner = store.put_owner

        async def held(policy: str, name: str | None) -> None:
            await put_owner(policy, name)
            stored.set()
            await may_go.wait()

        monkeypatch.setattr(store, "put_owner", held)
        giving = asyncio.create_task(site.put("/v1/policies/default/owner", {"owner": owner}))
        await stored.wait()
        monkeypatch.setattr(store, "put_owner", put_owner)
        assert (await site.post("/v1/policies/default/pause", {}, token=TRAINER)).code == "forbidden"
        may_go.set()
        assert (await giving).body["owner"] == owner
        assert await store.owners() == {"default": owner}


async def test_events_of_other_runs_are_not_sent(tmp_path: Path) -> None:
    async with service(tmp_path) as running:
        headers = {"Authorization": f"Bearer {running.tokens['stranger']}"}
        async with running.site.http.get(f"{running.site.url}/v1/events", headers=headers) as stream:
            await running.make("/v1/rollouts", {"run": "a-run", "id": "theirs", "task": task()})
            assert (
                await running.call("stranger", "POST", "/v1/rollouts", {"id": "mine", "task": task()})
            ).status == 202
            async with asyncio.timeout(20):
                while b"data:" not in (line := await stream.content.readline()):
                    pass
            assert json.loads(line.partition(b":")[2])["rollout"] == "mine"


# --- tokens -------------------------------------------------------------------------------------------


async def test_tokens_are_created_rotated_and_revoked_without_a_restart(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        created = (await site.post("/v1/tokens", {"access": "trainer", "name": "alice"})).body
        assert (
            created["token"].startswith("ryt_") and (await site.get("/v1/runs", token=created["token"])).status == 200
        )
        assert (await site.post("/v1/runs", {"id": "hers"}, token=created["token"])).status == 201
        listed = (await site.get("/v1/tokens")).body["tokens"]
        assert [(one["id"], one["name"]) for one in listed] == [(created["id"], "alice")] and "token" not in listed[0]
        rotated = (await site.post(f"/v1/tokens/{created['id']}/rotate", {})).body
        assert (await site.get("/v1/runs", token=created["token"])).status == 401
        assert (await site.get("/v1/runs/hers", token=rotated["token"])).status == 200, "her runs are still hers"
    assert rotated["token"] not in "".join(
        path.read_bytes().decode("latin-1") for path in (tmp_path / "data").rglob("*") if path.is_file()
    ), "only its digest is stored"
    async with open_site(tmp_path) as site:
        assert (await site.get("/v1/runs/hers", token=rotated["token"])).status == 200, "it is stored"
        assert (await site.delete(f"/v1/tokens/{created['id']}")).status == 204
        assert (await site.get("/v1/runs", token=rotated["token"])).status == 401
        assert (await site.delete(f"/v1/tokens/{created['id']}")).code == "not_found"
        assert (await site.get("/v1/tokens")).body["tokens"] == []
        entries = (await site.get("/v1/audit")).body["entries"]
        assert [one["action"] for one in entries] == ["revoke_token", "rotate_token", "create_token"]
        assert {one["target"] for one in entries} == {created["id"]}
        newest = (await site.get("/v1/audit?limit=1")).body
        older = (await site.get(f"/v1/audit?limit=5&before={newest['next']}")).body
        assert newest["entries"] + older["entries"] == entries and older["next"] is None


async def test_a_change_of_quota_at_the_same_time_undoes_no_revocation_and_no_rotation(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        tokens = [(await site.post("/v1/tokens", {"access": "trainer"})).body for _ in range(8)]
        answers = await asyncio.gather(
            *[
                call
                for number, one in enumerate(tokens)
                for call in (
                    site.delete(f"/v1/tokens/{one['id']}")
                    if number % 2
                    else site.post(f"/v1/tokens/{one['id']}/rotate", {}),
                    site.put(f"/v1/tokens/{one['id']}/quota", {"live": 3}),
                )
            ]
        )
        assert {answer.status for answer in answers} <= {200, 204, 404}
        rotated = [answer.body["token"] for answer in answers if answer.status == 200 and "token" in answer.body]
        for one in tokens:
            assert (await site.get("/v1/runs", token=one["token"])).status == 401
    async with open_site(tmp_path) as site:  # what is stored
        for one in tokens:
            assert (await site.get("/v1/runs", token=one["token"])).status == 401
        assert [(await site.get("/v1/runs", token=token)).status for token in rotated] == [200] * 4


async def test_a_token_expires(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        created = (await site.post("/v1/tokens", {"access": "reader", "expires_s": 0.3})).body
        async with asyncio.timeout(20):
            while (answer := await site.get("/v1/runs", token=created["token"])).status != 401:
                await asyncio.sleep(0.05)
        assert "has expired" in answer.body["detail"]


@pytest.mark.parametrize(
    "body", [{}, {"access": "root"}, {"access": "reader", "runs": ["a b"]}, {"access": "reader", "expires_s": 0}]
)
async def test_an_invalid_token_request_is_refused(body: Mapping[str, Any], tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        assert (await site.post("/v1/tokens", body)).code == "invalid_request"
        assert (await site.get("/v1/tokens")).body["tokens"] == []


# --- sessions -----------------------------------------------------------------------------------------


async def test_a_key_is_not_valid_for_a_later_session_of_the_same_id(tmp_path: Path) -> None:
    async with scripted(Reply("yes")) as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        body, chat = {"run": "r", "id": "s"}, {"messages": [{"role": "user", "content": "well?"}], "model": "any"}
        keys: list[str] = []
        for _ in range(2):
            assert (await site.post("/v1/runs", {"id": "r"})).status == 201
            opened = (await site.post("/v1/sessions", body)).body
            keys.append(opened["key"])
            assert (await site.post("/v1/sessions", body)).body["key"] == opened["key"]
            assert (await site.post("/v1/chat/completions", chat, token=opened["key"])).status == 200
            if len(keys) == 2:
                assert (await site.post("/v1/chat/completions", chat, token=keys[0])).status == 401
            assert (await site.post("/v1/sessions/s/reward", {"reward": 1.0})).status == 200
            ended = await site.post("/v1/chat/completions", chat, token=opened["key"])
            assert ended.status == 503 and "has ended" in json.dumps(ended.body)
            assert (await site.delete("/v1/runs/r")).status in (202, 204)
            async with asyncio.timeout(20):
                while (await site.get("/v1/runs/r")).status != 404:
                    await asyncio.sleep(0.05)
        assert keys[0] != keys[1]
