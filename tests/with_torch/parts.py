# pyright: reportMissingImports=false
"""Tiny models with random weights, and their logprobs of a whole sequence in one plain forward pass."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollyard.embedded.batching import Batcher, Request, SampledToken, Settings
from rollyard.embedded.server import Engine
from rollyard.embedded.transformer.model import Model
from rollyard.embedded.transformer.sampling import SamplingRule, processed
from rollyard.engines import EngineSpec, Kind, make_engine, open_http
from rollyard.engines.clients.vllm import VllmEngine
from rollyard.testing.tokenizer_files import tokenizer_dir

VOCABULARY = 1280
CACHES: list[str] = ["ragged"]  # the last one is used (conftest.py)
SETTINGS: dict[str, Any] = {"cache_bytes": 64 << 20}  # of every batcher in these tests
END = 1
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.25,  # large: the distributions are far from flat
    "eos_token_id": END,
    "bos_token_id": None,
    "pad_token_id": None,
}

KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
    "mistral, a window of 8": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)),
}


def tiny(kind: str = "llama", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return KINDS[kind]().eval()


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_dir())


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(31 * n * n + 7 * n + 13 * salt + 2) % VOCABULARY for n in range(length)]


def ask(prompt: Sequence[int], max_tokens: int = 12, seed: int = 5, **fields: Any) -> Request:
    return Request(list(prompt), max_tokens, seed, **fields)


def checked(module: Any) -> Model:
    model = Model(module)
    model.check()
    return model


def batcher_of(module: Any, **settings: Any) -> Batcher:
    return Batcher(checked(module), Settings(**{"cache": CACHES[-1], **SETTINGS, **settings}))


def run(batcher: Batcher, requests: Iterable[Request], *, steps_between: int = 0) -> list[list[SampledToken]]:
    """Returns the sampled tokens of each request. Each joins `steps_between` steps after the previous one."""
    sampled: list[list[SampledToken]] = []
    places: dict[Any, int] = {}

    def step() -> None:
        for one in batcher.step():
            sampled[places[one.job]].append(one)

    for request in requests:
        places[batcher.add(request)] = len(sampled)
        sampled.append([])
        for _ in range(steps_between):
            step()
    while batcher.has_work:
        step()
    return sampled


def ids_of(steps: Iterable[SampledToken]) -> list[int]:
    return [step.drawn.token for step in steps]


def logprobs_of(steps: Iterable[SampledToken]) -> list[float]:
    return [step.drawn.logprob for step in steps]


@torch.no_grad()
def plain_logprobs(module: Any, request: Request, ids: Sequence[int]) -> list[float]:
    """Returns the model's own logprobs of these tokens after the prompt, with the request's sampling parameters."""
    whole = torch.tensor([[*request.prompt, *ids]])
    logits = module(input_ids=whole, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
    draw = SamplingRule(request.temperature, request.top_p, request.top_k, 0, 0)
    return processed(logits, [draw] * len(ids)).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()


@asynccontextmanager
async def served(module: Any, **fields: Any) -> AsyncGenerator[tuple[Engine, VllmEngine], None]:
    """Runs a server; also yields Rollyard's client for it."""
    async with Engine.serve(module, tokenizer(), **fields) as engine, open_http() as http:
        client = make_engine(EngineSpec("e1", engine.url, Kind.VLLM), http)
        assert isinstance(client, VllmEngine)
        await client.probe()
        try:
            yield engine, client
        finally:
            await client.close()
