"""MCP: servers inside and outside the sandbox, their tools, and the proxy for programs inside."""
