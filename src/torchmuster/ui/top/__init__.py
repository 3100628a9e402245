"""`muster top`: pure functions from values to lines, keys to changes of the view, and one loop on a terminal."""
