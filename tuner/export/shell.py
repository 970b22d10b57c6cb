"""A commented shell script that starts the server."""

from __future__ import annotations

import shlex
from dataclasses import replace

from tuner.engine.arguments import command_with_model, flag_words
from tuner.engine.flags import FlagTable
from tuner.export.deployment import Deployment
from tuner.redact import MASK, redact_env


def shell_script(deployment: Deployment, flags: FlagTable | None) -> str:
    """The script's text; arguments given to it (`--host`, `--port`) go to vLLM.

    Secret variables are expected in the caller's environment, not written here.
    """
    lines = ["#!/usr/bin/env bash"]
    lines += [f"# {line}" for line in deployment.evidence()]
    lines += ["set -euo pipefail", ""]
    shown = redact_env(deployment.env)
    for name, value in sorted(deployment.env.items()):
        if MASK in shown[name]:  # the study's database holds it masked, too
            lines.append(f': "${{{name}:?set it before you start this script}}"')
        else:
            lines.append(f"export {name}={shlex.quote(value)}")
    server = replace(deployment.study.spec.server, args={})
    parts = [shlex.join(command_with_model(server))]
    parts += [
        shlex.join(words)
        for name, value in deployment.flags.items()
        if (words := flag_words(name, value, flags.find(name) if flags else None))
    ]
    return "\n".join([*lines, "exec " + " \\\n  ".join([*parts, '"$@"']), ""])
