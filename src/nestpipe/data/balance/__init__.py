"""Load balance of histories: what a sample costs, who gets it, and streams that hand out balanced batches."""
