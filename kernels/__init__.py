"""The Triton kernels of 1-bit LAMB, their launchers, and a plain-torch twin of each.

The import name is always ``onebit_triton.kernels``. The files stand in ``kernels/`` at the top of the repository, and
``onebit_triton/kernels`` is a symlink to that folder; in an installed package they are ordinary files.
"""

# With the repository root on sys.path (an editable install, pytest, a script started there) this folder is also
# importable as `kernels`: a second copy of every module, with its own JIT caches, and under the name of another
# library's package. Refusing what is in it is better than two copies that are not equal to each other. The bare import
# succeeds, with nothing in it: transformers, which looks for that other library by importing it, would fail otherwise.
if __name__ == "kernels":
    __path__ = []

    def __getattr__(name: str) -> object:
        """Refuse; names that any module may lack, such as `__version__`, are simply not there."""
        error = AttributeError if name.startswith("__") else ImportError
        raise error(
            f"{name}: onebit_triton's kernels must be imported as `onebit_triton.kernels`, not as `kernels`. "
            "If you meant another package named `kernels`, take the root of the onebit_triton repository off sys.path "
            "(or start Python from another folder)."
        )
