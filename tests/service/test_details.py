"""What people look at in one rollout: its timeline, an agent program's requests, its artifacts, EVAL's evidence."""

from __future__ import annotations

import asyncio
import io
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollyard.service.routes import details
from rollyard.testing.script import Reply
from tests.agents.harness_parts import PROGRAM, call
from tests.service.site import Site, engine_table, finish, open_site, scripted, shell, task


async def part(site: Site, path: str, rollout_id: str = "r1") -> Any:
    answer = await site.get(f"/v1/rollouts/{rollout_id}/{path}")
    assert answer.status == 200, answer.body
    return answer.body


async def submit(site: Site, rollout_id: str = "r1", **fields: Any) -> None:
    answer = await site.post("/v1/rollouts", {"rollouts": [{"id": rollout_id, "task": task(**fields)}]})
    assert answer.status == 202, answer.body


async def info_of(site: Site, rollout_id: str = "r1") -> dict[str, Any]:
    record = (await site.get(f"/v1/rollouts/{rollout_id}?include=trajectory")).body
    return record["trajectory"]["info"]


def kinds(attempt: dict[str, Any]) -> list[str]:
    return [one["kind"] for one in attempt["parts"]]


def ordered(attempt: dict[str, Any]) -> None:
    """Stages follow each other, and calls are inside of RUN, in order."""
    stages = [one for one in attempt["parts"] if one["kind"] not in ("model", "tool", "prepare")]
    assert [one["start_s"] for one in stages] == sorted(one["start_s"] for one in stages)
    for before, after in pairwise(stages):
        assert before["end_s"] <= after["start_s"] + 1e-5
    calls = [one for one in attempt["parts"] if one["kind"] in ("model", "tool")]
    (run,) = [one for one in attempt["parts"] if one["kind"] == "run"]
    for one in calls:
        assert run["start_s"] <= one["start_s"] + 1e-5 and one["start_s"] <= one["end_s"] <= run["end_s"] + 1e-5
    for before, after in pairwise(calls):
        assert before["end_s"] <= after["start_s"] + 1e-5


# --- the native agent -----------------------------------------------------------------------------------


