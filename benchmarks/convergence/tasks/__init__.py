"""Six small learning problems of different kinds. Nothing is downloaded; data is read when it is first asked for."""

from __future__ import annotations

import sys
from pathlib import Path

# The corpus and the byte transformer are the examples' own, which are scripts and no package.
sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from .byte_lm import ByteLM
from .digits_cnn import DigitsCNN
from .digits_vit import DigitsViT
from .masked_bert import MaskedBert
from .rare_words import RareWords
from .recurrent import Recurrent
from .task import Task

TASKS: dict[str, Task] = {
    task.name: task for task in (ByteLM(), MaskedBert(), DigitsCNN(), DigitsViT(), Recurrent(), RareWords())
}
"""By name."""

__all__ = ["TASKS", "Task"]
