"""The device mesh and how arrays are sharded over it."""
