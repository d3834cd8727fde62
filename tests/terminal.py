"""A terminal in the place of stderr."""

import io
import sys


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def look_at_a_terminal(monkeypatch):
    """From here on; pytest has a stderr of its own for the fixtures."""
    monkeypatch.setattr(sys, "stderr", _Terminal())
    return sys.stderr
