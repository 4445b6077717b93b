"""Spans from queue to reward, as a collector receives them."""

from pathlib import Path

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollyard.observe.spans import tracer_of
from tests.pipeline.site import finish, open_site, says, shell, shell_task


async def test_a_rollout_is_one_trace_from_queue_to_reward(tmp_path: Path):
    exporter = InMemorySpanExporter()
    tracer = tracer_of(exporter)
    async with open_site(tmp_path, says(shell("touch done"), finish()), tracer=tracer) as site:
        rollout = await site.rolled(shell_task())
    await tracer.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {
        "rollout",
        "init",
        "run",
        "chat scripted",
        "execute_tool shell",
        "execute_tool finish",
        "eval",
    }
    root = spans["rollout"]
    assert root.parent is None
    assert root.context is not None
    assert root.attributes is not None
    assert root.attributes["rollyard.reward"] == 1.0
    assert root.attributes["rollyard.rollout.id"] == rollout.id
    for name in ("init", "run", "eval"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == root.context.span_id
    run = spans["run"].context
    assert run is not None
    for name in ("chat scripted", "execute_tool shell"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == run.span_id
    usage = spans["chat scripted"].attributes
    assert usage is not None
    assert usage["gen_ai.usage.output_tokens"]


async def test_metrics_count_what_happened(tmp_path: Path):
    async with open_site(tmp_path, says(shell("touch done"), finish())) as site:
        await site.rolled(shell_task())
        text = site.pipeline.metrics.render()[0].decode()
    assert 'rollyard_rollouts_ended_total{blame="",code="",environment="shell",outcome="completed"} 1.0' in text
    assert 'rollyard_engine_calls_total{engine="e0"} 2.0' in text
    assert 'rollyard_sandbox_starts_total{runtime="bubblewrap"} 2.0' in text
    assert 'rollyard_tool_call_seconds_count{tool="shell"} 1.0' in text
    assert 'rollyard_stage_seconds_count{stage="eval"} 1.0' in text
