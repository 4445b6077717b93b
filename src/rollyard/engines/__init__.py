"""Engines turn prompt token ids into sampled token ids; the router selects one for each session."""

from rollyard.engines.base import (
    ChatReply,
    Engine,
    EngineInfo,
    EngineSpec,
    GenerateRequest,
    Generation,
    Kind,
    OnTokens,
    Role,
    Session,
    VersionSpan,
)
from rollyard.engines.clients.openai import OpenAIEngine
from rollyard.engines.clients.prorl import ProrlEngine
from rollyard.engines.clients.sglang import SglangEngine
from rollyard.engines.clients.transport import open_http
from rollyard.engines.clients.vllm import VllmEngine
from rollyard.engines.pool.pool import EngineStats, EngineStatus, Health
from rollyard.engines.routing.router import Router, RouterSettings, make_engine

__all__ = [
    "ChatReply",
    "Engine",
    "EngineInfo",
    "EngineSpec",
    "EngineStats",
    "EngineStatus",
    "GenerateRequest",
    "Generation",
    "Health",
    "Kind",
    "OnTokens",
    "OpenAIEngine",
    "ProrlEngine",
    "Role",
    "Router",
    "RouterSettings",
    "Session",
    "SglangEngine",
    "VersionSpan",
    "VllmEngine",
    "make_engine",
    "open_http",
]
