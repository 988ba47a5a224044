"""Grammars: what an answer has to match, from request fields to the tokens that may come next. No torch."""
