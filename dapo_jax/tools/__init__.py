"""Host: commands that read a run's records, or plan one."""
