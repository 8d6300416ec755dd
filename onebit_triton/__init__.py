"""1-bit LAMB as a plain torch.optim.Optimizer: LAMB's training, one bit per parameter on the wire."""

from .optimizer import OneBitLamb

__version__ = "0.1.0.dev0"
__all__ = ["OneBitLamb"]
