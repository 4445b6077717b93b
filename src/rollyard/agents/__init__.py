"""Agents drive RUN: the native loop, agent programs behind the gateway, and the conversations that record every
token."""

from rollyard.agents.base import Agent, AgentContext, Conversation, SandboxNeeds
from rollyard.agents.conversation import TextConversation, TokenConversation, converse
from rollyard.agents.harness import HarnessAgent
from rollyard.agents.installation import AgentInstalls, InstallError
from rollyard.agents.native import NativeAgent
from rollyard.agents.preset import Preset, PresetError, read_preset
from rollyard.agents.registry import Agents

__all__ = [
    "Agent",
    "AgentContext",
    "AgentInstalls",
    "Agents",
    "Conversation",
    "HarnessAgent",
    "InstallError",
    "NativeAgent",
    "Preset",
    "PresetError",
    "SandboxNeeds",
    "TextConversation",
    "TokenConversation",
    "converse",
    "read_preset",
]
