"""The search space of a study: its points, its constraints, and what a server is started with.

Knows nothing of Optuna. Parameters (`params`) are JSON values by the names of the space file;
a parameter that is missing or None is left at vLLM's default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tuner import expressions
from tuner.knobs import contains, count, snap, value_at
from tuner.types import (
    ENV_PREFIX,
    Choice,
    Constraint,
    EngineConfig,
    JsonValue,
    Knob,
    StudySpec,
)

_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(\.[0-9]{1,15})?")


class Space:
    """The search space of one study.

    Args:
        spec: a checked space file; its constraints name searched and fixed values only.
    """

    def __init__(self, spec: StudySpec) -> None:
        self._args = dict(spec.server.args)
        self._env = dict(spec.server.env)
        self._reference = dict(spec.reference)
        self._knobs = {knob.name: knob for knob in spec.search_space}
        self._fixed = _fixed_values(self._args, self._env)
        known = {*self._knobs, *self._fixed}
        self._constraints = [
            (constraint, expressions.parse(constraint.text, known))
            for constraint in spec.constraints
        ]

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """The searched parameters by name, in the file's order."""
        return self._knobs

    # --- parameters <-> configuration ----------------------------------------------------

    def decode(self, params: Mapping[str, JsonValue]) -> EngineConfig:
        """What a server is started with: the fixed flags and environment, and `params`.

        Raises:
            KeyError: a name that is not searched.
        """
        return self._config(self.normalise(params))

    def encode(self, config: EngineConfig) -> dict[str, JsonValue]:
        """The searched parameters that `config` sets; the reverse of `decode`."""
        params: dict[str, JsonValue] = {}
        for name, knob in self._knobs.items():
            if not name.startswith(ENV_PREFIX):
                if name in config.args:
                    params[name] = config.args[name]
            elif (text := config.env.get(name.removeprefix(ENV_PREFIX))) is not None:
                params[name] = _from_env_text(knob, text)
        return params

    def reference(self) -> tuple[dict[str, JsonValue], EngineConfig]:
        """What runs today, or vLLM's own defaults: the searched parameters that it sets, and all.

        A value may lie outside its searched range: today's server is what it is. What
        `reference:` says of a flag that is fixed for the trials goes before that.
        """
        stated = {
            name: snap(self._knobs[name], value) if name in self._knobs else value
            for name, value in self._reference.items()
        }
        params = {name: stated[name] for name in self._knobs if stated.get(name) is not None}
        return params, self._config(stated)

    def normalise(self, params: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """`params` in the file's order, floats exactly on their grid, whole ones as int.

        Raises:
            KeyError: a name that is not searched.
        """
        for name in params:
            if name not in self._knobs:
                raise KeyError(name)
        return {
            name: snap(knob, params[name]) for name, knob in self._knobs.items() if name in params
        }

    def _config(self, values: Mapping[str, JsonValue]) -> EngineConfig:
        args, env = dict(self._args), dict(self._env)
        for name, value in values.items():
            variable = name.removeprefix(ENV_PREFIX)
            if value is None:
                args.pop(name, None)
                if variable != name:
                    env.pop(variable, None)
            elif variable != name:
                env[variable] = env_text(value)
            else:
                args[name] = value
        return EngineConfig(args, env)

    # --- points --------------------------------------------------------------------------

    def contains(self, name: str, value: JsonValue) -> bool:
        """Whether the searched parameter `name` can take `value`; False for another name."""
        knob = self._knobs.get(name)
        return knob is not None and contains(knob, value)

    def violated(self, params: Mapping[str, JsonValue]) -> Constraint | None:
        """The first constraint that does not hold, None if all do or cannot be told."""
        values = {**self._fixed, **params}
        for constraint, expression in self._constraints:
            if not expression.holds(values):
                return constraint
        return None

    def size(self) -> int | None:
        """How many points there are, constraints not applied; None if a range is continuous."""
        total = 1
        for knob in self._knobs.values():
            values = count(knob)
            if values is None:
                return None
            total *= values
        return total

    def points(self) -> Iterator[dict[str, JsonValue]]:
        """All `size()` points, those that violate a constraint included; the last name is fastest.

        Raises:
            ValueError: a range is continuous, so that there is no such list.
        """
        size = self.size()
        if size is None:
            raise ValueError("a continuous range has no list of points")
        return (self._point(index) for index in range(size))

    def _point(self, index: int) -> dict[str, JsonValue]:
        indices: dict[str, int] = {}
        for name, knob in reversed(self._knobs.items()):
            index, indices[name] = divmod(index, count(knob) or 1)
        return {name: value_at(knob, indices[name]) for name, knob in self._knobs.items()}


def env_text(value: JsonValue) -> str:
    """An environment variable's value as text: true is `1`, false is `0`."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _from_env_text(knob: Knob, text: str) -> JsonValue:
    """The value of `knob` that `env_text` made `text` of; `text` itself if there is none."""
    if isinstance(knob, Choice):
        return next((c for c in knob.choices if c is not None and env_text(c) == text), text)
    number = _number_or_text(text)
    return number if isinstance(number, str) else snap(knob, number)


def _fixed_values(args: Mapping[str, JsonValue], env: Mapping[str, str]) -> dict[str, JsonValue]:
    """Flags, and the environment as `env.X` with numeric texts as numbers."""
    return {**args, **{ENV_PREFIX + name: _number_or_text(text) for name, text in env.items()}}


def _number_or_text(text: str) -> int | float | str:
    """`"4"` as 4; a text that is no plain decimal number as it is."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return text
    return float(text) if match[1] else int(text)
