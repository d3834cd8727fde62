"""Decoder-only transformers as pure functions over a parameter pytree."""
