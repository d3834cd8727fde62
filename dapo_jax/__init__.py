"""DAPO for language models, native to JAX. Importing the package loads nothing."""

__version__ = "0.1.0"
