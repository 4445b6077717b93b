"""Who drives RUN: the native loop, programs behind the gateway, and the conversations that keep every token."""

from rollyard.agents.base import Agent, AgentContext, Conversation, Outfit
from rollyard.agents.conversation import TextConversation, TokenConversation, converse
from rollyard.agents.harness import HarnessAgent
from rollyard.agents.install import AgentShelf, InstallError
from rollyard.agents.native import NativeAgent
from rollyard.agents.preset import Preset, PresetError, read_preset
from rollyard.agents.registry import Agents

__all__ = [
    "Agent",
    "AgentContext",
    "AgentShelf",
    "Agents",
    "Conversation",
    "HarnessAgent",
    "InstallError",
    "NativeAgent",
    "Outfit",
    "Preset",
    "PresetError",
    "TextConversation",
    "TokenConversation",
    "converse",
    "read_preset",
]
