"""`python -m tuner.engine.simulated serve MODEL [flags]`: `vllm`, simulated."""

from __future__ import annotations

import sys

from tuner.engine.simulated.server.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
