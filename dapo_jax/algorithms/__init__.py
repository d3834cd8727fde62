"""The papers, as pure functions of arrays and floats."""
