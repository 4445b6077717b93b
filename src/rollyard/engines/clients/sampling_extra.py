"""The keys of `sampling.extra` that an engine accepts: those that change how a token is sampled, and no others.

There is an allow-list per kind of engine. It excludes what Rollyard itself sets (the prompt, the model, the number of
choices, what is returned, how a call is named, cached and scheduled) and everything that changes the prompt or returns
something other than the sampled tokens: a trace would then record a call that was never made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollyard.core import Json, Sampling
from rollyard.core.engine import EngineSpec, Kind
from rollyard.core.failure import EngineRefused, SamplingInvalid

_COMMON = frozenset(
    ("frequency_penalty", "ignore_eos", "logit_bias", "min_p", "presence_penalty", "repetition_penalty")
)
_VLLM = _COMMON | {
    *("allowed_token_ids", "bad_words", "guided_choice", "guided_grammar", "guided_json", "guided_regex"),
    *("min_tokens", "structured_outputs", "thinking_token_budget"),
}
_SGLANG = _COMMON | {
    *("ebnf", "json_schema", "min_new_tokens", "no_stop_trim", "regex", "structural_tag"),
}
_OPENAI = _COMMON | {
    *("chat_template_kwargs", "enable_thinking", "max_completion_tokens", "min_tokens", "reasoning"),
    *("reasoning_effort", "response_format", "seed", "service_tier", "stop", "thinking", "top_k", "verbosity"),
}

CONSTRAINTS = frozenset(
    (
        *("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"),
        *("ebnf", "json_schema", "regex", "structural_tag"),
    )
)
"""Keys that constrain a completion's form from its first token on."""

ALLOWED: Mapping[Kind, frozenset[str]] = {
    Kind.VLLM: _VLLM,
    Kind.SGLANG: _SGLANG,
    Kind.OPENAI: _OPENAI,
    Kind.PRORL: _VLLM,
}

CHAT: Mapping[Kind, frozenset[str]] = {kind: allowed | _OPENAI for kind, allowed in ALLOWED.items()}
"""The same for chat, for which vLLM and SGLang use OpenAI's API."""


def check_extra(sampling: Sampling, kinds: Collection[Kind]) -> None:
    """Raises SamplingInvalid for a key that one of these kinds refuses; without `kinds`, for one that all refuse."""
    for kind in kinds:
        if unknown := sorted(sampling.extra.keys() - ALLOWED[kind]):
            raise SamplingInvalid(f"{_not_taken(unknown, kind)}; it takes {', '.join(sorted(ALLOWED[kind]))}")
    if not kinds and (unknown := sorted(sampling.extra.keys() - frozenset[str]().union(*ALLOWED.values()))):
        raise SamplingInvalid(f"no kind of engine takes {', '.join(unknown)} in sampling.extra")


def allowed_extra(sampling: Sampling, spec: EngineSpec, *, is_chat: bool = False) -> dict[str, Any]:
    """The extra keys of a call. Raises EngineRefused for an unsupported key; none is left out silently."""
    allowed = (CHAT if is_chat else ALLOWED)[spec.kind]
    if unknown := sorted(sampling.extra.keys() - allowed):
        raise EngineRefused(f"engine {spec.id}: {_not_taken(unknown, spec.kind)}")
    extra: dict[str, Json] = dict(sampling.extra)
    return extra


def _not_taken(unknown: Collection[str], kind: Kind) -> str:
    return f"sampling.extra of a {kind} engine may not have {', '.join(unknown)}"
