"""Starting a run's processes: here on this machine, or as a job of Slurm. Importing it imports no torch."""
