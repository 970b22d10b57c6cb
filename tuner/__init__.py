"""Search the memory and scheduling settings of a vLLM server by running it."""

__version__ = "0.1.0"
