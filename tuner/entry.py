"""Entry point of the command `tuner`: quiet also if it is stopped while it still loads."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback from the first moment on."""
    try:
        _open_missing_streams()
        from tuner.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _open_missing_streams() -> None:
    """A shell may start a program with its output closed (`>&-`); what is said then is lost."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the whole run)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


if __name__ == "__main__":
    main()
