"""One file for each command: its options, and its way from them to an exit code.

Nothing heavy is imported before a command runs, so that `--help` and bad usage answer at once.
"""
