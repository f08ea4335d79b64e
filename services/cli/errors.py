"""What ends a command with a message: one line a problem, on standard error.

CliError
├── UserError  exit code 2: the user can set it right
└── Failure    exit code 1: something failed
"""

from __future__ import annotations

__all__ = ["CliError", "Failure", "UserError"]


class CliError(Exception):
    """Base of both; the message says what was wrong, what was expected and what to do."""

    exit_code = 1


class UserError(CliError):
    """The user can set it right."""

    exit_code = 2


class Failure(CliError):
    """Something failed."""
