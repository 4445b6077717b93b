"""One renderer per model, loaded once and checked against the engine that serves the model.

A tokenizer that differs from the engine's would make every token wrong without an error. Therefore the first use of a
renderer with an engine compares the two on a text that tokenizers encode differently.

`tokenizer_search` finds the files. A node of a fleet passes a `Fetch`, which gets them from its head.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

from rollyard.core.failure import TokenizerMismatch
from rollyard.engines.base import Engine
from rollyard.pipeline.tokenizer_search import TokenizerFiles, TokenizerSearch
from rollyard.tokens import Renderer, Tokenizers, load_renderer
from rollyard.tokens.tokenizer import is_hub_name

PROBE = "def f(x):\n\treturn x*3.14159  # naïve 漢字 🚀\r\n  'don''t'  1234567890 <|im_start|>"


Fetch = Callable[[Engine], Awaitable[TokenizerFiles | None]]
"""Returns the location of an engine's tokenizer, or None to search for it here."""


class Renderers:
    """Loads and caches renderers. Tokenizers that engines serve are stored below `cache`."""

    def __init__(self, fetch: Fetch | None = None, *, cache: Path | None = None) -> None:
        self._fetch = fetch
        self._search = TokenizerSearch(cache)
        self._files: dict[tuple[str, str, str], TokenizerFiles] = {}
        self._tokenizers = Tokenizers()
        self._loaded: dict[tuple[str, str, str], Renderer] = {}
        self._locks: defaultdict[tuple[str, str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, engine: Engine) -> Renderer:
        """Returns the engine's renderer. Raises TokenizerNotFound, or an error of the files or of the renderer."""
        spec, key = engine.spec, _key(engine)
        renderer = self._loaded.get(key)
        if renderer is not None:
            return renderer
        async with self._locks[key]:  # a download for one engine does not delay the others
            if key not in self._loaded:
                fetched = await self._fetch(engine) if self._fetch is not None else None
                files = self._files[key] = fetched or await self._search.find(engine)
                self._loaded[key] = await asyncio.to_thread(self._load, files, spec.renderer, engine.info.model)
        return self._loaded[key]

    def files_of(self, engine: Engine) -> TokenizerFiles | None:
        """The files of an engine's tokenizer, if they have been found."""
        return self._files.get(_key(engine))

    async def check(self, engine: Engine) -> bool:
        """Compares our tokens with the engine's; False if it cannot tokenize. Raises TokenizerMismatch."""
        renderer = await self.of(engine)
        engine_tokens = await engine.tokenize(PROBE)
        if engine_tokens is None:
            return False
        own_tokens = renderer.encode(PROBE)
        if list(engine_tokens) != own_tokens:
            first = next(
                (i for i, (a, b) in enumerate(zip(own_tokens, engine_tokens, strict=False)) if a != b),
                min(len(own_tokens), len(engine_tokens)),
            )
            raise TokenizerMismatch(
                f"engine {engine.spec.id} and tokenizer {self._files[_key(engine)].name!r} "
                f"disagree from token {first} of the probe text on"
            )
        return True

    def _load(self, files: TokenizerFiles, renderer: str, model: str) -> Renderer:
        return load_renderer(self._tokenizers.load(files.folder, files.name), model, renderer)


def _key(engine: Engine) -> tuple[str, str, str]:
    """Engines with the same tokenizer share a renderer. A folder of another machine may have other files there."""
    spec, info = engine.spec, engine.info
    hub_name = info.model_source if is_hub_name(info.model_source) else ""
    return spec.tokenizer or info.tokenizer or hub_name or f"of engine {spec.id}", spec.renderer, info.model
