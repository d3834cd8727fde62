"""DAPO for language models, native to JAX. Importing the package loads nothing."""
