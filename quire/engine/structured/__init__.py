"""Structured output: compiles grammars and computes the token masks of a step."""
