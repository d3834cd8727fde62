"""The training loop and a step of it."""
