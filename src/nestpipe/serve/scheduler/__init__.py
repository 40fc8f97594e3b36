"""Whose turn it is: jobs, what they cost, and their order.  Plain Python on a clock that is handed in."""
