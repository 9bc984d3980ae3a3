"""Traces: prompts with the tokens that the target produced, and what can be read off them."""
