"""The embedded engine: real processes, a real gloo group and real blocks, in the shape of the schedulers it stands for.

The update path is tested and shown on it where no serving engine is installed. ``python -m kvcached.rig --help`` tells
how to run it.
"""
