"""Exit codes, and the error that ends a command with one clear line."""

HOLDS = 0
FAILS = 1
BAD_USAGE = 2
BROKE = 3
INTERRUPTED = 130
"""As shells have it for Ctrl-C: 128 and the signal's number."""


class UsageError(ValueError):
    """Bad input: the message is one line that says what would be right. Exit code 2."""
