"""The launcher: run options beyond the core, and commands that watch runs. It imports only `core`.

`engines` ssh, Slurm and PBS; `jobs` runs in jobs of a scheduler; `views` runs seen from outside;
`cli` commands; `api` Python; `spec` sites and torchrun's options; `head` preflight, network survey,
hang watch, exec, metrics; `facts` a node's properties; `node` facts, stacks and commands on nodes,
remotes; `net` streams alongside the channel; `files` what is sent to nodes; `owner`, `programs`,
`ui`, `model`.
"""
