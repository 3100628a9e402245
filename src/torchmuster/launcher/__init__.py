"""The launcher: all that runs may ask for beyond the core, and what looks at them from outside. It imports only `core`.

`engines` hosts of ssh, Slurm, PBS; `jobs` runs that are jobs of a scheduler; `views` runs from outside; `cli` commands;
`api` Python; `spec` sites, torchrun's options; `head` preflight, survey, hang watch, exec, metrics; `facts` what a node
knows of itself; `node` facts, stacks and commands on nodes, far ends of ssh; `net` streams beside the channel; `files`
what travels to nodes; `owner`, `programs`, `ui`, `model`.
"""
