"""HTTP: the OpenAI and Anthropic protocols as codecs around one internal request, and what an operator needs."""
