"""`muster top`: the state, frames and painter of the live view of runs."""
