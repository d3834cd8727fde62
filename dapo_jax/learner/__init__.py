"""From an accepted batch to the next policy."""
