"""Environments and tools: what answers the turns of a policy, in worker processes."""
