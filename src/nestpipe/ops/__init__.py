"""Operations of models and of row buffers, each in one file.

An operation `op` has a plain-torch `op_reference`, numba kernels for float32 and float64 on the host (in
`<op>_kernels.py` or in the same file), Triton kernels for accelerators (in `<op>_triton.py`), and a function that
chooses between them with `host.has_kernels` and `triton_support.kernels_for`.  Without Triton a device runs the
reference.  `tests/ops` compares every kernel with its reference, and both with oracles of its own.
"""
