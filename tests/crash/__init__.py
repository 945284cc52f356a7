"""Processes that die or stop in mid-operation."""
