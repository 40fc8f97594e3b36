"""Workers and the messages between them: a process group per lane, exchanges of keys and rows, deadlines."""
