"""Prompt files and generated tasks in, tokenised prompts in a resumable order out."""
