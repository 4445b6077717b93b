"""Routing: which engine a session uses, engine health, and completions that survive the loss of an engine."""
