"""One desired value for many machines: documents, the agent on each node that applies them, and where they are kept.

Nothing here runs inside an engine, and the command line imports none of it unless ``--fleet`` is given.
"""
