"""Which faults a launch has: SIMULATED_FAULT, read and narrowed down to this launch.

`oom_runtime after=8 when='max-num-seqs > 64'; ignore_term` are two faults, the first of them
for some configurations only. Names and options: `fault_kinds`.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from tuner import expressions
from tuner.engine.simulated.server.command_line import ServeCommand
from tuner.engine.simulated.server.environment import FAULT
from tuner.engine.simulated.server.fault_kinds import CAUSES, COMMON, KILLS, KINDS, Option
from tuner.engine.simulated.server.vllm_flags import known_flags
from tuner.engine.simulated.settings import EngineSettings
from tuner.errors import InputError
from tuner.types import FailureCause, JsonValue, Stage

_STAGE_OPTION = "stage"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault with all its options."""

    name: str
    options: Mapping[str, Option]

    def number(self, option: str) -> float:
        """The value of an option that takes a number."""
        return float(self.options[option])

    def text(self, option: str) -> str:
        """The value of any option."""
        return str(self.options[option])

    @property
    def cause(self) -> FailureCause | None:
        """For one of vLLM's own ways of failing."""
        return FailureCause(self.name) if self.name in set(CAUSES) else None

    @property
    def stage(self) -> Stage:
        """Where it comes."""
        return Stage(self.text(_STAGE_OPTION))

    @property
    def exit_code(self) -> int:
        """Of a failure: vLLM's, unless it is given."""
        if given := self.text("exit"):
            return int(given)
        if self.stage is Stage.LOAD:
            return 0
        return 2 if self.cause is FailureCause.BAD_CONFIG else 1


class Faults:
    """The faults of one launch."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._by_name = {fault.name: fault for fault in faults}

    def get(self, name: str) -> Fault | None:
        """The fault of that name, if this launch has it."""
        return self._by_name.get(name)

    def has(self, name: str) -> bool:
        """Whether this launch has it."""
        return name in self._by_name

    def of_cause(self, *, under_load: bool) -> Fault | None:
        """The first of vLLM's own ways of failing, while starting or under load."""
        for fault in self._by_name.values():
            if fault.cause is not None and (fault.stage is Stage.LOAD) is under_load:
                return fault
        return None

    def after(self, name: str, answered: int) -> bool:
        """Whether a fault that comes after some completions has come."""
        fault = self._by_name.get(name)
        if fault is None or (name in KILLS and fault.stage is not Stage.LOAD):
            return False
        return answered >= fault.number("after")

    def kill_in_start(self) -> Fault | None:
        """The kill of a process that comes while the server starts."""
        kills = (self._by_name[name] for name in KILLS if name in self._by_name)
        return next((fault for fault in kills if fault.stage is not Stage.LOAD), None)

    def strikes(self, name: str, request: int) -> bool:
        """Whether a fault of answers is in the answer to completion number `request` (from 0)."""
        fault = self._by_name.get(name)
        if fault is None:
            return False
        since = request - int(fault.number("after"))
        return since >= 0 and since % int(fault.number("every")) == 0


def read_faults(text: str) -> list[Fault]:
    """Read SIMULATED_FAULT.

    Raises:
        InputError: a name or an option that does not exist, or a value that is none.
    """
    return [_fault(shlex.split(part)) for part in text.split(";") if part.strip()]


def faults_of_launch(
    faults: Sequence[Fault], command: ServeCommand, settings: EngineSettings | None
) -> Faults:
    """Those of `faults` that this launch has; counts it in the files of `once`.

    Raises:
        InputError: a condition cannot be read, or a file not be written.
    """
    values = _values(command, settings)
    return Faults([f for f in faults if _applies(f, values) and _counts(f)])


def _fault(words: list[str]) -> Fault:
    name, *given = words
    if name not in KINDS:
        raise InputError(f"{FAULT}: there is no fault `{name}`", f"One of {', '.join(KINDS)}.")
    options = {**COMMON, **KINDS[name].options}
    for word in given:
        option, _, text = word.partition("=")
        if option not in options:
            raise InputError(
                f"{FAULT}: `{name}` has no option `{option}`", f"One of {', '.join(options)}."
            )
        options[option] = _value(name, option, text, options[option])
    if "file" in options and not options["file"]:
        raise InputError(f"{FAULT}: `{name}` needs file=PATH")
    return Fault(name, options)


def _value(name: str, option: str, text: str, default: Option) -> Option:
    if isinstance(default, str):
        if option == _STAGE_OPTION and text not in set(Stage):
            raise InputError(f"{FAULT}: there is no stage `{text}`", f"One of {', '.join(Stage)}.")
        if option == "exit" and not _is_exit_code(text):
            raise InputError(f"{FAULT}: `{name} exit` takes a number from -64 to 255, not {text!r}")
        if option == "file" and not os.path.isfile(text):
            raise InputError(f"{FAULT}: `{name} file={text}` is no file")
        return text
    least = 1.0 if option == "every" else 0.0
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise InputError(
            f"{FAULT}: `{name} {option}` takes a number of at least {least:g}, not {text!r}"
        )
    return number


def _is_exit_code(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isdecimal() and len(digits) <= 3 and -64 <= int(text) <= 255


# --- which launches --------------------------------------------------------------------


def _values(command: ServeCommand, settings: EngineSettings | None) -> dict[str, JsonValue]:
    """Of every flag: in effect where the simulated engine honours it, else given or default."""
    values = {name: command.value(name) for name in known_flags().flags}
    if settings is not None:
        for field in fields(settings):
            name = field.name.replace("_", "-")
            if name in values:
                values[name] = getattr(settings, field.name)
    return values


def _applies(fault: Fault, values: Mapping[str, JsonValue]) -> bool:
    text = fault.text("when")
    if not text:
        return True
    try:
        condition = expressions.parse(text, values)
        opposite = expressions.parse(f"not ({text})", values)
    except expressions.ExpressionError as error:
        raise InputError(f"{FAULT}: `when={text}`: {error}") from None
    # What is not known holds, and so does its opposite.
    return condition.holds(values) and not opposite.holds(values)


def _counts(fault: Fault) -> bool:
    path = fault.text("once")
    if not path:
        return True
    try:
        counter = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(counter, b".")
            launch = os.lseek(counter, 0, os.SEEK_CUR) - 1
        finally:
            os.close(counter)
    except OSError as error:
        raise InputError(f"{FAULT}: once={path}: {error.strerror}") from None
    return fault.number("skip") <= launch < fault.number("skip") + fault.number("first")


assert set(CAUSES) == set(FailureCause) - {FailureCause.NONE}
