"""Load on a server: which requests, how they are sent, and what the client saw of each.

`workload` decides the requests, the same ones in the same order in every trial: a plan of
lengths, shared beginnings and times (`synthetic`, `recorded`, `like_server`), of which `making`
and `prompts` make requests for the served model, due when `schedule` says. `client` sends one
and times its stream; `running` sends them all, in a closed or an open loop, and `spread` does so
from several processes.
"""
