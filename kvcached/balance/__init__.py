"""One memory budget for several engines, divided by what their prefix caches are worth.

A supervisor outside of the engines reads their advisors' curves and publishes limits or caps, as a person could.
Engines know nothing of each other, nor of it. What is decided is pure and in ``decision``; ``supervisor`` does it.
``docs/balance.md`` tells when it helps, and why it decides so.
"""
