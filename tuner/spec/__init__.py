"""The space file: read, checked, and handed on as plain `tuner.types.StudySpec`.

Relative paths in it (`server.model`, `workload.path`) are relative to the current directory,
as they are for `vllm serve`. Nothing outside this package sees YAML or pydantic.
"""

from tuner.spec.reading import load, parse
from tuner.spec.remarks import warnings

__all__ = ["load", "parse", "warnings"]
