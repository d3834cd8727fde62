import io
import sys

import pytest


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal in the place of stderr."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr
