"""CUDA kernels of the GPU cache (.cu, compiled on first use) and their launches.

README.md has the table of kernels and the argument why readers need no lock. Importing this package needs
neither CuPy nor a GPU; using it does."""
