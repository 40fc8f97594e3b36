"""Pages: a run, a trace or a bench as one HTML file that needs no other."""
