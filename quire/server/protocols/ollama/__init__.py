"""Ollama's API: chat, generate, model catalog and pull."""
