"""Host: one page that explains a run, from what it wrote to its work directory."""
