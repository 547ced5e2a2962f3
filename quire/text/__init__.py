"""Words: tokenizer, chat templates, detokeniser, stop strings. Knows nothing of weights, tensors or HTTP."""
