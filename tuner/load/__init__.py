"""Load on a server: which requests, how they are sent, and what the client saw of each.

`workload` decides the requests, the same ones in the same order in every trial; `client`
sends one and times its stream; `driver` sends them all, in a closed or an open loop.
"""
