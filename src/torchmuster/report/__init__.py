"""Reports: the story of a run, read from its record, as HTML page or data; `muster top`.

`find` makes the `story` of each kind of record, with `read`, and with `training` for its part on a training; `sheet`, `charts`
and `plots` make the `page` of it, `compare` what that of two shows; `at_end` makes it when a run has failed. `top` is the live
view, whose lines are made in `launcher/ui`; `live_list` its list of runs; `cli` the commands.
"""
