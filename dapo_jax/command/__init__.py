"""From a command line to a config that fits together, and from an error to an exit code."""
