"""The LLM door that an agent program talks to: three dialects, one session per rollout, every token exact."""

from rollyard.gateway.app import GatewayApp
from rollyard.gateway.base import Problem
from rollyard.gateway.session import GatewaySession
from rollyard.gateway.session_opening import open_gateway

__all__ = ["GatewayApp", "GatewaySession", "Problem", "open_gateway"]
