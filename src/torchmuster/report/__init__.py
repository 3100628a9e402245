"""Reports: the story of a run, read from its record, as HTML page or data; `muster top`.

`read` makes the `story`, `training` its part on a training; `sheet`, `charts` and `plots` make the `page` of it,
`compare` and `pair_page` that of two; `find` and `loose` read records that are old or damaged; `top` the live view,
whose lines are made in `launcher/ui`; `live_list` its list of runs; `cli` the commands.
"""
