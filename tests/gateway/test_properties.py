"""Whatever a client does, the gateway records exactly what the engine samples.

A random program (program.py) calls a scripted engine over HTTP in each dialect (clients.py). The engine returns
anything: thinking, text, well-formed and malformed calls, truncated, in tokens that a tokenizer would not have chosen.
The engine's own record (engine_side.py) of its requests and replies is then compared with the traces:

- every completion is in exactly one owned span, token for token, after exactly the prompt that it was sampled from;
- a client that sends back what it received gets a prompt that begins with the sampled tokens;
- a client that only extends its history, however often it is interrupted or retries, has one trace;
- a retry costs the engine nothing; a completion that no client received, and only that, is not trained on.

ROLLYARD_EXAMPLES=200 runs that many examples of each property instead of a few.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollyard.gateway.app import CHAT
from rollyard.gateway.intake import read
from rollyard.pipeline import Renderers
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens.splice import NOT_EXTENDED
from tests.gateway.clients import CLIENTS, Style
from tests.gateway.engine_side import EngineSide, Plan
from tests.gateway.program import ENOUGH, Move, Program, Request
from tests.gateway.site import gateway

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("ROLLYARD_EXAMPLES", "10"))

# --- contents


plain = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
common = st.sampled_from(
    ["Yes.", "ok", "naïve 漢字 🚀", "a  b\n\n c", " x ", "e\u0301\u2028\x85"]
)  # repeats are likely
forged = st.sampled_from(["<|im_end|>\n<|im_start|>user\n", "<tool_call>", "</tool_response>", "</think>", "<think>"])
texts = st.one_of(common, plain, st.tuples(common, forged, common).map("".join))
calls = st.sampled_from(
    [
        '{"name": "shell", "arguments": {"command": "ls"}}',
        '{"name": "shell", "arguments": {"command": "ls"}}',
        '{"name": "shell", "arguments": {"command": "echo \\"é漢🚀\\" <think>", "all": false}}',
        '{"arguments": {"z": 1.0, "big": 9007199254740993, "a": [null, {"y": 1e-7}]}, "name": "shell"}',
        '{"name": "shell", "arguments": "{\\"command\\": \\"ls\\"}"}',
        '{"name": "shell", "arguments": ""}',
        '{"name": "nowhere"}',
        '{"name": "shell", "arguments": [1]}',  # this and the rest are malformed
        '{"name": "shell", "arguments": {"command": }}',
        '{"name": "", "arguments": {}}',
        "{nope}",
        "",
    ]
)


def planned(thought: str | None, is_thought: bool, text: str, called: list[str], is_closed: bool, tail: str) -> str:
    out = "" if thought is None else f"<think>\n{thought}\n" + ("</think>\n\n" if is_thought else "")
    out += text + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in called) + tail
    return out if is_closed or not called else out[: out.rindex("</tool_call>")]


content_texts = st.one_of(
    st.just(""), common, common, plain, st.sampled_from(["a</think>b", "<think>c", "d<tool_call>"])
)
plans = st.builds(
    Plan,
    st.builds(
        planned,
        st.one_of(st.none(), common, plain),
        st.sampled_from([True, True, True, False]),
        content_texts,
        st.lists(calls, max_size=3),
        st.sampled_from([True, True, True, False]),
        st.sampled_from(["", "", "", "\nafter"]),
    ),
    st.lists(st.one_of(st.integers(1, 3), st.integers(1, 60)), max_size=3).map(tuple),
    st.sampled_from([True, True, True, False]),
)

GOES_ON = ["next", "next", "next", "retry", "join", "interrupted"]
ANYTHING = [*GOES_ON, "again", "leave", "return", "branch", "edit", "strip", "compact", "pair"]


def moves(kinds: list[str]) -> st.SearchStrategy[list[Move]]:
    move = st.builds(
        Move,
        kind=st.sampled_from(kinds),
        text=texts,
        other=texts,
        plan=plans,
        second=plans,
        style=st.builds(Style, st.booleans(), st.booleans(), st.booleans(), st.booleans()),
        is_stream=st.booleans(),
        max_tokens=st.sampled_from([ENOUGH, ENOUGH, ENOUGH, 1, 2, 5, 9]),
        stall_after=st.sampled_from([0, 1, 2, 3, 7, ENOUGH]),
        which=st.integers(0, 7),
    )
    return st.lists(move, min_size=1, max_size=8)


# --- the properties


@dataclass(frozen=True)
class Speaks:
    """A renderer and its tokenizer."""

    renderer: str
    tokenizer: Path
    renderers: Renderers


@pytest.fixture(scope="module")
def renderers() -> Renderers:
    return Renderers()


@pytest.fixture(params=["chatml", "chatml of qwen3", "qwen3"])
def speaks(request: pytest.FixtureRequest, renderers: Renderers) -> Speaks:
    if request.param == "chatml":
        return Speaks("chatml", tokenizer_dir(), renderers)
    root = Path(os.environ.get("ROLLYARD_TOKENIZERS", "~/.cache/rollyard/tokenizers")).expanduser()
    if not (root / "qwen3" / "tokenizer.json").is_file():
        pytest.skip(f"no Qwen3 tokenizer here: scripts/get-tokenizer qwen3 {root / 'qwen3'}")
    return Speaks("chatml" if request.param == "chatml of qwen3" else "qwen3", root / "qwen3", renderers)


async def played(
    speaks: Speaks, dialect: str, steps: list[Move], *, reasoning: str = "as_sent"
) -> tuple[int, Mapping[str, Any]]:
    """Executes and checks all moves. Returns the number of traces, and the reasons of forks."""
    engine = EngineSide()
    async with (
        asyncio.timeout(90),
        gateway(
            engine,
            tokenizer=speaks.tokenizer,
            renderer=speaks.renderer,
            renderers=speaks.renderers,
            options={"reasoning_history": reasoning},
        ) as site,
        aiohttp.ClientSession() as http,
    ):
        engine.site = site
        program = Program(site, http, CLIENTS[dialect], engine)
        program.has_reasoning = reasoning == "as_sent"
        program.may_not_extend = speaks.renderer == "qwen3"
        for step in steps:
            await program.do(step)
        await site.session.close()
        program.check_traces()
        return len(site.session.traces()), site.forks


some = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.timeout(600)  # shrinking a failure takes long; each example has its own bound
@pytest.mark.parametrize("dialect", list(CLIENTS))
@some
@given(steps=moves(ANYTHING), reasoning=st.sampled_from(["as_sent", "as_sent", "keep"]))
def test_whatever_a_client_does_every_completion_has_one_owner(
    speaks: Speaks, dialect: str, steps: list[Move], reasoning: str
):
    asyncio.run(played(speaks, dialect, steps, reasoning=reasoning))


@pytest.mark.timeout(600)  # shrinking a failure takes long; each example has its own bound
@pytest.mark.parametrize("dialect", list(CLIENTS))
@some
@given(steps=moves(GOES_ON))
def test_a_client_that_only_extends_its_history_has_one_trace(speaks: Speaks, dialect: str, steps: list[Move]):
    traces, forks = asyncio.run(played(speaks, dialect, steps))
    if speaks.renderer == "qwen3":  # it does not extend a turn that ended within its thinking
        assert set(forks) <= {NOT_EXTENDED}
    else:
        assert not forks
    assert traces == 1 + sum(forks.values())


# --- minimal examples of earlier failures


def request_of(*contents: str) -> Request:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]
    return Request((), json.dumps({"messages": messages}).encode(), is_stream=False)


async def test_a_completion_continues_from_its_original_prompt():
    """By then the book has other tokens for the same history: the last that were sampled."""
    engine = EngineSide()
    async with gateway(engine) as site, aiohttp.ClientSession() as http:
        engine.site = site
        program = Program(site, http, CLIENTS["chat"], engine)
        engine.plans.append(Plan("yes yes"))
        await program.send(request_of("go"))
        engine.plans.append(Plan("a b c d", stall_after=3))
        leaving = asyncio.create_task(program.send(request_of("go", "yes yes", "more")))
        await site.engine.busy()
        leaving.cancel()
        await site.engine.idle()
        engine.plans.append(Plan("yes yes", cuts=(2,)))
        await program.send(request_of("go"))
        engine.plans.append(Plan(""))
        assert (await program.send(request_of("go", "yes yes", "more"))).content == "a b c d"
        first, _, again = engine.completions
        assert first.ids != again.ids
        program.check_traces()


async def test_two_retries_of_an_interrupted_request_receive_one_completion():
    engine = EngineSide()
    request = request_of("go")
    chat_request = read(CHAT, request.raw)
    async with gateway(engine) as site:
        engine.site = site
        engine.plans += [Plan("a b c d", stall_after=3), Plan("")]
        interrupted = await site.session.open(CHAT, chat_request, request.raw)
        await site.engine.busy()
        interrupted.leave()
        retries = (site.session.open(CHAT, chat_request, request.raw, retries=1) for _ in range(2))
        one, other = await asyncio.gather(*retries)
        assert one.exchange is other.exchange
        assert (await one.reply()).content == "a b c d"
        assert len(engine.completions) == 1
