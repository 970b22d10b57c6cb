"""How long one configuration is measured, and how sure the figure is.

A load runs (`tuner.load`), the server is watched (`tuner.metrics`), and here it is decided when
enough was seen: `lookout` keeps what is known, `window` leaves out ramp-up and ramp-down and cuts
the rest into blocks, `blocks` gives the score's interval from them, `ending` decides whether to go
on, `rates` searches the highest load that meets an SLO, `finished` makes the figures. Those are
pure functions of what was seen; `judges` ask them every second, `session` does so with a server,
and `tests/bench/measuring.py` on virtual time.
"""
