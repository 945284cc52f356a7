"""Run-time control of how many idle prefix-cache tokens a running LLM engine keeps.

Operators use :mod:`kvcached.control`; importing this package imports nothing else.
"""

__version__ = "0.1.0"
