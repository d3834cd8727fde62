"""The device mesh and how arrays lie on it."""
