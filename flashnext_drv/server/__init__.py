"""The OpenAI-compatible HTTP server over the engine (extra: server)."""
