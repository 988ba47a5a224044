"""Chats: messages to prompt tokens, and generated text to reasoning, content and tool calls."""
