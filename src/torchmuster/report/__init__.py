"""Reports: the story of a run, read from its record, as HTML page or data; `muster top`."""
