"""Text: tokenizer, incremental detokenizer, stop strings."""
