"""Any OpenAI-style text endpoint: chat only. It returns no token ids, so its completions are never trainable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from rollyard.core.failure import EngineRefused
from rollyard.engines.base import EngineInfo, GenerateRequest
from rollyard.engines.clients.remote import EngineRequest, RemoteEngine
from rollyard.engines.clients.streaming import TokenStream


class OpenAIEngine(RemoteEngine):
    """For judges, and for evaluating models that are served elsewhere."""

    health_path = "/v1/models"

    async def probe(self) -> EngineInfo:
        card = await self._find_model()
        self._info = EngineInfo(
            model=card.id,
            max_context=card.max_model_len,
            logprobs_kind="unknown",
            api="v1/chat/completions",
            notes=("text only: its trajectories are not trainable",),
        )
        return self._info

    def _question(self, request: GenerateRequest, *, top: int, stream: bool) -> EngineRequest:
        self._refuse()

    async def _generate(self, request: GenerateRequest) -> NoReturn:
        self._refuse()

    def _take(self, stream: TokenStream, raw: bytes) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise EngineRefused(
            f"engine {self.spec.id} is a text endpoint and gives no tokens: use chat, or a vllm or sglang engine"
        )

    async def _abort(self, request_ids: Sequence[str]) -> None:
        """Does nothing: closing the connection is this API's only way to end a call."""
