"""Models and data sets of the Hugging Face hub."""
