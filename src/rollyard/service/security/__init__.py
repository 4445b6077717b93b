"""Tokens, sessions' keys, access rules, TLS, and the limits of a call."""
