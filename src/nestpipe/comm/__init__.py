"""Workers and what they say to each other: process groups per lane, exchanges of keys and rows, deadlines."""
