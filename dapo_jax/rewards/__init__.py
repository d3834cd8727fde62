"""From a response to its reward. Importing this package loads nothing: worker processes import it."""
