"""What the longer commands do; `tuner.cli` parses and calls."""
