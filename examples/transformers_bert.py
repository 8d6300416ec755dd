"""Train a small byte-level BERT by masked language modelling under transformers' Trainer with 1-bit LAMB.

    torchrun --nproc-per-node 2 examples/transformers_bert.py
    torchrun --nproc-per-node 2 examples/transformers_bert.py --freeze-step 1000000          # LAMB, never compressed
    torchrun --nproc-per-node 3 examples/transformers_bert.py --resume out/checkpoints/checkpoint-100     # any number

Nothing is downloaded: tokens are the bytes of the standard library's texts, and one more that masks.
"""

from __future__ import annotations

from typing import Any

import torch
from corpus import load_corpus, training_batch
from recipe import make_optimizer, make_parser, make_schedule, report
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments, set_seed

MASK, VOCABULARY, IGNORED = 256, 257, -100
CONTEXT = 16


class MaskedBytes(Dataset):
    """Windows of a text with 15 % of the bytes to be predicted: 80 % of them masked, 10 % replaced, 10 % left.

    A window is a function of its number and the seed, so a resumed run sees what it would have seen.
    """

    def __init__(self, text: torch.Tensor, windows: int, seed: int) -> None:
        self.text, self.windows, self.seed = text, windows, seed

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        window = training_batch(self.text, sequences=1, context=CONTEXT, seed=self.seed, step=number)[0][0]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        chosen, fate = torch.rand(2, CONTEXT, generator=generator)
        others = torch.randint(256, (CONTEXT,), generator=generator)
        shown = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, others, window))
        return {
            "input_ids": torch.where(chosen < 0.15, shown, window),
            "labels": torch.where(chosen < 0.15, window, IGNORED),
        }


class OneBitTrainer(Trainer):
    """A Trainer that attaches the optimizer to its DDP model, and saves one that has all ranks' errors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_callback(AttachOptimizer(self))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # Called on every rank, but only the main process saves, and each has errors that are still to be sent.
        self.optimizer.optimizer.consolidate_errors()
        super()._save_optimizer_and_scheduler(output_dir)


class AttachOptimizer(TrainerCallback):
    """Attaches when training begins: the model is a DistributedDataParallel by then, the optimizer is wrapped."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, *unused: Any, **kwargs: Any) -> None:
        """Attach the optimizer inside of Accelerate's wrapper."""
        if args.world_size > 1:
            self.trainer.optimizer.optimizer.attach(self.trainer.model_wrapped)


def main() -> None:
    """Train, evaluate, report."""
    parser = make_parser(__doc__)
    parser.set_defaults(steps=300, freeze_step=100, lr=0.006, batch_size=32)
    parser.add_argument("--eval-windows", type=int, default=4096, help="held-out windows in all")
    args = parser.parse_args()
    set_seed(args.seed)
    corpus = load_corpus()
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=CONTEXT, initializer_range=0.08, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    # Its loss is a mean, whatever else it is given: the Trainer must divide it by the passes of a step.
    model.accepts_loss_kwargs = False
    options = TrainingArguments(
        output_dir=str(args.checkpoints),
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=256,
        gradient_accumulation_steps=args.accumulate,
        max_grad_norm=0.0,  # the optimizer clips; the Trainer's default is 1.0
        ddp_find_unused_parameters=False,
        save_steps=args.save_every,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
    )
    optimizer = make_optimizer(args, model.parameters())
    windows = args.steps * args.accumulate * args.batch_size * options.world_size
    trainer = OneBitTrainer(
        model=model,
        args=options,
        train_dataset=MaskedBytes(corpus.train, windows, args.seed),
        eval_dataset=MaskedBytes(corpus.held_out, args.eval_windows, args.seed),
        optimizers=(optimizer, make_schedule(args, optimizer)),
    )
    trainer.train(resume_from_checkpoint=str(args.resume) if args.resume else None)
    held_out = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        report(args, optimizer, losses, held_out_loss=held_out)


if __name__ == "__main__":
    main()
