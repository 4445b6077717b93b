"""Decides which parameters of a request are granted, and makes the warnings about the others.

The task's sampling is the limit: a client may end a completion earlier and request more information about it; it
changes nothing that the task or the operator has fixed. These are granted:

- `stop`: passed to the engine. Even if the engine ignores it, the client receives nothing after the first such text.
- `seed`: combined with the run's seed and the rollout: two requests with the same seed are alike in one rollout, but
  not in the members of a group, which may all send 42.
- `logprobs`: those of the trace. `top_logprobs`: requested from the engine, and not recorded.
- no calls (`tool_choice: none`): a call is returned as the text that the model wrote.
- calls (`tool_choice`: required, or one tool) and a format (`response_format`): by the engine's structured output, if
  the task allows it (`structured_output`); calls only if the renderer has their grammar. A client that constrains
  sampling determines tokens that the policy would otherwise choose, so such a trace is not trained on. It is off by
  default for the same reason: a program could remove its failures from the training data.

Any other parameter that would change the result is reported as a warning, or refused if the session is strict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import orjson

from rollyard.core import Json, Sampling
from rollyard.engines.base import Kind
from rollyard.engines.clients.sampling_extra import CONSTRAINTS
from rollyard.gateway.base import ChatRequest, Problem, RequestParameter
from rollyard.gateway.counts import weigh
from rollyard.tokens.base import ToolCall, ToolSchema

OVERRULED = "the task's sampling applies"
UNKNOWN = "unknown here, and ignored"

MOST_WARNINGS, MOST_NAME_CHARS = 16, 64
MOST_SCHEMA_BYTES = 16 << 10
"""An engine compiles the schema, at the expense of all its clients."""

CONSTRAINED = "constrained by the client"
_WITH_TOPS = (Kind.VLLM, Kind.SGLANG)


@dataclass(frozen=True, slots=True)
class GrantedParameters:
    """How one completion is sampled and returned. `warnings` are for the client, each `field: why`."""

    sampling: Sampling
    stop: tuple[str, ...] = ()
    seed: int | None = None  # the client's
    has_logprobs: bool = False
    top_logprobs: int = 0
    returns_calls: bool = True
    untrainable: str = ""
    constraint: str = ""  # the parameter that constrains the completion
    has_to_call: bool = False
    warnings: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # the fields that the warnings are about
    stop_at_engine: bool = True

    @property
    def has_engine_parameters(self) -> bool:
        """Whether the engine's request contains a parameter that the engine may not support."""
        return bool(self.stop or self.untrainable or self.top_logprobs)

    def warnings_of(self, calls: Sequence[ToolCall]) -> tuple[str, ...]:
        """Returns the warnings, with one more if the engine did not apply the constraint."""
        is_satisfied = not self.has_to_call or bool(calls)
        return self.warnings if is_satisfied else (*self.warnings, f"{self.constraint}: the model called no tool")

    def plain(self, sampling: Sampling, why: str) -> GrantedParameters:
        """Returns a copy for an engine that refused these parameters. The reply still ends at a stop text."""
        warnings = list(self.warnings)
        if self.constraint:
            warnings.append(f"{self.constraint}: {why}")
        if self.top_logprobs:
            warnings.append(f"top_logprobs: {why}")
        return replace(
            self,
            sampling=sampling,
            untrainable="",
            constraint="",
            has_to_call=False,
            warnings=tuple(warnings),
            stop_at_engine=False,
            top_logprobs=0,
        )


