"""What pydantic found wrong -> one message with file and line."""

from __future__ import annotations

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from tuner.errors import InputError
from tuner.spec.document import Document

_MISSING = {
    "server": "Write `server: {model: org/name}`.",
    "server.model": "Write `model: org/name`, or a folder such as `model: ./models/mine`.",
    "search_space": "Write what to search, such as `search_space: {max-num-seqs: "
    "{low: 16, high: 512, log: true}}`.",
    "workload": "Write the load to measure under, such as `workload: {kind: synthetic, "
    "input_tokens: 512, output_tokens: 128, requests: 200, concurrency: 32}`.",
    "workload.requests": "Write how many requests are measured, such as `requests: 200`.",
    "workload.kind": "Write `kind: synthetic`, or `kind: trace` for a file of requests.",
}


def wrong(message: str, hint: str = "", at: str = "") -> PydanticCustomError:
    """For validators: `message` continues the name of the field ("must be ...").

    Args:
        message: what is wrong.
        hint: what to write instead.
        at: a key below the validated one that the message is about.
    """
    return PydanticCustomError("tuner", "{message}", {"message": message, "hint": hint, "at": at})


def first_problem(document: Document, error: ValidationError) -> InputError:
    """The problem that comes first in the file."""
    problems = [_problem(document, details) for details in error.errors(include_url=False)]
    line, message, hint = min(problems, key=lambda problem: problem[0])
    return InputError(f"{document.path}:{line}: {message}", hint)


def _problem(document: Document, details: ErrorDetails) -> tuple[int, str, str]:
    context = details.get("ctx", {})
    where = [*details["loc"], *([at] if (at := str(context.get("at", ""))) else [])]
    name = ".".join(str(step) for step in where)
    line = document.at(where).line
    if details["type"] == "missing":
        hint = _MISSING.get(name, "")
        return line, f"`{name}` is missing", hint
    message = str(context.get("message", details["msg"]))
    subject = f"`{name}` " if name else ""
    return line, f"{subject}{message}", str(context.get("hint", ""))
