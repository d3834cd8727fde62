"""The parts of a run and what they are built from."""
