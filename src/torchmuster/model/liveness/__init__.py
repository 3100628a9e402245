"""Who counts as alive, and who takes the place of a head that does not."""
