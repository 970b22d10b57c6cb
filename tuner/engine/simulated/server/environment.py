"""What the stand-in is told besides vLLM's flags: environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tuner.engine.simulated.profiles import DEVICES, DeviceProfile, device_named
from tuner.engine.simulated.words import VERSION
from tuner.errors import InputError

DEVICE = "SIMULATED_DEVICE"
MODEL = "SIMULATED_MODEL"
SPEED = "SIMULATED_SPEED"
START_SPEED = "SIMULATED_START_SPEED"
SEED = "SIMULATED_SEED"
NOISE = "SIMULATED_NOISE"
FAULT = "SIMULATED_FAULT"

_PREFIX = "SIMULATED_"
_NAMES = (DEVICE, MODEL, SPEED, START_SPEED, SEED, NOISE, FAULT)

_DEFAULT_DEVICE = "h100-80g"
_FASTEST = 1e6

HELP = f"""\
environment variables of the stand-in:
  {DEVICE}       the device it plays: {", ".join(DEVICES)}
                         (default {_DEFAULT_DEVICE})
  {MODEL}        the model it plays, whatever MODEL is: a profile, a hub id that
                         has one, or a folder with a config.json
  {SPEED}        how many times faster than life it starts and computes (default 1)
  {START_SPEED}  the same for starts alone (default: as {SPEED})
  {SEED}         a whole number: every launch of a configuration has the same noise;
                         without it no two launches have
  {NOISE}        0: no noise at all
  {FAULT}        what goes wrong: `oom_runtime after=8 when='max-num-seqs > 64'`
"""


@dataclass(frozen=True, slots=True)
class StandIn:
    """The variables, read.

    Attributes:
        model: instead of the command line's; empty for that one.
        speed: a second of the engine's takes 1 / speed.
        start_speed: likewise a second of a start.
        fault: see `faults`.
    """

    device: DeviceProfile
    model: str = ""
    speed: float = 1.0
    start_speed: float = 1.0
    seed: int = 0
    noise: bool = True
    fault: str = ""

    @property
    def version(self) -> str:
        """What it says it is; figures at another speed than 1 are not even of its own device."""
        return VERSION if self.speed == 1 else f"{VERSION}.x{self.speed:g}"


def stand_in(env: Mapping[str, str]) -> StandIn:
    """Read the variables.

    Raises:
        InputError: one of them does not exist, or has a value that cannot be used.
    """
    unknown = [name for name in env if name.startswith(_PREFIX) and name not in _NAMES]
    if unknown:
        raise InputError(
            f"the stand-in knows no variable {unknown[0]}", f"One of {', '.join(_NAMES)}."
        )
    speed = _speed(env, SPEED, 1.0)
    return StandIn(
        device=device_named(env.get(DEVICE) or _DEFAULT_DEVICE),
        model=env.get(MODEL, ""),
        speed=speed,
        start_speed=_speed(env, START_SPEED, speed),
        seed=_seed(env.get(SEED, "")),
        noise=_noise(env.get(NOISE) or "1"),
        fault=env.get(FAULT, ""),
    )


def _noise(text: str) -> bool:
    if text.lower() not in ("0", "off", "1", "on"):
        raise InputError(f"{NOISE}={text} is neither on nor off", "Write 0 or 1.")
    return text.lower() in ("1", "on")


def _speed(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < _FASTEST:
        raise InputError(f"{name}={text} is no speed", "Write a number above 0, such as 20.")
    return speed


def _seed(text: str) -> int:
    if not text:
        return int.from_bytes(os.urandom(6))
    if not text.isdecimal():
        raise InputError(f"{SEED}={text} is no seed", "Write a whole number.")
    return int(text)
