"""Prompts in, sampled responses with their log-probabilities out."""
