"""`sampling.extra` changes how tokens are sampled, and no parameter that Rollyard sets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rollyard.core import Sampling
from rollyard.core.failure import EngineRefused, SamplingInvalid
from rollyard.engines import EngineSpec, Kind, make_engine
from rollyard.engines.base import GenerateRequest
from rollyard.engines.clients.http import HttpPool
from rollyard.engines.clients.sampling_extra import ALLOWED, check_extra
from rollyard.engines.pool.pool import Health
from rollyard.testing.script import Reply, Rules
from rollyard.testing.scripted_engine import ScriptedEngine
from tests.engines.parts import PROMPT, complete, probed, routed

RESERVED = (
    *("prompt", "prompt_ids", "token_ids", "input_ids", "prompt_embeds", "input_embeds", "messages", "text", "model"),
    *("n", "best_of", "echo", "prompt_logprobs", "logprobs", "top_logprobs", "return_token_ids", "stream"),
    *("stream_options", "max_tokens", "max_new_tokens", "temperature", "top_p", "stop_token_ids", "sampling_seed"),
    *("request_id", "rid", "cache_salt", "extra_key", "priority", "truncate_prompt_tokens", "add_special_tokens"),
    *("kv_transfer_params", "lora_path", "sampling_params", "return_logprob", "logprob_start_len", "detokenize"),
)
SERVERS: dict[str, dict[str, Any]] = {
    "generate": {},
    "completions": {"is_scale_out": False},
    "sglang": {"dialect": "sglang"},
    "prorl": {"dialect": "prorl"},
}
KINDS = {"sglang": Kind.SGLANG, "prorl": Kind.PRORL}


def request(**extra: Any) -> GenerateRequest:
    return GenerateRequest("r1", PROMPT, Sampling(extra=extra), 20)


@pytest.mark.parametrize("server", SERVERS)
async def test_reserved_parameters_cannot_be_replaced(http: HttpPool, server: str) -> None:
    async with ScriptedEngine(**SERVERS[server]) as engine:
        client = make_engine(EngineSpec("e1", engine.url, KINDS.get(server, Kind.VLLM)), http)
        before = len(engine.requests)
        for key in RESERVED:
            with pytest.raises(EngineRefused, match=rf"may not have {key}\n"):
                await client.generate(request(**{key: [1, 2, 3]}))
        assert len(engine.requests) == before, "nothing was sent"


async def test_extra_keys_do_not_replace_parameters_of_the_completions_api(http: HttpPool) -> None:
    async with ScriptedEngine(is_scale_out=False) as server:
        client = await probed(server, http)
        asked = GenerateRequest("r1", PROMPT, Sampling(extra={"min_p": 0.1}), 20, 5, (), "s1", "salt", 2)
        await client.generate(asked)
        sent = server.calls[-1].body
        assert (sent["prompt"], sent["model"], sent["request_id"]) == (PROMPT, "scripted", "r1")
        assert (sent["cache_salt"], sent["priority"], sent["min_p"], sent["max_tokens"]) == ("salt", -2, 0.1, 20)


@pytest.mark.parametrize("kind", list(Kind))
def test_no_kind_of_engine_accepts_a_reserved_key(kind: Kind) -> None:
    for key in set(RESERVED):
        with pytest.raises(SamplingInvalid, match=key):
            check_extra(Sampling(extra={key: 1}), {kind})
    for key in ALLOWED[kind]:
        check_extra(Sampling(extra={key: 1}), {kind})


def test_every_kind_of_the_policy_must_accept_a_tasks_keys() -> None:
    sampling = Sampling(extra={"min_new_tokens": 3})
    check_extra(sampling, {Kind.SGLANG})
    check_extra(sampling, ())  # an engine that accepts it may be added
    with pytest.raises(SamplingInvalid, match=r"vllm engine may not have min_new_tokens; it takes .*min_tokens"):
        check_extra(sampling, {Kind.SGLANG, Kind.VLLM})
    with pytest.raises(SamplingInvalid, match="no kind of engine takes nonsense"):
        check_extra(Sampling(extra={"nonsense": 1}), ())


@pytest.mark.parametrize("is_scale_out", [True, False])
async def test_a_reply_with_several_choices_does_not_take_the_engine_down(is_scale_out: bool) -> None:
    script = Rules(default=(Reply("two", fault="two_choices"),))
    async with ScriptedEngine(is_scale_out=is_scale_out) as server, routed(server) as router:
        server.script = script
        async with router.session("default", "s1") as session:
            for _ in range(router.settings.trip_after + 2):
                with pytest.raises(EngineRefused, match="2 choices where one was asked for"):
                    await complete(session)
        (status,) = router.list()
        assert (status.health, status.stats.failures) == (Health.UP, 0)
        server.script = Rules(default=(Reply("fine"),))
        async with router.session("default", "s2") as session:
            assert (await complete(session)).token_ids


def test_the_documentation_lists_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "connect-engines.md").read_text()
    rows = dict(
        line.strip("|").split("|")[:2]
        for line in page.partition("## Sampling options")[2].splitlines()
        if line.startswith(("| every kind", "| `"))
    )
    listed = {name.strip(): set(re.findall(r"`(\w+)`", keys)) for name, keys in rows.items()}
    for kind in Kind:
        own = next(keys for name, keys in listed.items() if f"`{kind}`" in name and "min_p" not in keys)
        assert own | listed["every kind"] == ALLOWED[kind], kind
