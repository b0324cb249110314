"""Random combinations of the options of a training run, each to be compared with one process.

Features that work on their own may break each other. :func:`drawn` draws options of all kinds at once; which of them
cannot be combined is in :data:`CONSTRAINTS`, and nowhere else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

# A family's name, its group and model_type in the zoo's table of tiny sizes, and what is changed of these.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # dense, with grouped queries, biases, fused projections, tied or transposed matrices
    "llama": ("causal", "llama", {}),
    "llama-uneven": (
        "causal", "llama",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 251,
         "intermediate_size": 109, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-one-key": ("causal", "llama", {"num_key_value_heads": 1, "vocab_size": 253}),
    "qwen2": ("causal", "qwen2", {}),
    "qwen3": ("causal", "qwen3", {}),
    "gemma2": ("causal", "gemma2", {}),
    "gemma3": ("causal", "gemma3_text", {}),
    "gemma3n": ("causal", "gemma3n_text", {}),
    "gpt2": ("causal", "gpt2", {}),
    "gpt_neox": ("causal", "gpt_neox", {}),
    "gptj": ("causal", "gptj", {}),
    "phi": ("causal", "phi", {}),
    "phi3": ("causal", "phi3", {}),
    "olmo2": ("causal", "olmo2", {}),
    "falcon": ("causal", "falcon", {}),
    "bloom": ("causal", "bloom", {}),
    "opt": ("causal", "opt", {}),
    "mpt": ("causal", "mpt", {}),
    "stablelm": ("causal", "stablelm", {}),
    "starcoder2": ("causal", "starcoder2", {}),
    "cohere2": ("causal", "cohere2", {}),
    "granite": ("causal", "granite", {}),
    "nemotron": ("causal", "nemotron", {}),
    # mixtures of experts, latent attention
    "mixtral": ("causal", "mixtral", {}),
    "mixtral-router": ("causal", "mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
    "qwen3_moe": ("causal", "qwen3_moe", {}),
    "gpt_oss": ("causal", "gpt_oss", {}),
    "granitemoe": ("causal", "granitemoe", {}),
    "olmoe": ("causal", "olmoe", {}),
    "llama4": ("causal", "llama4_text", {}),
    "deepseek_v2": ("causal", "deepseek_v2", {}),
    "deepseek_v3": ("causal", "deepseek_v3", {}),
    # state spaces, linear attention and convolutions, alone or beside attention
    "mamba": ("causal", "mamba", {}),
    "mamba2": ("causal", "mamba2", {}),
    "bamba": ("causal", "bamba", {}),
    "falcon_h1": ("causal", "falcon_h1", {}),
    "jamba": ("causal", "jamba", {}),
    "zamba": ("causal", "zamba", {}),
    "zamba2": ("causal", "zamba2", {}),
    "nemotron_h": ("causal", "nemotron_h", {}),
    "recurrent_gemma": ("causal", "recurrent_gemma", {}),
    "qwen3_next": ("causal", "qwen3_next", {}),
    "lfm2": ("causal", "lfm2", {}),
    "minimax": ("causal", "minimax", {}),
    # encoders, encoder-decoders, pictures, sounds
    "bert": ("masked", "bert", {}),
    "roberta-classes": ("sequence", "roberta", {}),
    "deberta": ("masked", "deberta-v2", {}),
    "modernbert": ("masked", "modernbert", {}),
    "albert": ("masked", "albert", {}),
    "electra-tokens": ("token", "electra", {}),
    "qwen3-classes": ("sequence", "qwen3", {}),
    "t5": ("seq2seq", "t5", {}),
    "bart": ("seq2seq", "bart", {}),
    "pegasus": ("seq2seq", "pegasus", {}),
    "switch": ("seq2seq", "switch_transformers", {}),
    "vit": ("image", "vit", {}),
    "swin": ("image", "swin", {}),
    "convnext": ("image", "convnext", {}),
    "resnet": ("image", "resnet", {}),
    "wav2vec2": ("ctc", "wav2vec2", {}),
    "llava": ("image-text", "llava", {}),
    "qwen2_vl": ("image-text", "qwen2_vl", {}),
}  # fmt: skip

# Of each option what it may be, and how often it is drawn. The first value is the plain one.
CHOICES: dict[str, dict[Any, int]] = {
    "tensor_ranks": {2: 12, 3: 3, 4: 1, 1: 1},
    "copies": {1: 5, 2: 1},
    "replicated": {False: 3, True: 1},
    "driver": {"trainer": 4, "fabric": 1},
    "precision": {"32-true": 6, "float64": 3, "bf16-mixed": 3, "bf16-true": 1, "16-mixed": 1},
    "source": {"config": 2, "directory": 1, "ready": 1},
    "tied": {"default": 3, "yes": 1, "no": 1},
    "loss": {"own": 4, "cross-entropy": 1, "smoothed": 1, "log-probs": 1, "z-loss": 1, "divergence": 1},
    "padded": {False: 3, True: 1},
    "shapes": {"same": 3, "tokens": 1, "rows": 1},
    "attention": {"default": 6, "eager": 1, "flex_attention": 1, "flash_attention_2": 1},
    "frozen": {"nothing": 4, "embeddings": 1, "half": 1, "beginning": 1, "vectors": 1, "matrices": 1},
    "adapter": {"none": 4, "lora": 1, "dora": 1},
    "base": {"plain": 6, "nf4": 1, "int8": 1, "rows": 1},
    "optimizer": {
        "SGD": 4, "AdamW": 4, "Adam-fused": 1, "AdamW-foreach": 1, "Adagrad": 1, "RMSprop": 1, "NAdam": 1, "Adamax": 1,
        "Adafactor": 1, "whole-Adafactor": 2, "whole-Muon": 2,
    },
    "groups": {1: 2, 2: 1},
    "schedule": {False: 2, True: 1},
    "accumulate": {1: 2, 2: 1, 3: 1},
    "clip": {"none": 2, "norm": 2, "value": 1},
    "sequence_parallel": {"no": 3, "yes": 2, "auto": 1},
    "checkpointing": {"none": 6, "blocks": 2, "offload": 2, "own": 2, "auto": 1},
    "compile": {"none": 5, "blocks": 1, "whole": 1},
    "offload": {False: 6, True: 1},
    "broadcast": {False: 4, True: 1},
    "averaging": {False: 3, True: 1},
    "evaluation": {"none": 2, "epoch": 1, "batch": 1},
    "generates": {False: 3, True: 1},
    "resume": {"none": 3, "file": 1, "directory": 1, "from-one-process": 1, "to-one-process": 1},
    "export": {"none": 4, "run": 1, "checkpoint": 1},
}  # fmt: skip

# What an option that is not plain is drawn together with, where these options may not be what they are.
NEEDS: dict[str, dict[str, Any]] = {
    "base": {"adapter": "lora", "source": "directory"},
    "generates": {"evaluation": "epoch"},
}


@dataclass(frozen=True)
class Combination:
    """The options of a run; those that are not given are plain.

    Attributes:
        family: a key of :data:`FAMILIES`.
        tensor_ranks: that share a copy of the model.
        copies: of the model.
        replicated: whether the copies hold everything each, and not a part of it.
        driver: the Trainer, or a loop of one's own with Fabric.
        precision: the driver's; ``float64``: that of the model, and of what it is given.
        source: ``config`` and ``directory`` (``from_pretrained``) in ``configure_model()``; ``ready``: made with its
            weights, before.
        tied: whether the head is the embedding, where the family's config leaves that open.
        loss: the model's ``own``, or one of its logits.
        padded: whether a row is shorter than the others.
        shapes: whether later batches have fewer tokens or rows.
        attention: the model's implementation of it; of FlashAttention a stand-in.
        frozen: what needs no gradient.
        adapter: PEFT's on all linear layers.
        base: what adapters are on, if it is quantized: by bitsandbytes (``nf4``, ``int8``) or torchao (``rows``).
        optimizer: of ``torch.optim``; ``whole-``: within ``WholeMatrixOptimizer``.
        groups: of parameters, with other weight decays.
        schedule: of the learning rate.
        accumulate: batches of a step.
        clip: gradients by what.
        sequence_parallel: the strategy's.
        checkpointing: the strategy's ``activation_checkpointing``, or the model's ``own``.
        compile: the blocks or the whole model, on the ranks; one process does without.
        offload: the strategy's ``cpu_offload``.
        broadcast: the strategy's ``broadcast_batches``.
        averaging: exponential moving averages of the weights.
        evaluation: after an epoch, or after each batch.
        generates: whether an evaluation writes tokens, too.
        resume: half-way, from a checkpoint of either kind; from one that one process has written, or in one process.
        export: to a Hugging Face directory, in the run or from a checkpoint.
    """

    family: str = "llama"
    tensor_ranks: int = 2
    copies: int = 1
    replicated: bool = False
    driver: str = "trainer"
    precision: str = "32-true"
    source: str = "config"
    tied: str = "default"
    loss: str = "own"
    padded: bool = False
    shapes: str = "same"
    attention: str = "default"
    frozen: str = "nothing"
    adapter: str = "none"
    base: str = "plain"
    optimizer: str = "SGD"
    groups: int = 1
    schedule: bool = False
    accumulate: int = 1
    clip: str = "none"
    sequence_parallel: str = "no"
    checkpointing: str = "none"
    compile: str = "none"
    offload: bool = False
    broadcast: bool = False
    averaging: bool = False
    evaluation: str = "none"
    generates: bool = False
    resume: str = "none"
    export: str = "none"

    def __str__(self) -> str:
        """The family and whatever is not plain, as :func:`given` reads it."""
        return " ".join([self.family, *(f"{name}={getattr(self, name)}" for name in self.unusual)])

    @property
    def unusual(self) -> list[str]:
        """Names of the options that are not plain."""
        return [name for name, values in CHOICES.items() if getattr(self, name) != next(iter(values))]

    @property
    def group(self) -> str:
        """The zoo's, of the family."""
        return FAMILIES[self.family][0]

    @property
    def ranks(self) -> int:
        return self.tensor_ranks * self.copies

    def simpler(self) -> Iterator[Combination]:
        """Each with one option made plain, or with the plainest family, as far as they may be."""
        for name in self.unusual:
            yield from _if_valid(replace(self, **{name: next(iter(CHOICES[name]))}))
        if self.family != "llama":
            yield from _if_valid(replace(self, family="llama"))


