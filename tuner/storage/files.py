"""Files and folders that only their owner can read: prompts and host names are in the logs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_folder(path: Path) -> None:
    """Make a folder, private like those above it that had to be made; one that exists is kept.

    Raises:
        OSError: it cannot be made.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(FOLDER_MODE, exist_ok=True)


def make_file(path: Path) -> None:
    """Make an empty private file; one that exists is kept as it is.

    Raises:
        OSError: it cannot be made.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))


def write_text(path: Path, text: str) -> None:
    """Write a private file as a whole: whoever reads it finds the old text or the new one.

    Raises:
        OSError: it cannot be written; the old text is still there.
    """
    draft = path.with_name(f".{path.name}.new")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
