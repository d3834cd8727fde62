"""From a response to its reward. Importing this package loads nothing else: worker processes import it."""
