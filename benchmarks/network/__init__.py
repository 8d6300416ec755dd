"""Training over slow networks, emulated on one machine: `python -m benchmarks.network`, as root."""

METHODS = {
    "fp32": "DDP fp32",
    "fp16": "DDP fp16",
    "powersgd": "DDP PowerSGD",
    "onebit": "1-bit LAMB",
}
"""Ways to train, and what reports call them. All but the last use pytorch-optimizer's Lamb."""
