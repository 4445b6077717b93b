from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollyard.core import Ending, Outcome, Rollout, Score, Summary, Task
from rollyard.core.failure import EngineTimeout, SandboxLost, TurnLimit
from rollyard.observe import NoTracer, Tracer, TracingUnavailable, open_tracer
from rollyard.observe.spans import (
    chat_span,
    end_rollout_span,
    rollout_span,
    set_usage,
    stage_span,
    tool_span,
    tracer_of,
)


def play(tracer: Tracer) -> None:
    """Records one rollout: init, a run of one model call and one tool call, eval."""
    root = rollout_span(tracer, Rollout("r1", "run", Task("shell"), group="g", created_at=1_700_000_000.0))
    with stage_span(root, "init"):
        pass
    with stage_span(root, "run", agent="native") as run:
        with chat_span(run, model="qwen", engine="e1", conversation="r1", turn=1) as chat:
            set_usage(chat, input_tokens=100, output_tokens=20, cached_tokens=64, finish="stop")
        with tool_span(run, name="shell", call_id="call_1"):
            pass
    with stage_span(root, "eval"):
        pass
    end_rollout_span(root, Ending(Outcome.COMPLETED, Score(0.5), is_trainable=True, summary=Summary(turns=1)))


async def spans_of(*plays: object) -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracer = tracer_of(exporter)
    for one in plays:
        one(tracer)  # type: ignore[operator]
    await tracer.close()
    return exporter.get_finished_spans()


async def test_a_rollout_is_one_trace_from_queue_to_reward() -> None:
    spans = {span.name: span for span in await spans_of(play)}
    assert set(spans) == {"rollout", "init", "run", "chat qwen", "execute_tool shell", "eval"}
    root = spans["rollout"]
    assert root.parent is None and root.start_time == 1_700_000_000 * 10**9
    for name, parent in (("init", "rollout"), ("run", "rollout"), ("eval", "rollout"), ("chat qwen", "run")):
        above, its = spans[name].parent, spans[parent].context
        assert above is not None and its is not None and above == its
    assert len({span.context.trace_id for span in spans.values() if span.context}) == 1
    assert dict(root.attributes or {}) == {
        "rollyard.rollout.id": "r1",
        "rollyard.run": "run",
        "rollyard.group": "g",
        "rollyard.environment": "shell",
        "rollyard.attempt": 1,
        "gen_ai.conversation.id": "r1",
        "rollyard.outcome": "completed",
        "rollyard.turns": 1,
        "rollyard.sampled_tokens": 0,
        "rollyard.trainable": True,
        "rollyard.reward": 0.5,
    }
    assert dict(spans["chat qwen"].attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "qwen",
        "gen_ai.conversation.id": "r1",
        "rollyard.engine": "e1",
        "rollyard.turn": 1,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.response.finish_reasons": ("stop",),
    }
    tool = dict(spans["execute_tool shell"].attributes or {})
    assert (tool["gen_ai.operation.name"], tool["gen_ai.tool.call.id"]) == ("execute_tool", "call_1")
    assert (spans["run"].attributes or {})["gen_ai.operation.name"] == "invoke_agent"


async def test_infra_failures_are_errors_and_truncation_is_not() -> None:
    def lost(tracer: Tracer) -> None:
        root = rollout_span(tracer, Rollout("lost", "run", Task("shell")))
        with pytest.raises(EngineTimeout), chat_span(root, model="m", engine="e", conversation="lost", turn=1):
            raise EngineTimeout("this may contain a prompt")
        end_rollout_span(root, Ending(Outcome.FAILED, failure=SandboxLost("gone").failure()))
        root.end()  # a second end does nothing

    def truncated(tracer: Tracer) -> None:
        root = rollout_span(tracer, Rollout("cut", "run", Task("shell")))
        end_rollout_span(root, Ending(Outcome.TRUNCATED, Score(0), TurnLimit().failure()))

    chat, failed, cut = await spans_of(lost, truncated)
    assert not chat.status.is_ok and (chat.attributes or {})["error.type"] == "engine_timeout"
    assert "prompt" not in chat.to_json()
    assert not failed.status.is_ok and (failed.attributes or {})["rollyard.failure.blame"] == "infra"
    assert cut.status.is_ok or cut.status.status_code.name == "UNSET"


async def test_spans_reach_a_collector_over_http() -> None:
    received: list[tuple[str | None, ExportTraceServiceRequest]] = []

    async def traces(request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        received.append((request.headers.get("x-key"), message))
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", traces)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        tracer = open_tracer(f"http://{host}:{port}/", headers={"x-key": "k"}, service="yard")
        play(tracer)
        await tracer.close()
    finally:
        await runner.cleanup()
    ((key, message),) = received
    assert key == "k"
    (resource,) = message.resource_spans
    assert [(a.key, a.value.string_value) for a in resource.resource.attributes] == [("service.name", "yard")]
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["chat qwen", "eval", "execute_tool shell", "init", "rollout", "run"]


async def test_the_null_tracer_does_nothing() -> None:
    tracer = NoTracer()
    play(tracer)
    await tracer.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingUnavailable, match=r"rollyard\[otel\]"):
        open_tracer("http://127.0.0.1:1")
