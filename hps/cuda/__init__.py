"""CUDA kernels of the GPU cache (.cu, compiled when first used) and what launches them. README.md has the
table of kernels and the argument why readers need no lock.

Importing this package needs neither CuPy nor a GPU; using it does.
"""
