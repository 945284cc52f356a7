"""Recorded histories of many processes, and an independent checker of them."""
