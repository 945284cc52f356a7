"""Exit codes of the command line; users' scripts rely on them."""

OK = 0
PROBLEM = 1
USAGE = 2
UNAVAILABLE = 3
PARTIAL = 4
SUPERSEDED = 5
TIMED_OUT = 6
REJECTED = 7
INTERRUPTED = 130
"""By Ctrl-C; by another signal it is 128 and the signal's number, as shells count."""

OF_STATUS = {"accepted": OK, "unavailable": UNAVAILABLE, "partial": PARTIAL, "superseded": SUPERSEDED}
