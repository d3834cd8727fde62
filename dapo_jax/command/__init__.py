"""Host: from a command line to a valid config, and from an error to an exit code."""
