"""Protocol codecs: OpenAI, Anthropic, Ollama and llama.cpp."""
