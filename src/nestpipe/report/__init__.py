"""Pages to look at: a run, a trace or a bench as one HTML file that needs nothing else."""
