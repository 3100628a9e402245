"""Sessions, `muster dev` and sweeps: everything that starts many runs.

`sweep` plans, policies and owners of sweeps; `server` the process of a session that forks its runs; `cli` commands and
where they run; `api` Python; `views` sweeps and sessions seen from outside; `engine` and `held` how a run starts on nodes
that a session holds.
"""
