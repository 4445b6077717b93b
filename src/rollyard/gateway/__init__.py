"""The LLM door that an agent program talks to: three dialects, one session per rollout, every token exact."""

from rollyard.gateway.app import GatewayApp
from rollyard.gateway.base import Problem
from rollyard.gateway.opening import open_gateway
from rollyard.gateway.session import GatewaySession

__all__ = ["GatewayApp", "GatewaySession", "Problem", "open_gateway"]
