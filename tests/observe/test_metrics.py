from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollyard.core import (
    Ending,
    LostAttempt,
    Outcome,
    Position,
    Rollout,
    Sampling,
    Score,
    State,
    Summary,
    Task,
    Timings,
    Trace,
    Trajectory,
    ids_array,
)
from rollyard.core.failure import SandboxLost
from rollyard.observe import EngineState, Metrics, PoolState, Snapshot
from rollyard.observe.metrics import MOST_REASONS, MOST_TOOLS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def scrape(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    body, _ = metrics.render()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    return scrape(metrics).get((name, frozenset((labels or {}).items())))


def ended(ending: Ending) -> Rollout:
    return Rollout("a", "run", Task("shell"), Position(State.ENDED), ending=ending)


def trace(fork_reason: str | None) -> Trace:
    return Trace(ids_array(), bytearray(), None, ids_array(), (), Sampling(), "p", "m", fork_reason=fork_reason)


def test_an_ended_rollout_is_counted_with_its_stages() -> None:
    metrics = Metrics()
    summary, timings = Summary(sampled_tokens=700), Timings(queued_s=9, init_s=0.2, run_s=20, eval_wait_s=1, eval_s=2)
    metrics.rollout_ended(ended(Ending(Outcome.COMPLETED, Score(1), summary=summary, timings=timings)))
    labels = {"outcome": "completed", "code": "", "blame": "", "environment": "shell"}
    assert value(metrics, "rollyard_rollouts_ended_total", labels) == 1
    assert value(metrics, "rollyard_stage_seconds_sum", {"stage": "run"}) == 20
    assert value(metrics, "rollyard_stage_wait_seconds_sum", {"stage": "init"}) == 9
    assert value(metrics, "rollyard_stage_wait_seconds_sum", {"stage": "eval"}) == 1


def test_the_infra_failure_rate_by_length_can_be_computed() -> None:
    metrics = Metrics()
    failed = Ending(Outcome.FAILED, failure=SandboxLost("gone").failure("run"), summary=Summary(sampled_tokens=5000))
    metrics.rollout_ended(ended(failed))
    metrics.rollout_ended(ended(Ending(Outcome.COMPLETED, Score(1), summary=Summary(sampled_tokens=100))))
    bucket = "rollyard_rollout_sampled_tokens_bucket"
    assert value(metrics, bucket, {"blame": "infra", "le": "4096.0"}) == 0
    assert value(metrics, bucket, {"blame": "infra", "le": "8192.0"}) == 1
    assert value(metrics, bucket, {"blame": "", "le": "256.0"}) == 1
    assert value(metrics, "rollyard_stage_seconds_count", {"stage": "run"}) is None  # never reached


def test_a_rollout_that_has_not_ended_is_not_counted() -> None:
    with pytest.raises(ValueError, match="has not ended"):
        Metrics().rollout_ended(Rollout("a", "run", Task("shell")))


def test_events_are_counted() -> None:
    metrics = Metrics()
    metrics.attempt_lost(LostAttempt(1, "sandbox_lost", "", tokens_lost=300))
    metrics.engine_call("e", 0.5, prompt_tokens=100, sampled_tokens=20, cached_tokens=64)
    metrics.engine_call("e", 0.5, prompt_tokens=100, sampled_tokens=20, cached_tokens=None)
    metrics.engine_failed("e", "engine_timeout")
    metrics.sandbox_started("bubblewrap", 0.006)
    metrics.sandbox_failed("bubblewrap", "sandbox_lost")
    metrics.tool_call("shell", 0.001)
    metrics.store_commit(0.001, 12)
    metrics.http_request("POST", "/v1/rollouts", 202, 0.002)
    samples = scrape(metrics)
    expected = {
        ("rollyard_rollout_retries_total", ("code", "sandbox_lost")): 1,
        ("rollyard_lost_attempt_tokens_sum", ("code", "sandbox_lost")): 300,
        ("rollyard_engine_calls_total", ("engine", "e")): 2,
        ("rollyard_engine_prompt_tokens_total", ("engine", "e")): 200,
        ("rollyard_engine_cached_tokens_total", ("engine", "e")): 64,
        ("rollyard_engine_sampled_tokens_total", ("engine", "e")): 40,
        ("rollyard_engine_failures_total", ("code", "engine_timeout"), ("engine", "e")): 1,
        ("rollyard_sandbox_starts_total", ("runtime", "bubblewrap")): 1,
        ("rollyard_sandbox_failures_total", ("code", "sandbox_lost"), ("runtime", "bubblewrap")): 1,
        ("rollyard_tool_call_seconds_count", ("tool", "shell")): 1,
        ("rollyard_store_commit_operations_sum",): 12,
        ("rollyard_http_requests_total", ("method", "POST"), ("route", "/v1/rollouts"), ("status", "202")): 1,
    }
    for (name, *labels), count in expected.items():
        assert samples[(str(name), frozenset(labels))] == count, name


def test_forks_are_counted_by_reason_for_every_agent() -> None:
    metrics = Metrics()
    metrics.run_ended(Trajectory("a", 1, traces=(trace(None), trace("branched"), trace("branched"))))
    assert value(metrics, "rollyard_forks_total", {"reason": "branched"}) == 2
    assert value(metrics, "rollyard_gateway_requests_total", {"result": "new"}) is None  # it had no gateway


def test_the_number_of_fork_reason_labels_is_bounded() -> None:
    metrics = Metrics()
    metrics.run_ended(Trajectory("a", 1, traces=tuple(trace(f"reason {number}") for number in range(100))))
    assert len([key for key in scrape(metrics) if key[0] == "rollyard_forks_total"]) == MOST_REASONS + 1
    assert value(metrics, "rollyard_forks_total", {"reason": "other"}) == 100 - MOST_REASONS


def test_the_number_of_tool_labels_is_bounded() -> None:
    metrics = Metrics()
    for number in range(MOST_TOOLS + 50):
        metrics.tool_call(f"tool {number}", 0.1)
    counted = [key for key in scrape(metrics) if key[0] == "rollyard_tool_call_seconds_count"]
    assert len(counted) == MOST_TOOLS + 1
    assert value(metrics, "rollyard_tool_call_seconds_count", {"tool": "other"}) == 50


def test_retried_and_abandoned_completions_are_counted() -> None:
    metrics = Metrics()
    gateway = {"requests": 9, "joined": 1, "replayed": 2, "resumed": 3, "refused": 1, "abandoned": 4}
    metrics.run_ended(Trajectory("a", 1, info={"gateway": gateway}))
    for result, count in {"new": 2, "joined": 1, "replayed": 2, "resumed": 3, "refused": 1}.items():
        assert value(metrics, "rollyard_gateway_requests_total", {"result": result}) == count
    assert value(metrics, "rollyard_gateway_abandoned_total") == 4


def test_state_is_read_at_each_scrape() -> None:
    metrics, queued = Metrics(), {"queued": 3}
    metrics.watch(lambda: Snapshot(rollouts=queued, pools={"run": PoolState(8, 5, 2)}))
    metrics.watch(lambda: Snapshot(engines={"e": EngineState(7, 4, is_up=False)}, sandboxes={"bubblewrap": 6}))
    assert value(metrics, "rollyard_rollouts", {"state": "queued"}) == 3
    queued["queued"] = 1
    samples = scrape(metrics)
    assert samples[("rollyard_rollouts", frozenset({("state", "queued")}))] == 1
    for name, number in (("size", 8), ("active", 5), ("waiting", 2)):
        assert samples[(f"rollyard_pool_{name}", frozenset({("stage", "run")}))] == number
    for name, number in (("sessions", 7), ("in_flight", 4), ("up", 0)):
        assert samples[(f"rollyard_engine_{name}", frozenset({("engine", "e")}))] == number
    assert samples[("rollyard_sandboxes", frozenset({("runtime", "bubblewrap")}))] == 6


def test_a_failing_watcher_does_not_fail_the_scrape(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()

    def broken() -> Snapshot:
        raise RuntimeError("no")

    metrics.watch(broken)
    metrics.watch(lambda: Snapshot(sandboxes={"local": 1}))
    assert value(metrics, "rollyard_sandboxes", {"runtime": "local"}) == 1
    assert "a watcher failed" in caplog.text


def test_a_removed_engine_leaves_no_series() -> None:
    metrics = Metrics()
    metrics.engine_call("e", 0.5, prompt_tokens=1, sampled_tokens=1, cached_tokens=None)
    metrics.engine_failed("e", "engine_timeout")
    metrics.engine_removed("e")
    metrics.engine_removed("never there")
    assert not [key for key in scrape(metrics) if ("engine", "e") in key[1]]


def test_open_metrics_is_used_if_accepted() -> None:
    body, content_type = Metrics().render("application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")


def test_two_instances_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.store_commit(0.1, 1)
    assert value(other, "rollyard_store_commit_seconds_count") == 0


def test_names_end_with_their_unit_and_the_reference_lists_them_all() -> None:
    rows = []
    for name, kind, labels, meaning in Metrics().describe():
        assert name.startswith("rollyard_")
        assert kind != "counter" or name.endswith("_total")
        assert kind != "histogram" or name.endswith(("_seconds", "_tokens", "_operations"))
        rows.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |")
    written = re.findall(r"^\| `rollyard_.*$", REFERENCE.read_text(), re.MULTILINE)
    assert written == rows, "docs/reference/metrics.md should have:\n" + "\n".join(rows)
