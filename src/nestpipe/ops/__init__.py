"""Operations of the models, each in one file.

An operation `op` has a plain-torch `op_reference`, numba kernels for float32 and float64 on the host (in
`<op>_kernels.py` or in the same file), and a function that chooses between them with `host.has_kernels`.  A device runs
the reference; a device kernel goes where that choice is made.  `tests/ops` compares every kernel with its reference,
and both with oracles of its own.
"""
