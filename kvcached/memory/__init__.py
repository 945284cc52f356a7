"""What a KV pool's memory is, and how the part behind free rows goes back to the operating system.

This package knows addresses, rows and pages; it knows no engine, no torch and no ledger. *When* rows are returned is
decided by the cap (``kvcached.capacity``) and by ``elastic``; *which* rows are free is known by the engine's plugin.
"""
