"""For those who come from DeepSpeed: its configuration becomes arguments, its optimizer state becomes ours.

What is said of DeepSpeed holds for `OnebitLamb` of 0.19.6, the last release that had it
(deepspeed/runtime/fp16/onebit/lamb.py). It need not be installed.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from .checkpoint import KEY, VERSION, Progress, refusal
from .collectives import Communicator
from .optimizer import OneBitLamb
from .options import check_hyperparameters, check_steps

logger = logging.getLogger("onebit_triton")

DEFAULTS: dict[str, Any] = {
    "lr": 1e-3, "freeze_step": 100_000, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_coeff": 10.0,
    "min_coeff": 0.01, "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1,
}  # fmt: skip
"""What carries over, with DeepSpeed's defaults; some of ours are others."""

CLIPPING_DEFAULT = 1.0
"""gradient_clipping of a whole configuration that has none."""

IGNORED = {
    "bias_correction": "DeepSpeed accepted it and never corrected m and v; bias_correction=False is what it computed.",
    "eps_inside_sqrt": "DeepSpeed accepted it and always added eps outside the root, as is done here.",
    "max_grad_norm": "OnebitLamb accepted it and never clipped; what clipped was gradient_clipping of the whole "
    "configuration.",
    "amsgrad": "1-bit LAMB has no AMSGrad variant.",
    "cuda_aware": "messages go over the torch.distributed process group; there is no MPI backend to tell.",
    "comm_backend_name": "messages go over the torch.distributed process group, whatever its backend; pass "
    "process_group to use another than the default one.",
}
"""Parameters of OnebitLamb that do not carry over, and why."""

PRECISION = (
    "give the model's parameters the dtype that you want, or keep them in fp32 and use torch.autocast. The optimizer "
    "keeps fp32 masters of bf16 and fp16 parameters; gradients in fp16 need a loss scale, that of torch.amp.GradScaler."
)

ENGINE = {
    "fp16": PRECISION,
    "bf16": PRECISION,
    "bfloat16": PRECISION,
    "amp": PRECISION,
    "zero_optimization": "sharded parameters are refused, as OnebitLamb refused ZeRO; use DistributedDataParallel.",
    "gradient_accumulation_steps": "accumulate in your loop: divide the loss, and run all but the last backward pass "
    "under model.no_sync().",
    "scheduler": "build a scheduler of torch.optim.lr_scheduler over the optimizer, and step it in your loop.",
}
"""Keys of the whole configuration that ask something of the user."""


