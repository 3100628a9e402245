"""Move files: downloads, uploads, versioned datasets and checkpoints, on disks and stores."""
