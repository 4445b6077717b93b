"""The classes of the failure tree are consistent with their blame."""

import pytest

from rollyard.core import CODES, Blame, Ending, Failure, Outcome, Score
from rollyard.core.failure import (
    AgentCrashed,
    InfraFailure,
    PolicyFailure,
    RequestError,
    RollyardError,
    RunDeadline,
    TaskFailure,
    TurnLimit,
)

STABLE = [
    "turn_limit",
    "token_limit",
    "context_limit",
    "run_deadline",
    "agent_crashed",
    "memory_limit",
    "process_limit",
    "disk_limit",
    "file_limit",
    "sandbox_ended_by_policy",
    "eval_deadline",
    "engine_failed",
    "engine_unavailable",
    "engine_refused",
    "engine_timeout",
    "engine_broken",
    "tokenizer_mismatch",
    "sandbox_failed",
    "sandbox_start_failed",
    "sandbox_lost",
    "sandbox_stuck",
    "verifier_crashed",
    "judge_unreachable",
    "tool_unreachable",
    "artifact_lost",
    "stalled",
    "lost_to_restarts",
    "node_lost",
    "session_lost",
    "trace_invalid",
    "internal_error",
    "setup_failed",
    "setup_deadline",
    "prompt_too_long",
    "task_invalid",
    "environment_broken",
    "agent_broken",
    "cancelled",
    "session_abandoned",
    "invalid_request",
    "malformed_id",
    "unknown_environment",
    "unknown_agent",
    "unknown_tool",
    "runtime_not_allowed",
    "agent_missing",
    "unauthorized",
    "forbidden",
    "foreign_host",
    "not_found",
    "gone",
    "id_conflict",
    "engine_exists",
    "session_conflict",
    "malformed_request",
    "request_timed_out",
    "headers_too_large",
    "too_many_connections",
    "body_too_large",
    "queue_full",
    "draining",
]


def test_no_code_is_renamed_or_removed():
    assert set(STABLE) <= set(CODES)


@pytest.mark.parametrize("code", STABLE)
def test_each_code_has_the_properties_of_its_blame(code: str):
    kind = CODES[code]
    if issubclass(kind, PolicyFailure):
        assert kind.blame is Blame.POLICY
        assert kind.trainable or kind in (RunDeadline, AgentCrashed)
        assert not kind.retryable
    elif issubclass(kind, InfraFailure):
        assert kind.blame is Blame.INFRA
        assert not kind.trainable
    elif issubclass(kind, TaskFailure):
        assert kind.blame is Blame.TASK
        assert not kind.retryable and not kind.trainable
    else:
        assert kind.blame is Blame.CLIENT
    if issubclass(kind, RequestError):
        assert 400 <= kind.status < 600


def test_a_code_cannot_be_used_twice():
    with pytest.raises(TypeError, match="turn_limit"):
        type("Other", (RollyardError,), {"code": "turn_limit"})


def _failure(kind: type[RollyardError]) -> Failure:
    return kind("why").failure("run")


@pytest.mark.parametrize("code", [code for code in STABLE if not issubclass(CODES[code], PolicyFailure)])
def test_only_policy_failures_can_carry_a_reward(code: str):
    failure = _failure(CODES[code])
    with pytest.raises(ValueError, match="no reward"):
        Ending(Outcome.FAILED, Score(0.0), failure)


def test_an_inconsistent_ending_is_refused():
    with pytest.raises(ValueError):
        Ending(Outcome.COMPLETED, Score(1.0), _failure(TurnLimit))
    with pytest.raises(ValueError):
        Ending(Outcome.TRUNCATED, Score(1.0), None)
    with pytest.raises(ValueError, match="trainable"):
        Ending(Outcome.TRUNCATED, None, _failure(TurnLimit), is_trainable=True)
    assert Ending(Outcome.TRUNCATED, Score(0.5), _failure(TurnLimit), is_trainable=True).score == Score(0.5)


def test_a_failure_without_a_model_call_is_not_blamed_on_the_policy():
    turned = _failure(TurnLimit).without_model_call()
    assert turned.blame is Blame.TASK
    assert not turned.trainable
    infra = _failure(CODES["engine_timeout"])
    assert infra.without_model_call() is infra


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_score_contains_only_finite_numbers(number: float):
    with pytest.raises(ValueError, match="finite"):
        Score(number)
    with pytest.raises(ValueError, match="finite"):
        Score(0.0, metrics={"m": number})