_READS_TOKENS = ("causal", "masked", "token")

# Their experts are stacked: PEFT decomposes no such weights, and torch's grouped products take no float64.
_MIXTURES = (
    "mixtral", "mixtral-router", "qwen3_moe", "gpt_oss", "granitemoe", "olmoe", "llama4", "deepseek_v2", "deepseek_v3",
    "jamba", "nemotron_h", "qwen3_next", "minimax",
)  # fmt: skip

# Of transformers' families that know the kernel, some: their attention is PyTorch's otherwise.
_FLEX = (
    "llama", "llama-uneven", "llama-one-key", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox", "phi", "phi3", "olmo2",
    "starcoder2", "cohere2", "granite", "nemotron", "mixtral", "qwen3_moe",
)  # fmt: skip
_KERNELS = {
    "flex_attention": (*_FLEX, "gpt_oss"),
    "flash_attention_2": (*_FLEX, "gpt2", "falcon", "opt", "stablelm", "qwen3_next", "bart", "bert", "vit"),
}

# Dense ones of ``nn.Linear`` layers, whose rows quantization in blocks divides.
_QUANTIZED = (
    "llama", "llama-one-key", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox", "olmo2", "phi", "phi3", "stablelm",
    "starcoder2", "cohere2", "granite", "nemotron",
)  # fmt: skip

