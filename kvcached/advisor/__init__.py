"""The advisor: what the prefix-cache hit rate of an engine would be at any limit, estimated from its live traffic.

An engine tells when requests are admitted and released; out comes a curve of the hit rate over the limit. It watches
and never decides an eviction. ``docs/advisor.md`` tells how to read it and where the method comes from.
"""
