"""A loss of TRL in a LightningModule: distillation by a generalized Jensen-Shannon divergence. No logits are gathered.

python examples/trl_losses.py --devices 2 --max_steps 20

TRL's functions of logits take a parallel model's as they are: ``selective_log_softmax``, ``entropy_from_logits``, and
the divergence here, which is that of Agarwal et al. 2024, "On-Policy Distillation of Language Models". TRL needs
Python 3.11.
"""

from __future__ import annotations

from distillation import Distillation, distil
from jsonargparse import auto_cli
from smollm2 import NAME
from task import TextData
from torch import Tensor
from trl.experimental.gkd import GKDTrainer


class GeneralizedDistillation(Distillation):
    """Student and teacher as there.

    Args:
        model: the teacher's Hub id or directory.
        learning_rate: AdamW's.
        temperature: divides the logits of both.
        beta: from 0, the divergence of the student from the teacher, to 1, that of the teacher from the student.
    """

    def __init__(
        self, model: str = NAME, learning_rate: float = 1e-4, temperature: float = 0.9, beta: float = 0.5
    ) -> None:
        super().__init__(model, learning_rate, temperature)
        self.save_hyperparameters()

    def divergence(self, learned: Tensor, taught: Tensor) -> Tensor:
        """A token's, of logits ``[batch, seq, vocab]``."""
        found: Tensor = GKDTrainer.generalized_jsd_loss(
            learned.flatten(0, 1),
            taught.flatten(0, 1),
            beta=self.hparams["beta"],
            temperature=self.hparams["temperature"],
        )
        return found


def main(
    model: str = NAME,
    text: str | None = None,
    output_dir: str = "runs/trl_losses",
    devices: int = 2,
    max_steps: int = 20,
    learning_rate: float = 1e-4,
    temperature: float = 0.9,
    beta: float = 0.5,
    sequence_length: int = 256,
    batch_size: int = 4,
) -> None:
    """Teach a model of half as many layers what a model knows.

    Args:
        model: the teacher's Hub id or directory; "smollm2" is the SmolLM2-135M-Instruct that comes from a package.
        text: a text file; by default the Python reference manual.
        output_dir: where the Hugging Face directory of the student goes.
        devices: number of processes.
        max_steps: optimizer steps.
        learning_rate: AdamW's.
        temperature: divides the logits of both models.
        beta: which of the two is compared with the other, from 0 to 1.
        sequence_length: tokens in a block.
        batch_size: blocks in a batch.
    """
    task = GeneralizedDistillation(model, learning_rate, temperature, beta)
    distil(task, TextData(model, text, sequence_length, batch_size), output_dir, devices, max_steps)


if __name__ == "__main__":
    auto_cli(main)
