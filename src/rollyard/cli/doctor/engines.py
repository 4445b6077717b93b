"""Checks of `rollyard doctor` for engines: whether each has the tokenizer that Rollyard renders prompts with.

The engines are those of the service, if one answers; otherwise those of the settings, which are probed from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollyard.cli.doctor.check import DoctorCheck

if TYPE_CHECKING:
    from rollyard.core import EngineSpec
    from rollyard.service.settings import Settings

SERVICE_TIMEOUT_S = 3.0
"""Timeout of the service's answer: most machines that are checked have none."""

TRUST = "if its tokenizer is the model's own, set trust_tokenizer for it (rollyard engines add --trust-tokenizer)"


async def engine_checks(settings: Settings) -> list[DoctorCheck]:
    served = await _served()
    engines = served if served is not None else await _probed(settings)
    return [tokenizer_check(engine) for engine in engines if engine.get("role") == "policy"]


def tokenizer_check(engine: Mapping[str, Any]) -> DoctorCheck:
    """Checks an engine as /v1/engines returns it."""
    name, is_verified = f"engine {engine.get('id')}", engine.get("tokenizer_verified")
    if engine.get("kind") == "openai":
        return DoctorCheck(name, "ok", "returns text only: there is no tokenizer to verify")
    if is_verified is None:
        return DoctorCheck(name, "warn", f"not probed: {engine.get('last_error') or 'it does not answer'}", "start it")
    if is_verified:
        return DoctorCheck(name, "ok", "its tokenizer is the one that prompts are rendered with")
    if engine.get("trust_tokenizer"):
        return DoctorCheck(name, "warn", "its tokenizer could not be verified, but is trusted (trust_tokenizer)", "")
    return DoctorCheck(name, "warn", "its tokenizer could not be verified: its traces are not trainable", TRUST)


async def _served() -> list[dict[str, Any]] | None:
    from rollyard.client import AsyncClient
    from rollyard.core import RollyardError

    try:
        async with asyncio.timeout(SERVICE_TIMEOUT_S), AsyncClient(timeout_s=SERVICE_TIMEOUT_S, retry_s=0.0) as client:
            return await client.engines()
    except (RollyardError, TimeoutError, OSError):
        return None


async def _probed(settings: Settings) -> list[dict[str, Any]]:
    from rollyard.service.build import all_engines

    return list(await asyncio.gather(*[_probe(spec, settings) for spec in all_engines(settings, ())]))


async def _probe(spec: EngineSpec, settings: Settings) -> dict[str, Any]:
    from rollyard.core import RollyardError
    from rollyard.engines import Router
    from rollyard.pipeline.renderers import Renderers
    from rollyard.service.machine import TOKENIZERS, vet
    from rollyard.service.schemas.records import engine_object

    renderers = Renderers(cache=settings.data_dir / TOKENIZERS)
    async with Router(vet=lambda engine: vet(engine, renderers)) as router:
        try:
            return engine_object(await router.add(spec), for_operator=True)
        except RollyardError as error:
            engine_info = {"id": spec.id, "kind": str(spec.kind), "role": str(spec.role), "last_error": error.detail}
            return {**engine_info, "tokenizer_verified": None}
