"""Names of what is written into a study's own attributes."""

from __future__ import annotations

FORMAT = 1
"""Raised when an older tuner could misread a study."""

SCHEMA = "tuner:schema"
SPEC = "tuner:space_file"
SPEC_PATH = "tuner:space_file_path"
FINGERPRINT = "tuner:fingerprint"
VERSIONS = "versions"
FINISHED = "finished"
OWNER = "tuner:owner"
BUDGET = "tuner:budget"
