"""Protocol codecs: OpenAI, Anthropic and Ollama."""
