"""The HTTP endpoint at which an agent program calls its model: three dialects, a session per rollout, exact tokens."""

from rollyard.gateway.app import GatewayApp
from rollyard.gateway.base import Problem
from rollyard.gateway.session import GatewaySession
from rollyard.gateway.session_opening import open_gateway

__all__ = ["GatewayApp", "GatewaySession", "Problem", "open_gateway"]
