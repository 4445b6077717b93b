"""Rollyard: rollouts for reinforcement learning of LLM agents, as a service."""

__version__ = "0.1.0"
