"""Whether the kernels are right on a GPU, and how fast: ``python -m benchmarks.gpu`` from the root of the repository.

Needs torch, Triton and numpy, and no installation of the package.
"""
