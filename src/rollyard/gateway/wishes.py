"""Which parameters of a request count, and what the client is told of the others.

The task's sampling is the ceiling: a client may end a completion earlier and ask to see more of it, and changes nothing
that the task or the operator has fixed. What is granted:

- `stop`: given to the engine; whatever the engine makes of it, the client is told nothing behind the first such text.
- `seed`: mixed with the run's seed and the rollout: two requests with the same seed are alike in one rollout, and the
  members of a group, which may all send 42, are not.
- `logprobs`: those of the trace.
- no calls (`tool_choice: none`): a call is told as the text that the model wrote.
- a format (`response_format`): by the engine's structured output, where the task allows it (`structured_output`). A
  client that constrains what is sampled writes tokens in the policy's name, so such a trace is not trained on. That is
  also why it is off by default: a program could take its failures out of the training data.

Everything else that asks for something other than what happens is a warning, or a refusal if the session is strict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import orjson

from rollyard.core import Json, Sampling
from rollyard.engines.base import Kind
from rollyard.gateway.base import Ask, Problem, Wish
from rollyard.gateway.counts import weigh

OVERRULED = "the task's sampling counts"
UNKNOWN = "unknown here, and ignored"

MOST_WARNINGS, MOST_NAME_CHARS = 16, 64
MOST_SCHEMA_BYTES = 16 << 10
"""An engine compiles it, for all who share the engine."""

_CONSTRAINTS = frozenset(
    (
        *("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"),
        *("ebnf", "json_schema", "regex", "structural_tag"),
    )
)
CONSTRAINED = "constrained by the client"


@dataclass(frozen=True, slots=True)
class Granted:
    """How one completion is sampled and told. `warnings` are for the client, each `field: why`."""

    sampling: Sampling
    stop: tuple[str, ...] = ()
    seed: int | None = None  # the client's
    has_logprobs: bool = False
    tells_calls: bool = True
    untrainable: str = ""
    warnings: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # the fields that the warnings are about
    stop_at_engine: bool = True

    @property
    def asks_engine(self) -> bool:
        """Whether an engine is asked for something that it may not know."""
        return bool(self.stop or self.untrainable)

    def plain(self, sampling: Sampling, why: str) -> Granted:
        """The same for an engine that refuses what was asked for. What is told still ends at a stop text."""
        warnings = (*self.warnings, f"structured output: {why}") if self.untrainable else self.warnings
        return replace(self, sampling=sampling, untrainable="", warnings=warnings, stop_at_engine=False)


class Wishes:
    """What a session's requests are granted."""

    def __init__(self, sampling: Sampling, *, is_strict: bool, has_structured_output: bool) -> None:
        self._sampling = sampling
        self._is_strict = is_strict
        self._has_structured_output = has_structured_output

    def grant(self, ask: Ask, kind: Kind) -> Granted:
        """Problem if the session is strict and something is not granted."""
        granted = Granted(self._sampling)
        refused = dict.fromkeys(ask.overruled, OVERRULED) | dict.fromkeys(ask.unknown, UNKNOWN)
        for wish in ask.wishes:
            match wish.kind, wish.value:
                case "stop", list() as texts:
                    granted = replace(granted, stop=tuple(str(text) for text in texts))
                case "seed", int() as seed:
                    granted = replace(granted, seed=seed)
                case "logprobs", _:
                    granted = replace(granted, has_logprobs=True)
                case "no_calls", _:
                    granted = replace(granted, tells_calls=False)
                case "format", dict() as wanted:
                    why, extra = self._constraint(wanted, kind)
                    if why:
                        refused[wish.name] = why
                    else:
                        sampling = replace(self._sampling, extra={**self._sampling.extra, **extra})
                        granted = replace(granted, sampling=sampling, untrainable=f"{CONSTRAINED}: {wish.name}")
                case _:
                    if not self._is_the_tasks(wish):
                        refused[wish.name] = OVERRULED
        if refused and self._is_strict:
            name, why = next(iter(refused.items()))
            shown = _shown(name)
            message = f"Unsupported parameter: '{shown}': {why}. This session is strict; leave it out."
            raise Problem("invalid", message, code="unsupported_parameter", param=shown)
        return replace(granted, warnings=_warnings(refused), refused=tuple(refused))

    def _is_the_tasks(self, wish: Wish) -> bool:
        """Temperature and the like: the client may say what is so anyway."""
        return wish.kind == "same" and wish.value == getattr(self._sampling, wish.name, None)

    def _constraint(self, wanted: Mapping[str, Json], kind: Kind) -> tuple[str, dict[str, Json]]:
        """Why not, or what the engine is given."""
        if not self._has_structured_output:
            return "the task does not allow it (agent.options.structured_output)", {}
        if _CONSTRAINTS & self._sampling.extra.keys():
            return OVERRULED, {}
        schema = wanted.get("schema")
        if schema is not None and _is_long(schema):
            return f"its schema has more than {MOST_SCHEMA_BYTES} bytes", {}
        if kind is Kind.VLLM:
            return "", {"structured_outputs": {"json_object": True} if schema is None else {"json": schema}}
        if kind is Kind.SGLANG:
            return "", {"json_schema": json.dumps({"type": "object"} if schema is None else schema)}
        return f"engines of kind {kind} have no structured output", {}


def _is_long(schema: Json) -> bool:
    """Weighed first: to write a long one takes long, too."""
    return weigh(schema)[0] > MOST_SCHEMA_BYTES or len(orjson.dumps(schema)) > MOST_SCHEMA_BYTES


def _warnings(refused: Mapping[str, str]) -> tuple[str, ...]:
    warnings = [f"{_shown(name)}: {why}" for name, why in list(refused.items())[:MOST_WARNINGS]]
    if len(refused) > MOST_WARNINGS:
        warnings.append(f"and {len(refused) - MOST_WARNINGS} more")
    return tuple(warnings)


def _shown(name: str) -> str:
    """A client's own word, as it may stand in a header."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name[:MOST_NAME_CHARS])


def header_of(warnings: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
    """`x-rollyard-warnings`, if there are any."""
    return [(b"x-rollyard-warnings", "; ".join(warnings).encode("ascii", "replace"))] if warnings else []
