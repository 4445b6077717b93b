"""Engines turn token ids into sampled token ids; the router finds one for each session."""

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
from rollyard.engines.openai import OpenAIEngine
from rollyard.engines.pool import EngineStats, EngineStatus, Health
from rollyard.engines.prorl import ProrlEngine
from rollyard.engines.router import Router, RouterSettings, make_engine
from rollyard.engines.sglang import SglangEngine
from rollyard.engines.vllm import VllmEngine
from rollyard.engines.wire import open_http

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
