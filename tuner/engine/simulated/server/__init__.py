"""The simulated engine behind vLLM's command line and HTTP interface.

`python -m tuner.engine.simulated serve MODEL [flags]` is vLLM to its clients: `command_line`
reads the flags as vLLM's parser does, `launch` starts an API process (`api`) and an engine
process (`engine_process`), and `faults` make either misbehave on demand. `answers` tells the
tuner of flags and configurations what it asks a real vLLM.
"""