# What must be so, in words and in code. What the product refuses is no constraint: see ``REFUSALS``.
CONSTRAINTS: dict[str, Callable[[Combination], bool]] = {
    "several ranks": lambda c: c.ranks > 1,
    "four ranks at most": lambda c: c.ranks <= 4,
    "replicas are copies": lambda c: c.copies > 1 or not c.replicated,
    "torch's GradScaler takes no gradients in host memory": lambda c: not c.offload or c.precision != "16-mixed",
    "only language models have a loss of logits": lambda c: c.loss == "own" or c.group in ("causal", "masked"),
    "only language models have a head that may be tied": lambda c: c.tied == "default" or c.group == "causal",
    "adapters are for language models, and freeze all else": lambda c: (
        c.adapter == "none" or (c.group == "causal" and c.frozen == "nothing")
    ),
    "PEFT decomposes no stacked experts, nor int8": lambda c: (
        c.adapter != "dora" or (c.family not in _MIXTURES and c.base != "int8")
    ),
    "grouped products take no float64": lambda c: c.precision != "float64" or c.family not in _MIXTURES,
    "tokens are padded, and fewer": lambda c: (not c.padded and c.shapes != "tokens") or c.group in _READS_TOKENS,
    "a row has one picture or several": lambda c: c.shapes != "rows" or c.group != "image-text",
    "a quantized base is of a directory, beneath adapters": lambda c: (
        c.base == "plain"
        or (c.adapter != "none" and c.source == "directory" and c.family in _QUANTIZED and c.precision != "float64")
    ),
    "a checkpoint of one process has packed numbers": lambda c: c.base == "plain" or "process" not in c.resume,
    "bitsandbytes evaluates int8 otherwise on a CPU, and packs nf4 for it": lambda c: (
        c.base not in ("int8", "nf4") or c.evaluation == "none"
    ),
    "weight averaging is a callback": lambda c: not c.averaging or c.driver == "trainer",
    "kernels of attention are of some families": lambda c: (
        c.attention not in _KERNELS or c.family in _KERNELS[c.attention]
    ),
    "kernels of attention and the model are not compiled at once": lambda c: (
        c.attention not in _KERNELS or c.compile == "none"
    ),
    "an export builds the model again, for which FlashAttention has to be installed": lambda c: (
        c.attention != "flash_attention_2" or c.export == "none"
    ),
    "text is written in an evaluation": lambda c: (
        not c.generates or (c.evaluation != "none" and c.group in ("causal", "seq2seq"))
    ),
    "checkpoints of adapters have no model": lambda c: c.export != "checkpoint" or c.adapter == "none",
    "batch normalization is of each copy's batch": lambda c: c.family != "resnet" or c.copies == 1,
    "batch norms of three pictures multiply rounding": lambda c: (
        c.family != "resnet" or c.precision == "float64" or (c.precision == "32-true" and c.resume == "none")
    ),
    "torch's checkpointing updates running statistics twice": lambda c: (
        c.family != "resnet" or c.checkpointing != "blocks"
    ),
    "a step that is rehearsed has the model's own loss": lambda c: (
        c.checkpointing != "auto"
        or (
            c.family in ("gpt2", *_QUANTIZED)
            and (c.driver, c.loss, c.adapter, c.attention) == ("trainer", "own", "none", "default")
            and c.compile == "none"
            and c.precision in ("32-true", "bf16-mixed", "bf16-true")
        )
    ),
    "some checkpoint nothing themselves": lambda c: (
        c.checkpointing != "own" or c.family not in ("albert", "convnext", "resnet")
    ),
    "Muon takes matrices": lambda c: c.optimizer != "whole-Muon" or (c.group == "causal" and c.frozen != "matrices"),
}


