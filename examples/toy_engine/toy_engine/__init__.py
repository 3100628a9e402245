"""A scheduler of one folder, and the dialect by which torchmuster speaks to it."""
