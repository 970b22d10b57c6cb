"""One configuration's starts, as many as `tuner.retries` gives it.

Each failed start that is followed by another is written into its trial at once, so that a
killed tuner goes on counting where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from tuner.engine.base import LaunchObserver
from tuner.errors import EnvironmentProblem
from tuner.evaluate import Evaluator
from tuner.records import Attempt
from tuner.redact import redact_file, redact_text
from tuner.retries import Retry, decide
from tuner.storage import RunningTrial, StudyStore
from tuner.storage.files import FILE_MODE
from tuner.types import EngineConfig, Failure, Outcome, Progress, ProgressSink

CACHE_VARIABLE = "VLLM_CACHE_ROOT"
"""Where vLLM keeps its compile cache, Triton's and Inductor's below it."""

CACHE_FOLDER = "fresh-cache"
"""In the trial's folder, for one start; removed after it."""

_TICK_S = 0.5
_FREE_SPACE = "free space on its disk, or make it writable"
_MORE_FILES = "raise the limit of open files (`ulimit -n`)"
_HINTS = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: _FREE_SPACE,
    errno.EROFS: _FREE_SPACE,
    errno.EACCES: _FREE_SPACE,
    errno.EPERM: _FREE_SPACE,
    errno.EIO: _FREE_SPACE,
    errno.ENOENT: "leave the study's folder where it is while it runs",
    errno.ENOTDIR: "leave the study's folder where it is while it runs",
    errno.ESTALE: "see that the share it lies on is mounted",
    errno.ENAMETOOLONG: "use a shorter path (--storage), or a shorter name of the study",
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
}
"""What helps where a file cannot be written."""

Pause = Callable[[float], Awaitable[None]]


class Attempts:
    """Starts configurations again where their failures deserve it.

    Args:
        on_notice: told of each repetition, in a sentence.
        pause: waits so many seconds; another one in tests.
    """

    def __init__(
        self,
        store: StudyStore,
        evaluator: Evaluator,
        on_notice: Callable[[str], None],
        on_progress: ProgressSink,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._store = store
        self._evaluator = evaluator
        self._on_notice = on_notice
        self._on_progress = on_progress
        self._pause = pause

    async def run(
        self, config: EngineConfig, trial: RunningTrial, incumbent: float | None = None
    ) -> Outcome:
        """The outcome of the last start; those before are in the trial's record.

        Args:
            incumbent: see `tuner.evaluate.Evaluator.evaluate`.

        Raises:
            EnvironmentProblem: the disk or the database cannot be written, or the system
                refuses something else that a start needs.
        """
        outcome = await self._start(config, trial, incumbent)
        while isinstance(outcome, Failure):
            earlier = [attempt.cause for attempt in self._store.attempts(trial)]
            decision = decide(outcome, earlier)
            if not isinstance(decision, Retry):
                break
            self._announce(trial, outcome, decision, len(earlier) + 2)
            await self.wait(decision)
            outcome = await self._start(config, trial, incumbent, fresh_cache=decision.fresh_cache)
        return outcome

    def _announce(self, trial: RunningTrial, failure: Failure, retry: Retry, number: int) -> None:
        then = _described(retry)
        attempt = Attempt(failure.cause, failure.stage, failure.line, then, trial.number)
        self._store.record_attempt(trial, attempt)
        self._on_notice(
            f"{failure.cause} while {failure.stage}: {redact_text(failure.line)}; {then} "
            f"(attempt {number})"
        )

    async def wait(self, retry: Retry) -> None:
        """Wait before a repetition, and say what for; a cancellation ends it at once."""
        started = time.monotonic()
        left_s = retry.wait_s
        while left_s > 0:
            detail = f"{retry.waits_for}, then the same configuration again"
            self._on_progress(Progress("waiting", time.monotonic() - started, retry.wait_s, detail))
            await self._pause(min(_TICK_S, left_s))
            left_s -= _TICK_S

    async def _start(
        self,
        config: EngineConfig,
        trial: RunningTrial,
        incumbent: float | None,
        *,
        fresh_cache: bool = False,
    ) -> Outcome:
        folder = self._store.trial_directory(trial.number)
        if fresh_cache:
            cache = str((folder / CACHE_FOLDER).resolve())
            config = replace(config, env={**config.env, CACHE_VARIABLE: cache})
        observer = LaunchObserver(
            on_spawn=lambda process: self._store.record_process(trial, process),
            on_progress=self._on_progress,
        )
        try:
            return await self._evaluator.evaluate(config, folder, observer, incumbent)
        except OSError as error:
            raise _refused(error, folder) from error
        finally:
            await self._tidy(folder)

    async def _tidy(self, folder: Path) -> None:
        """`tidy`, which must not cost the outcome of a start."""
        try:
            await asyncio.to_thread(tidy, folder)
        except FileNotFoundError:
            pass  # removed, with all that was in it
        except OSError as error:
            self._on_notice(f"{error.filename or folder} is left as it is: {error.strerror}")


def tidy(folder: Path) -> None:
    """Leave a trial's folder as a start that ended leaves it; one that was killed did not."""
    shutil.rmtree(folder / CACHE_FOLDER, ignore_errors=True)
    for log in folder.glob("server*.log"):
        redact_file(log)  # vLLM prints its arguments, secret ones included
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):  # a disk without permissions, such as a share
                path.chmod(FILE_MODE)


def _described(retry: Retry) -> str:
    """What is done, for the notice and for the trial's record."""
    if retry.fresh_cache:
        return f"started again with an empty compile cache ({CACHE_VARIABLE})"
    if retry.wait_s:
        return f"started again after {retry.wait_s:.0f} s {retry.waits_for}"
    return "started again"


def _refused(error: OSError, folder: Path) -> EnvironmentProblem:
    """What the system did not let a start do."""
    hint = _HINTS.get(error.errno or 0)
    if hint is None and error.filename is None:
        message = f"the start in {folder} broke off: {error.strerror or type(error).__name__}"
    else:
        message = f"{error.filename or folder} cannot be written: {error.strerror}"
    return EnvironmentProblem(
        message,
        f"{hint or 'mend that'}, and run the same command again: the study goes on where it "
        "stopped",
    )
