"""What starts many runs: sessions, `muster dev` and sweeps.

`door` forks runs on the nodes that a session holds; `engine`, `held` a run in a session; `sweep` members and their owner;
`views` both from outside; `cli` commands; `api` Python; `watched` files that were saved. Its name is not `session`:
`torchmuster.session` is a call.
"""
