"""The scripted engine itself, which other tests rely on."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.core import Sampling
from rollyard.engines import EngineSpec, GenerateRequest, Kind, make_engine
from rollyard.engines.clients.http import HttpPool
from rollyard.testing.script import ByteTokenizer, FolderTokenizer, Reply, Rules, Turn
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.scripted_sampling import scripted_logprob
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.engines.parts import PROMPT, TOKENIZER, probed


def turn_of(text: str) -> Turn:
    return Turn(TOKENIZER.encode(text), TOKENIZER, array("i", TOKENIZER.encode("<|im_start|>assistant")), "s", 0)


@given(st.text())
def test_the_byte_tokenizer_loses_nothing(text: str) -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_rules_choose_by_marker_and_turn_from_the_prompt_alone() -> None:
    rules = Rules.read({"rules": [{"if": "task 7", "turns": ["a", {"text": "b", "ends": False}]}], "default": ["z"]})
    first = "<|im_start|>user\ntask 7<|im_end|>\n<|im_start|>assistant\n"
    second = f"{first}a<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    third = f"{second}b<|im_end|>\n<|im_start|>assistant\n"
    assert [rules(turn_of(text)).text for text in (first, second, third)] == ["a", "b", "b"]
    assert not rules(turn_of(second)).ends
    assert rules(turn_of("something else")).text == "z"


@pytest.mark.parametrize("bad", [{"rule": []}, {"default": []}, {"default": "text"}])
def test_a_script_with_a_mistake_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Rules.read(bad)


async def test_logprobs_depend_only_on_the_sequence(http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: "ab") as server:
        engine = await probed(server, http)
        generation = await engine.generate(GenerateRequest("r", PROMPT, Sampling(), 10))
        whole = [*PROMPT, *generation.token_ids]
        places = range(len(PROMPT), len(whole))
        expected = array("f", [scripted_logprob(whole[i - 1], i, whole[i]) for i in places])
        assert generation.logprobs == expected


async def test_tokens_arrive_at_their_rate_and_stop_at_the_limit(http: HttpPool) -> None:
    async with ScriptedEngine(lambda _: Reply("abcdef", tokens_per_s=1000.0)) as server:
        engine = await probed(server, http)
        generation = await engine.generate(GenerateRequest("r", PROMPT, Sampling(), 3))
        assert generation.finish_reason == "length" and list(generation.token_ids) == list(b"abc")


async def test_a_paused_engine_keeps_its_calls_until_it_is_resumed(http: HttpPool, web: aiohttp.ClientSession) -> None:
    async with ScriptedEngine(lambda _: "ok") as server:
        engine = await probed(server, http)
        async with web.post(f"{server.url}/pause?mode=keep"):
            pass
        task = asyncio.create_task(engine.generate(GenerateRequest("r", PROMPT, Sampling(), 10)))
        await server.busy()
        async with web.post(f"{server.url}/resume"):
            pass
        assert len((await task).token_ids) == 3


async def test_it_runs_as_a_separate_process(tmp_path: Path, http: HttpPool) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"rules": [{"if": "something", "turns": ["found"]}], "default": ["lost"]}))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollyard.testing.scripted_engine",
        "--script",
        str(script),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        hello = json.loads(await process.stdout.readline())
        engine = make_engine(EngineSpec("p", hello["url"], Kind.VLLM), http)
        await engine.probe()
        assert Path(engine.info.tokenizer) == tokenizer_dir(), "a service on this machine needs no --tokenizer"
        tokenizer = FolderTokenizer(tokenizer_dir())
        generation = await engine.generate(GenerateRequest("r", tokenizer.encode("something"), Sampling(), 10))
        assert tokenizer.decode(generation.token_ids) == "found<|im_end|>"
    finally:
        process.terminate()
        assert await process.wait() == 0
