"""Measuring a model on held-out problems."""
