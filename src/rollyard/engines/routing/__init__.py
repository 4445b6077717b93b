"""Routing: which engine a session uses, admission, health, and completions that survive an engine."""
