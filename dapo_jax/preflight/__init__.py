"""The memory and the time of a step, before a machine is hired: its programs, compiled ahead of time."""
