"""Run-time control of how many idle prefix-cache tokens a running LLM engine keeps.

The operator's door is :mod:`kvcached.control`; importing this package imports nothing else.
"""
