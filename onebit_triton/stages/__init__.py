"""The stages of training: what one step does in each, and how one becomes the other."""

from .compression import Compression
from .replica import Replica, phase
from .switch import freeze, pending_error, thaw
from .uncompressed import Uncompressed
from .warmup import Warmup

__all__ = ["Compression", "Replica", "Uncompressed", "Warmup", "freeze", "pending_error", "phase", "thaw"]
