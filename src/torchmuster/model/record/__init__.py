"""What the records of a run say: values taken loosely, series of metrics, folds of their lines."""