def _if_valid(combination: Combination) -> Iterator[Combination]:
    if all(holds(combination) for holds in CONSTRAINTS.values()):
        yield combination


def drawn(seed: int) -> Combination:
    """A combination, the same for the same seed. Options are drawn one after the other; what may not be stays plain."""
    generator = random.Random(seed)
    found = Combination(generator.choice([*FAMILIES]))
    for name in generator.sample([*CHOICES], len(CHOICES)):
        values = CHOICES[name]
        (value,) = generator.choices([*values], [*values.values()])
        alone = replace(found, **{name: value})
        needed = NEEDS.get(name, {}) if name in alone.unusual else {}
        found = next(chain(_if_valid(alone), _if_valid(replace(alone, **needed))), found)
    return found


def given(text: str) -> Combination:
    """The combination that is written as ``str`` writes one: ``llama tensor_ranks=3 clip=norm``.

    Raises:
        ValueError: for what is no option, or may not be.
    """
    family, *options = text.split()
    if family not in FAMILIES:
        raise ValueError(f"{family} is none of the families {', '.join(FAMILIES)}")
    chosen: dict[str, Any] = {}
    for option in options:
        name, _, written = option.partition("=")
        values = {str(value): value for value in CHOICES.get(name, {})}
        if written not in values:
            raise ValueError(f"{option}: {name} may be {', '.join(values) or 'nothing: there is no such option'}")
        chosen[name] = values[written]
    combination = Combination(family, **chosen)
    for words, holds in CONSTRAINTS.items():
        if not holds(combination):
            raise ValueError(f"{text}: {words}")
    return combination


assert {field.name: field.default for field in fields(Combination)} == {
    "family": "llama", **{name: next(iter(values)) for name, values in CHOICES.items()},
}  # fmt: skip