async def test_a_rollouts_timeline_has_its_stages_and_each_call(tmp_path: Path) -> None:
    async with (
        scripted(shell("echo one"), shell("exit 3") + finish(), "unused") as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await submit(site)
        record = await site.ended("r1")
        shown = await part(site, "timeline")
        info = await info_of(site)
        requests = await part(site, "requests")
    assert (shown["id"], shown["state"], shown["origin"]) == ("r1", "ended", record["created_at"])
    assert shown["dropped_calls"] == 0
    assert shown["at"] == record["updated_at"]
    (attempt,) = shown["attempts"]
    assert (attempt["attempt"], attempt["code"], attempt["start_s"]) == (1, None, 0.0)
    ordered(attempt)
    assert [one for one in kinds(attempt) if one not in ("model", "tool")][-3:] == ["run", "eval_wait", "eval"]
    calls = [one for one in attempt["parts"] if one["kind"] in ("model", "tool")]
    assert [(one["kind"], one["turn"], one["name"]) for one in calls] == [
        *(("model", 0, "e1"), ("tool", 0, "shell"), ("model", 1, "e1")),
        *(("tool", 1, "shell"), ("tool", 1, "finish")),
    ]
    tokens = [one["tokens"] for one in calls if one["kind"] == "model"]
    assert sum(tokens) == record["summary"]["sampled_tokens"] and all(tokens)
    assert [row[:2] + row[4:] for row in info["calls"]][:2] == [["model", 0, "e1", tokens[0]], ["tool", 0, "shell", 0]]
    assert requests == {"requests": [], "dropped": 0, "is_complete": True}


async def test_the_timeline_of_a_queued_and_of_a_running_rollout_has_an_open_part(tmp_path: Path) -> None:
    async with (
        scripted(shell("echo one"), Reply("never", stall_after=0)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await site.hold()
        await submit(site)
        (queued,) = (await part(site, "timeline"))["attempts"]
        assert queued["parts"] == [{"kind": "queued", "start_s": 0.0, "end_s": None}]
        await site.call("PATCH", "/v1/pools", json={"init": 1})
        async with asyncio.timeout(60):
            while kinds((shown := await part(site, "timeline"))["attempts"][0]).count("model") < 2:
                await asyncio.sleep(0.02)
        assert shown["state"] == "run"
        parts = shown["attempts"][0]["parts"]
        assert [one["kind"] for one in parts if one["end_s"] is None] == ["run", "model"]
        assert "init" in kinds(shown["attempts"][0])
        await site.delete("/v1/rollouts/r1")
        await site.ended("r1")
        (ended,) = (await part(site, "timeline"))["attempts"]
        assert ended["code"] == "cancelled" and "run" in kinds(ended)
        assert all(one["end_s"] is not None for one in ended["parts"])


async def test_a_lost_attempt_keeps_its_stages_and_the_next_one_follows_it(tmp_path: Path) -> None:
    async with (
        scripted(Reply("never", stall_after=0)) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await submit(site)
        async with asyncio.timeout(60):
            while "model" not in kinds((await part(site, "timeline"))["attempts"][0]):
                await asyncio.sleep(0.02)
    async with (
        scripted(finish()) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        record = await site.ended("r1")
        shown = await part(site, "timeline")
    (lost,) = record["lost"]
    assert (record["attempt"], lost["code"]) == (2, "drained") and lost["timings"]["run_s"] > 0
    first, last = shown["attempts"]
    assert (first["attempt"], first["code"], first["start_s"]) == (1, "drained", 0.0)
    assert kinds(first)[-1] == "run" and last["start_s"] >= first["parts"][-1]["end_s"] - 1e-5
    assert "model" in kinds(last)
    ordered(last)


# --- agent programs and sessions ------------------------------------------------------------------------


async def test_an_agent_programs_requests_are_kept_as_differences(tmp_path: Path) -> None:
    program = PROGRAM.replace('"tools": tools}', '"tools": tools, "temperature": 0.123, "n": 1, "user": "u" * 300}')
    options = {"command": ["python3", "-c", program, "{{instruction}}"], "env": {"BASE_URL": "{{base_url}}"}}
    async with (
        scripted(call("sh", command="echo hello > out.txt"), "Done.") as engine,
        open_site(tmp_path, engines=[engine_table(engine)], runtimes=["bubblewrap"]) as site,
    ):
        await submit(site, agent={"name": "command", "options": options})
        record = await site.ended("r1")
        assert record["failure"] is None, record
        shown = await part(site, "requests")
        info = await info_of(site)
        (attempt,) = (await part(site, "timeline"))["attempts"]
        traces = (await site.get("/v1/rollouts/r1/traces")).body
    first, second = shown["requests"]
    assert shown["is_complete"] and not shown["dropped"]
    assert (first["number"], first["extends"], first["turn"], first["dialect"]) == (0, None, 0, "chat")
    assert first["new_messages"] == [{"role": "user", "content": "do it"}] and first["kept_messages"] == 0
    assert (first["fields"]["temperature"], first["fields"]["user"], first["tools"]) == (0.123, "u" * 300, 1)
    assert "messages" not in first["fields"] and "tools" not in first["fields"] and first["bytes"] > 300
    assert first["overruled"] == ["temperature"], first
    assert (second["extends"], second["turn"], second["kept_messages"]) == (0, 1, 1)
    assert [message["role"] for message in second["new_messages"]] == ["assistant", "tool"]
    assert second["same_fields"] == ["user"] and second["fields"]["temperature"] == 0.123
    assert 0 < first["start_s"] < second["start_s"]
    calls = [one for one in attempt["parts"] if one["kind"] == "model"]
    assert [(one["turn"], one["engine"]) for one in calls] == [(0, "e1"), (1, "e1")]
    assert [row[0] for row in info["calls"]] == ["model", "model"]
    spans = [span for trace in traces["traces"] for span in trace["spans"]]
    assert [span["turn"] for span in spans] == [0, 1] and "requests" not in traces
    ordered(attempt)


async def test_a_sessions_requests_can_be_read_while_it_is_open(tmp_path: Path) -> None:
    async with (
        scripted("one", "two") as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        opened = (await site.post("/v1/sessions", {"id": "r1"})).body
        key = {"Authorization": f"Bearer {opened['key']}"}
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
        answer = await site.post("/v1/chat/completions", body, headers=key)
        assert answer.status == 200, answer.body
        (running,) = (await part(site, "requests"))["requests"]
        assert running["new_messages"] == body["messages"]
        open_parts = (await part(site, "timeline"))["attempts"][0]["parts"]
        assert [one["kind"] for one in open_parts if one["end_s"] is None] == ["run"]
        await site.post("/v1/sessions/r1/reward", {"reward": 1.0})
        await site.ended("r1")
        assert (await part(site, "requests"))["requests"] == [running]
        assert [row[0] for row in (await info_of(site))["calls"]] == ["model"]


# --- artifacts and evidence -----------------------------------------------------------------------------


async def test_artifacts_are_listed_and_sent_as_attachments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        scripted(shell("echo '<script>' > page.html"), finish()) as engine,
        open_site(tmp_path, engines=[engine_table(engine)]) as site,
    ):
        await submit(site)
        await site.ended("r1")
        (listed,) = (await part(site, "artifacts"))["artifacts"]
        assert (listed["name"], listed["kind"], listed["available"]) == ("workspace", "tar", True)
        answer = await site.get("/v1/rollouts/r1/artifacts/workspace")
        assert answer.status == 200 and len(answer.body) == listed["bytes"]
        with tarfile.open(fileobj=io.BytesIO(answer.body)) as archive:
            assert any(name.endswith("page.html") for name in archive.getnames())
        headers = answer.headers
        assert headers["content-type"] == "application/octet-stream"
        assert headers["content-disposition"] == 'attachment; filename="r1-workspace.tar"'
        assert headers["x-content-type-options"] == "nosniff" and "sandbox" in headers["content-security-policy"]
        for name in ("other", "..%2f..%2fdata", "%2e%2e", "a%00b", "workspace%2f..", "x" * 3000):
            assert (await site.get(f"/v1/rollouts/r1/artifacts/{name}")).status == 404, name
        monkeypatch.setattr(details, "MOST_ARTIFACT_BYTES", 10)
        assert (await site.get("/v1/rollouts/r1/artifacts/workspace")).code == "artifact_too_large"
        monkeypatch.undo()
        await site.served.app_state.resources.artifacts.delete("r1")
        assert (await part(site, "artifacts"))["artifacts"][0]["available"] is False
        assert (await site.get("/v1/rollouts/r1/artifacts/workspace")).code == "gone"


async def test_details_of_an_acknowledged_rollout_are_gone(tmp_path: Path) -> None:
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await submit(site)
        record = await site.ended("r1")
        assert (await info_of(site))["evidence"]
        acked = await site.post("/v1/runs/default/ack", {"cursor": record["cursor"]})
        assert acked.status == 200, acked.body
        for path in ("requests", "artifacts", "artifacts/workspace"):
            assert (await site.get(f"/v1/rollouts/r1/{path}")).code == "gone", path
        assert await site.served.app_state.store.evidence("r1") == b""
        (attempt,) = (await part(site, "timeline"))["attempts"]
        assert "run" in kinds(attempt) and "model" not in kinds(attempt)
        for path in ("timeline", "requests", "artifacts", "artifacts/workspace"):
            assert (await site.get(f"/v1/rollouts/unknown/{path}")).code == "not_found", path


async def test_what_checks_print_is_evidence_and_does_not_change_the_reward(tmp_path: Path) -> None:
    checks: list[Any] = [
        {"command": "echo all good; echo warning >&2", "name": "good"},
        {"command": "printf 'a\\377b'; head -c 300000 /dev/zero; echo the end; exit 4", "name": "loud"},
    ]
    async with scripted() as engine, open_site(tmp_path, engines=[engine_table(engine)]) as site:
        await submit(site, data={"instruction": "do it", "checks": checks})
        record = await site.ended("r1")
        good, loud = (await info_of(site))["evidence"]
    assert record["reward"] == 0.5
    assert good == {"kind": "check", "name": "good", "text": "all good\nwarning\n(exit status 0)", "passed": True}
    assert (loud["kind"], loud["name"], loud["passed"]) == ("check", "loud", False)
    assert loud["text"].startswith("a\ufffdb\0") and loud["text"].endswith("the end\n(exit status 4)")
    assert len(loud["text"]) < 32 << 10