class ParameterRules:
    """Grants the parameters of a session's requests. `call_grammar` is the renderer's."""

    def __init__(
        self,
        sampling: Sampling,
        *,
        is_strict: bool,
        has_structured_output: bool,
        call_grammar: Callable[[Sequence[str], bool], str | None] = lambda names, is_one: None,
    ) -> None:
        self._call_grammar = call_grammar
        self._sampling = sampling
        self._is_strict = is_strict
        self._has_structured_output = has_structured_output

    def grant(self, request: ChatRequest, kind: Kind) -> GrantedParameters:
        """Raises Problem if the session is strict and a parameter is not granted."""
        granted = GrantedParameters(self._sampling)
        refused = dict.fromkeys(request.overruled, OVERRULED) | dict.fromkeys(request.unknown, UNKNOWN)
        for wish in request.wishes:
            match wish.kind, wish.value:
                case "stop", list() as texts:
                    granted = replace(granted, stop=tuple(str(text) for text in texts))
                case "seed", int() as seed:
                    granted = replace(granted, seed=seed)
                case "logprobs", _:
                    granted = replace(granted, has_logprobs=True)
                case "top_logprobs", int() as top:
                    if kind in _WITH_TOPS:
                        granted = replace(granted, has_logprobs=True, top_logprobs=top)
                    else:
                        refused[wish.name] = f"engines of kind {kind} give none"
                case "no_calls", _:
                    granted = replace(granted, returns_calls=False)
                case ("format", dict()) | ("calls", str()):
                    why, extra = self._constraint(wish, request, kind)
                    if why or granted.constraint:
                        refused[wish.name] = why or f"{granted.constraint} constrains the completion already"
                    else:
                        granted = self._constrained(granted, wish, extra)
                case _:
                    if not self._is_the_tasks(wish):
                        refused[wish.name] = OVERRULED
        if refused and self._is_strict:
            name, why = next(iter(refused.items()))
            shown = _shown(name)
            message = f"Unsupported parameter: '{shown}': {why}. This session is strict; leave it out."
            raise Problem("invalid", message, code="unsupported_parameter", param=shown)
        return replace(granted, warnings=_warnings(refused), refused=tuple(refused))

    def _is_the_tasks(self, wish: RequestParameter) -> bool:
        """Temperature and the like are accepted if they equal the task's."""
        return wish.kind == "same" and wish.value == getattr(self._sampling, wish.name, None)

    def _constrained(
        self, granted: GrantedParameters, wish: RequestParameter, extra: Mapping[str, Json]
    ) -> GrantedParameters:
        return replace(
            granted,
            sampling=replace(self._sampling, extra={**self._sampling.extra, **extra}),
            untrainable=f"{CONSTRAINED}: {wish.name}",
            constraint=wish.name,
            has_to_call=wish.kind == "calls",
        )

    def _constraint(self, wish: RequestParameter, request: ChatRequest, kind: Kind) -> tuple[str, dict[str, Json]]:
        """Returns why it is not granted, or the parameters for the engine."""
        names = _names(request.tools)
        if wish.kind == "calls" and wish.value and wish.value not in names:
            message = f"Invalid value: '{wish.name}' names a tool that is not in 'tools'."
            raise Problem("invalid", message, code="invalid_value", param=wish.name)
        if not self._has_structured_output:
            return "the task does not allow it (agent.options.structured_output)", {}
        if CONSTRAINTS & self._sampling.extra.keys():
            return OVERRULED, {}
        if kind not in (Kind.VLLM, Kind.SGLANG):
            return f"engines of kind {kind} have no structured output", {}
        if wish.kind == "calls":
            return self._calls(names, str(wish.value), kind)
        schema = wish.value.get("schema") if isinstance(wish.value, dict) else None
        if schema is not None and _is_long(schema):
            return f"its schema has more than {MOST_SCHEMA_BYTES} bytes", {}
        if kind is Kind.VLLM:
            return "", {"structured_outputs": {"json_object": True} if schema is None else {"json": schema}}
        return "", {"json_schema": json.dumps({"type": "object"} if schema is None else schema)}

    def _calls(self, names: Sequence[str], name: str, kind: Kind) -> tuple[str, dict[str, Json]]:
        if not names:
            return "no tools are offered", {}
        grammar = self._call_grammar([name] if name else names, bool(name))
        if grammar is None:
            return "there is no grammar for such a call in this model's format", {}
        if len(grammar) > MOST_SCHEMA_BYTES:
            return f"its grammar has more than {MOST_SCHEMA_BYTES} bytes", {}
        return "", {"structured_outputs": {"grammar": grammar}} if kind is Kind.VLLM else {"ebnf": grammar}


def _names(tools: Sequence[ToolSchema]) -> list[str]:
    functions = [tool.get("function") for tool in tools]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def _is_long(schema: Json) -> bool:
    """Measures before it serializes, since serializing a long schema is slow."""
    return weigh(schema)[0] > MOST_SCHEMA_BYTES or len(orjson.dumps(schema)) > MOST_SCHEMA_BYTES


def _warnings(refused: Mapping[str, str]) -> tuple[str, ...]:
    warnings = [f"{_shown(name)}: {why}" for name, why in list(refused.items())[:MOST_WARNINGS]]
    if len(refused) > MOST_WARNINGS:
        warnings.append(f"and {len(refused) - MOST_WARNINGS} more")
    return tuple(warnings)


def _shown(name: str) -> str:
    """Makes a client's name safe for a header."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name[:MOST_NAME_CHARS])


def header_of(warnings: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
    """Returns the `x-rollyard-warnings` header, if there are any."""
    return [(b"x-rollyard-warnings", "; ".join(warnings).encode("ascii", "replace"))] if warnings else []
