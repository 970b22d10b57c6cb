"""The YAML file of `vllm serve --config FILE`."""

from __future__ import annotations

import yaml

from tuner.export.deployment import Deployment
from tuner.redact import redact_env
from tuner.types import JsonValue


def serve_config(deployment: Deployment) -> str:
    """The file's text: the evidence as comments, the model, and every flag that is set.

    vLLM reads no environment from it, so variables stand in the comments.
    """
    comments = [f"# {line}" for line in deployment.evidence()]
    if deployment.env:
        comments.append("# The server also had these environment variables; set them too:")
        variables = redact_env(deployment.env)
        comments += [f"#   {name}={value}" for name, value in sorted(variables.items())]
    defaults = _defaults(deployment)
    if defaults:
        comments.append(f"# vLLM's own defaults here: {defaults}")
    body = yaml.safe_dump(config_keys(deployment), sort_keys=False, default_flow_style=False)
    return "\n".join(comments) + "\n" + body


def config_keys(deployment: Deployment) -> dict[str, JsonValue]:
    """The keys of the file.

    `x: false` is written as `no-x: true`, because vLLM (0.32) drops a false without a word.
    """
    keys: dict[str, JsonValue] = {"model": deployment.model}
    for name, value in deployment.flags.items():
        if value is False:
            keys[f"no-{name}"] = True
        else:
            keys[name] = value
    return keys


def _defaults(deployment: Deployment) -> str:
    """The searched flags that stay unset, and what vLLM makes of them on this machine."""
    effective = deployment.trial.effective
    names = [knob.name for knob in deployment.study.spec.search_space]
    return ", ".join(
        f"{name}={effective[name]}"
        for name in names
        if name in effective and name not in deployment.flags
    )
