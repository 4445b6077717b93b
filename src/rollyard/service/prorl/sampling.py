"""Converts the `sampling_params` of a job to a task's sampling and limits.

    temperature, top_p, top_k                       the same
    max_output_tokens | max_tokens                  sampling.max_tokens: of one completion
    max_iterations                                  limits.max_turns
    max_model_len                                   limits.max_context
    min_p and the penalties                         sampling.extra: passed to the engine
    is_reasoning_task                               the agent gets no tools

All other parameters (model, api_key, custom_tokenizer, native_tool_calling…) configure how ProRL Agent calls its own
engine, and are ignored. Seeds are derived from the run, the rollout and the turn, as for all rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollyard.core import Json

_SAMPLING = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "max_tokens": ("max_output_tokens", "max_tokens", "max_completion_tokens"),
}
_LIMITS = {"max_turns": ("max_iterations",), "max_context": ("max_model_len",)}
_FLOATS = ("temperature", "top_p")
_EXTRA = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def task_fields_of(params: Mapping[str, Json]) -> dict[str, Json]:
    """The part of a task's body that the parameters define. Values are validated with the whole task."""
    sampling, limits = _select(params, _SAMPLING), _select(params, _LIMITS)
    if sampling.get("top_k") == 0:  # in vLLM, 0 also means all tokens
        sampling["top_k"] = -1
    extra = {name: params[name] for name in _EXTRA if params.get(name) is not None}
    if extra:
        sampling["extra"] = extra
    body: dict[str, Json] = {}
    if sampling:
        body["sampling"] = sampling
    if limits:
        body["limits"] = limits
    if params.get("is_reasoning_task") is True:
        body["agent"] = {"options": {"tools": []}}
    return body


def _select(params: Mapping[str, Json], names: Mapping[str, tuple[str, ...]]) -> dict[str, Json]:
    fields: dict[str, Json] = {}
    for field, prorl_names in names.items():
        value = next((params[name] for name in prorl_names if params.get(name) is not None), None)
        if value is not None:
            if isinstance(value, float) and value.is_integer() and field not in _FLOATS:
                value = int(value)
            fields[field] = value
    return fields
