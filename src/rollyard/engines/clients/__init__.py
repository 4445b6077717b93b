"""Clients of inference servers: vLLM, SGLang, OpenAI-style endpoints and the reference system's protocol."""
