"""What operations do on the simulated device: one file per kind."""
