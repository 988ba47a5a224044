"""HTTP: OpenAI-compatible routes over an AsyncEngine."""
