"""verl's options and training scripts in the words of this package."""
