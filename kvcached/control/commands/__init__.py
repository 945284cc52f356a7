"""The command line: one module per command, and in ``command_line`` what is the same for all."""
