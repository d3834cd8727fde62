"""The memory and the time of a step, before a machine is rented: its programs, compiled ahead of time."""
