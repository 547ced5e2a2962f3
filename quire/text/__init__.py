"""Text: tokenizer, chat templates, detokenizer, stop strings, tools, grammars. No weights, tensors or HTTP."""
