"""What another package can add to torchmuster (docs/plugging-in.md)."""
