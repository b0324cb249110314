"""The same training as a LightningCLI, with the strategy named by its class path in the configuration.

python examples/cli.py fit --config configs/finetune.yaml --trainer.max_steps 5
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from task import Finetune, TextData

import lightning_autotp  # noqa: F401  registers the name, for --trainer.strategy autotp


class FinetuneCLI(LightningCLI):
    """Uses the trained model's tokenizer for the text."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.model", "data.model")


def main() -> None:
    FinetuneCLI(Finetune, TextData, save_config_callback=None)


if __name__ == "__main__":
    main()
