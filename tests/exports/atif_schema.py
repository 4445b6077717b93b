"""ATIF v1.7 as strict types, written from Harbor's RFC 0001: for tests of what Rollyard writes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Agent(Strict):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class ToolCall(Strict):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class Result(Strict):
    source_call_id: str | None = None
    content: Content | None = None
    extra: dict[str, Any] | None = None


class Observation(Strict):
    results: list[Result]


class Metrics(Strict):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: dict[str, Any] | None = None


class Step(Strict):
    step_id: Annotated[int, Field(ge=1)]
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    model_name: str | None = None
    reasoning_content: str | None = None
    message: Content
    tool_calls: list[ToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check(self) -> Step:
        if self.timestamp is not None:
            datetime.fromisoformat(self.timestamp)
        of_model = (self.model_name, self.reasoning_content, self.tool_calls, self.metrics)
        assert self.source == "agent" or of_model == (None, None, None, None), "a field of the model in another step"
        if self.source == "agent" and self.llm_call_count == 0:
            assert self.metrics is None and self.reasoning_content is None, "nothing was sampled"
        ids = {call.tool_call_id for call in self.tool_calls or ()}
        for result in self.observation.results if self.observation else ():
            assert result.source_call_id is None or result.source_call_id in ids, "a result without its call"
        return self


class FinalMetrics(Strict):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None
    extra: dict[str, Any] | None = None


class Trajectory(Strict):
    schema_version: Literal["ATIF-v1.7"]
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: Agent
    steps: Annotated[list[Step], Field(min_length=1)]
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check(self) -> Trajectory:
        assert [step.step_id for step in self.steps] == list(range(1, len(self.steps) + 1)), "numbered from 1"
        return self
