"""The core: what a plain run needs, from the command to its workers. It imports no other room (docs/core.md).

`model` values without I/O; `proc`, `plainfile`, `files` the disk and commands; `net` the authenticated channel;
`head` hears agents and decides; `node` the agent, its workers and their output, `node.spawner` forks them;
`owner` keeps the head alive; `programs` what is started on nodes; `spec` what a user asks for; `engines` how agents are
started; `cli` the commands.
"""
