"""The story of a run, read once from its record: as one page of HTML, as data, and compared with another's."""
