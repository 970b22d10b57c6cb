"""What can go wrong for reasons the user must mend.

A trial that fails (out of memory, a refused configuration, a hang) is not an exception but
a value, `tuner.types.Failure`: the search lives on it. Exceptions are for what stops the
whole program::

    TunerError                 base: a message and a hint
    ├── InputError             exit 2: the space file, an option, an unknown study
    ├── EnvironmentProblem     exit 3: no vLLM, no model, port, disk, a locked study
    └── NoResult               exit 4: the study has no configuration that worked

`Interrupted` stands apart (exit 130): the user asked the program to stop.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `tuner` command."""

    OK = 0
    INPUT = 2
    ENVIRONMENT = 3
    NO_RESULT = 4
    INTERRUPTED = 130


class TunerError(Exception):
    """A problem the user can mend.

    Args:
        message: what is wrong, with the file and line where there is one.
        hint: what to do next, in the imperative; empty if the message says it already.
    """

    exit_code = ExitCode.ENVIRONMENT

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class InputError(TunerError):
    """The user's input cannot be used: a bad space file, option, or study name."""

    exit_code = ExitCode.INPUT


class EnvironmentProblem(TunerError):
    """The machine does not provide what the study needs: vLLM, the model, a port, the disk."""

    exit_code = ExitCode.ENVIRONMENT


class NoResult(TunerError):
    """No configuration of the study worked, so there is nothing to hand out."""

    exit_code = ExitCode.NO_RESULT


class Interrupted(Exception):
    """The user asked the program to stop (Ctrl-C, SIGTERM, SIGHUP)."""
