"""Who drives RUN: the native loop, and the conversations that keep every token."""

from rollyard.agents.base import Agent, AgentContext, Conversation
from rollyard.agents.conversation import TextConversation, TokenConversation, converse
from rollyard.agents.native import NativeAgent
from rollyard.agents.registry import Agents

__all__ = [
    "Agent",
    "AgentContext",
    "Agents",
    "Conversation",
    "NativeAgent",
    "TextConversation",
    "TokenConversation",
    "converse",
]
