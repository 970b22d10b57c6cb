"""Handing out the best configuration: one file a format, checked by vLLM itself."""

from tuner.export.checked import FORMATS, export_best

__all__ = ["FORMATS", "export_best"]
