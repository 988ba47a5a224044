"""kakera: large hybrid language models with 2-bit weights and a 2-bit KV cache on small graphics cards."""

__version__ = "0.1.0"