def arguments_from_deepspeed(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Turn a DeepSpeed configuration for OneBitLamb into arguments that reproduce what DeepSpeed computed.

    Args:
        config: the whole configuration, as read from its JSON file, or its `optimizer` block alone. In the whole one an
            absent `gradient_clipping` means 1.0, as in DeepSpeed 0.19.6; the block alone says nothing of clipping.

    Returns:
        Keyword arguments of `OneBitLamb`, DeepSpeed's defaults included; and a sentence for everything that was
        changed, dropped or is left to do, which rank 0 logs too.

    Raises:
        ValueError: for another optimizer, an unknown parameter, or a value that cannot be used, naming the key.

    Example:
        >>> arguments, notes = arguments_from_deepspeed(json.load(open("ds_config.json")))
        >>> optimizer = OneBitLamb(model.parameters(), **arguments)
    """
    block = _optimizer_block(config)
    params = block.get("params") or {}
    unknown = sorted(set(params) - set(DEFAULTS) - set(IGNORED))
    if unknown:
        raise ValueError(f"Invalid {unknown[0]}={params[unknown[0]]!r}: OnebitLamb has no such parameter.")
    if params.get("amsgrad"):
        raise ValueError(f"Invalid amsgrad={params['amsgrad']!r}. Must be False: 1-bit LAMB has no AMSGrad variant.")

    arguments = DEFAULTS | {key: value for key, value in params.items() if key in DEFAULTS}
    check_hyperparameters(arguments | {"max_rate_ratio": math.inf}, " in the optimizer's params")
    check_steps("freeze_step", arguments["freeze_step"])
    # The first call counts and trains nothing, so the call that reaches freeze_step is step freeze_step - 1; but the
    # first call does not end the warmup, so that there is one step of it at least.
    steps = max(1, arguments["freeze_step"] - 1)
    notes = [
        f"freeze_step={arguments['freeze_step']} becomes {steps}: DeepSpeed counts its first call, which only sets up.",
        "coeff_bias_correction=False is added: DeepSpeed did not correct the running trust ratio; True would.",
    ]
    arguments |= {
        "betas": tuple(arguments["betas"]), "freeze_step": steps, "bias_correction": False,
        "coeff_bias_correction": False, "max_grad_norm": None,
    }  # fmt: skip
    notes += [f"{key}={params[key]!r} is dropped: {IGNORED[key]}" for key in params if key in IGNORED]
    if "legacy_fusion" in block:
        notes.append("legacy_fusion is dropped: it is for other optimizers of DeepSpeed.")
    if block is not config:
        arguments["max_grad_norm"] = _max_grad_norm(config, notes)
        _note_engine(config, notes)
    if Communicator(None).rank == 0:
        logger.warning("Taken from DeepSpeed's configuration, with these changes:\n%s", "\n".join(notes))
    return arguments, notes


def _optimizer_block(config: Any) -> dict[str, Any]:
    """The optimizer block of a configuration, checked but for its parameters."""
    block = config.get("optimizer", config) if isinstance(config, dict) else None
    if not isinstance(block, dict) or "type" not in block:
        raise ValueError(
            "Invalid config: must be DeepSpeed's configuration as a dict with an 'optimizer' block, or that block, "
            f"{{'type': 'OneBitLamb', 'params': {{...}}}}; got {config!r}."
        )
    if str(block["type"]).lower() != "onebitlamb":
        raise ValueError(f"Invalid type={block['type']!r} of the optimizer. Must be 'OneBitLamb'.")
    unknown = sorted(set(block) - {"type", "params", "legacy_fusion"})
    if unknown:
        raise ValueError(f"Invalid {unknown[0]!r} in the optimizer block: must have 'type' and 'params' only.")
    if not isinstance(block.get("params") or {}, dict):
        raise ValueError(f"Invalid params={block['params']!r} of the optimizer. Must be a dict.")
    return block


def _max_grad_norm(config: dict[str, Any], notes: list[str]) -> float | None:
    """The norm to clip at, None for no clipping."""
    norm = config.get("gradient_clipping", CLIPPING_DEFAULT)
    if isinstance(norm, bool) or not isinstance(norm, (int, float)) or not norm >= 0.0:
        raise ValueError(f"Invalid gradient_clipping={norm!r}. Must be a number >= 0.0, 0.0 for no clipping.")
    if norm == 0.0:
        return None
    if "gradient_clipping" not in config:
        notes.append(
            f"gradient_clipping is absent: DeepSpeed 0.19.6 clips at {CLIPPING_DEFAULT} then, older releases not at "
            "all. Write what you trained with into the configuration, 0.0 for no clipping."
        )
    notes.append(
        f"gradient_clipping={norm!r} becomes max_grad_norm: in compression DeepSpeed clipped by norms of local "
        "gradients (in half precision every rank by its own); here all ranks use one factor, in both stages."
    )
    return norm


def _note_engine(config: dict[str, Any], notes: list[str]) -> None:
    """Say what the rest of the whole configuration asks of the user."""
    rest = {key: value for key, value in config.items() if key not in ("optimizer", "gradient_clipping")}
    for key, sentence in ENGINE.items():
        if key in rest and not _is_off(key, rest.pop(key)):
            notes.append(f"{key} is left to you: {sentence}")
    if rest:
        notes.append(f"Dropped, as they are for DeepSpeed's engine, data loader and logs: {', '.join(sorted(rest))}.")


def _is_off(key: str, value: Any) -> bool:
    """Whether a key of the whole configuration says that it does nothing."""
    if isinstance(value, dict):
        return value.get("enabled") is False or value.get("stage") == 0
    return not value or (key == "gradient_accumulation_steps" and value == 1)


SAVED = {"step", "exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "lamb_coeff_freeze", "last_factor"}
"""What DeepSpeed saves of a parameter; in compression scaling_coeff too."""

NOT_FROM_GROUPS = {"params", "bias_correction", "max_grad_norm", "exp_avg_mask"}
"""Entries of DeepSpeed's param groups that are not taken over: two had no effect, masks are for the code to give."""


def load_deepspeed_state(optimizer: OneBitLamb, state_dict: dict[str, Any]) -> None:
    """Continue where DeepSpeed's OnebitLamb stopped, in either stage and at any number of ranks (collective).

    Loaded are m, v, v', C, f, s_j, the number of steps, and the hyperparameters of the param groups (lr, betas, eps,
    weight_decay, clamps of the trust ratio). Everything else is the optimizer's own: `freeze_step`, which decides the
    stage and must be that of the run (DeepSpeed's minus one, see `arguments_from_deepspeed`), coeff_beta, the limits of
    f, masks. Load the parameters themselves beforehand. DeepSpeed's fp32 copies of half-precision parameters become the
    masters of bf16 and fp16 parameters; copy them yourself into parameters that are fp32 here.

    Pending errors start at zero, as when DeepSpeed itself loads: it does not save them. Momentum of elements whose v is
    zero is dropped: they take no part in compression here.

    Args:
        optimizer: built over the parameters that DeepSpeed trained, in the same groups and order.
        state_dict: of OnebitLamb, or of the wrapper that DeepSpeed puts around it in half precision: entry
            "optimizer" of its file mp_rank_00_model_states.pt. The same on every rank.

    Raises:
        ValueError: saying why the state does not fit; nothing has changed then.
        RuntimeError: if another rank refused its state, or ranks load states of different moments.
    """
    failure: Exception | None = None
    translated: dict[str, Any] = {}
    freeze_step = optimizer._freeze_step
    try:
        if not isinstance(freeze_step, int):
            raise ValueError(
                f"Invalid optimizer: its freeze_step must be a number, got {freeze_step!r}. Give it the freeze_step of "
                "DeepSpeed's run minus one."
            )
        translated = _translate(state_dict, optimizer.param_groups, freeze_step)
    except Exception as error:  # on one rank perhaps, while the others wait
        failure = refusal(error)
    optimizer._communicator.raise_together(failure, "load its DeepSpeed state")
    optimizer.load_state_dict(translated)
    steps = translated["param_groups"][0][KEY]["counted"]
    if optimizer.stage == "warmup" and steps >= optimizer._warmup_steps:
        optimizer._end_warmup()
    if optimizer._communicator.rank == 0:
        logger.info("step %d: state of DeepSpeed loaded, %s continues", steps, optimizer.stage)


def _translate(state_dict: Any, param_groups: list[dict[str, Any]], freeze_step: int) -> dict[str, Any]:
    """State dict of DeepSpeed's OnebitLamb as a state dict of ours, saved by one rank: without pending errors.

    Args:
        state_dict: DeepSpeed's.
        param_groups: of the optimizer that is to load it.
        freeze_step: number of warmup steps.

    Raises:
        ValueError: saying what does not fit.
    """
    masters = None
    if isinstance(state_dict, dict):
        masters, state_dict = state_dict.get("fp32_groups"), state_dict.get("optimizer_state_dict", state_dict)
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            "Invalid state_dict: must be that of DeepSpeed's optimizer, a dict with 'state' and 'param_groups': entry "
            "'optimizer' of its checkpoint file."
        )
    saved, saved_groups = state_dict["state"], state_dict["param_groups"]
    sizes = [sum(p.numel() > 0 for p in group["params"]) for group in param_groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if saved_sizes != sizes:
        raise ValueError(
            f"Invalid state_dict: must have groups of {sizes} parameters (not counting empty ones), as the optimizer, "
            f"got {saved_sizes}."
        )
    compression = any("scaling_coeff" in entry for entry in saved.values())
    wanted = SAVED | {"scaling_coeff"} if compression else SAVED
    state: dict[int, dict[str, Tensor]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for index, (group, theirs) in enumerate(zip(param_groups, saved_groups, strict=True)):
        taken = {key: value for key, value in theirs.items() if key not in NOT_FROM_GROUPS}
        groups.append(group | taken | {"params": list(range(number, number + len(group["params"])))})
        rows = enumerate(theirs["params"])
        for place, parameter in enumerate(group["params"]):
            if parameter.numel():
                row, identity = next(rows)
                entry = saved.get(identity, {})
                missing = sorted(wanted - entry.keys())
                if missing:
                    raise ValueError(
                        f"Invalid state_dict: the state of parameter {place} of group {index} must have {missing}; is "
                        "it one of DeepSpeed's OnebitLamb?"
                    )
                state[number] = _entry(entry, groups[index], freeze_step)
                if masters:
                    state[number]["master"] = masters[index][row]
            number += 1
    steps = max((int(entry["step"]) for entry in state.values()), default=0)
    if compression and steps <= freeze_step:
        raise ValueError(
            f"Invalid state_dict: saved in compression after {steps} steps, but with freeze_step={freeze_step} warmup "
            "would last until then. Give the optimizer the freeze_step of that run, DeepSpeed's minus one; to warm up "
            "once more, call rewarm() after loading."
        )
    progress = Progress(
        version=VERSION, stage="compression" if compression else "warmup", calls=steps, warmup_base=0,
        warmup_steps=freeze_step, check_at=freeze_step, errors="none", ranks=1, rank=0, layout=0, counted=steps,
    )  # fmt: skip
    for group in groups:
        group[KEY] = progress.to_dict()
    return {"state": state, "param_groups": groups}


def _entry(saved: dict[str, Any], group: dict[str, Any], freeze_step: int) -> dict[str, Tensor]:
    """State of one parameter. DeepSpeed's `step` is one ahead: its first call counted and did not train."""
    steps = int(saved["step"]) - 1
    averaged = min(steps, freeze_step)
    beta1, beta2 = group["betas"]
    scalars = {
        "step": steps,
        "lamb_coeff": saved["lamb_coeff_freeze"],
        "lamb_coeff_correction": 1 - group["coeff_beta"] ** averaged,
        "bias_correction1": 1 - beta1**averaged,
        "bias_correction2": 1 - beta2**averaged,
        "scaling_coeff": saved.get("scaling_coeff", 1.0),
        "last_factor": saved["last_factor"],
    }
    entry = {key: torch.tensor(float(value)) for key, value in scalars.items()}
    # Where v is zero, DeepSpeed's momentum is what compression left there: a warmup step would divide it by eps.
    entry["exp_avg"] = torch.where(saved["exp_avg_sq"] > 0, saved["exp_avg"], 0.0)
    return entry | {key: saved[key] for key in ("exp_avg_sq", "exp_avg_sq_fresh")}
