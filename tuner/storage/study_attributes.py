"""Names of what is written into a study's own attributes."""

from __future__ import annotations

FORMAT = 2
"""Raised when an older tuner could misread a study, or a result means something else.

Format 1 measured its load as a whole; since 2 it is a steady window of it. Results of the two
do not compare, so that a study of format 1 is still shown and exported, but not gone on with."""

SCHEMA = "tuner:schema"
SPEC = "tuner:space_file"
SPEC_PATH = "tuner:space_file_path"
FINGERPRINT = "tuner:fingerprint"
VERSIONS = "versions"
FINISHED = "finished"
OWNER = "tuner:owner"
BUDGET = "tuner:budget"
