"""Small trainable parts on frozen networks of a library, which are read from a folder as from_pretrained reads them.

`python -m tests.running.adapters NAME BACKBONE FOLDER` reads the backbone anew in a fresh process, puts the adapter on
it, loads the posteriors of that folder and says whether they predict what they did before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.running.architectures import LABELS, LANGUAGE, Task, about_first_word, library, next_words, predict_alike

WIDE: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 48, "vocab_size": 40}
"""A backbone of which a posterior's file holds a fingerprint alone."""
BACKBONES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", LABELS, WIDE),
    "gpt2": ("gpt2", LANGUAGE, {"n_embd": 24, "n_layer": 1, "n_head": 2, "n_positions": 16, "n_inner": 48}),
}


def write(name: str, folder: Path, seed: int = 0) -> None:
    """A network with random weights, as somebody who trained one would leave it behind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind, head, options = BACKBONES[name]
        module: Any = library(kind, head, **options)
        module.save_pretrained(folder)


def read(name: str, folder: Path) -> nn.Module:
    import transformers

    found: nn.Module = getattr(transformers, BACKBONES[name][1]).from_pretrained(folder, local_files_only=True)
    return found


class Bottleneck(nn.Module):
    """Houlsby et al. 2019: a narrow detour, which starts as nothing, behind a frozen layer."""

    def __init__(self, layer: nn.Module, width: int, narrow: int = 2) -> None:
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(width, narrow), nn.Linear(narrow, width)
        nn.init.zeros_(self.up.weight)

    def forward(self, *inputs: Any) -> Tensor:
        found = self.layer(*inputs)
        return found + self.up(torch.tanh(self.down(found)))  # type: ignore[no-any-return]


def by_peft(kind: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def adapted(module: nn.Module) -> nn.Module:
        import peft

        made: nn.Module = peft.get_peft_model(module, getattr(peft, kind)(**options))
        return made

    return adapted


def bottlenecks(module: Any) -> nn.Module:
    """What the detours bring along is trainable, and the classifier."""
    for layer in module.bert.encoder.layer:
        layer.output.dense = Bottleneck(layer.output.dense, WIDE["hidden_size"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".down." in name or ".up." in name or name.startswith("classifier"))
    return module  # type: ignore[no-any-return]


def last_layer(module: Any) -> nn.Module:
    module.requires_grad_(False)
    module.classifier.requires_grad_(True)
    return module  # type: ignore[no-any-return]


LORA: dict[str, Any] = {"task_type": "SEQ_CLS", "r": 2, "target_modules": ["query", "value"], "lora_dropout": 0.1}
ADAPTERS: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "lora": ("bert", by_peft("LoraConfig", **LORA)),
    "dora": ("bert", by_peft("LoraConfig", **LORA, use_dora=True)),
    "lora-on-transposed-layers": (
        "gpt2",
        by_peft("LoraConfig", task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    ),
    "prompt-tuning": ("bert", by_peft("PromptTuningConfig", task_type="SEQ_CLS", num_virtual_tokens=3)),
    "prefix-tuning": ("gpt2", by_peft("PrefixTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "ia3": (
        "bert",
        by_peft("IA3Config", task_type="SEQ_CLS", target_modules=["query", "value"], feedforward_modules=[]),
    ),
    "bottleneck-adapters": ("bert", bottlenecks),
    "last-layer": ("bert", last_layer),
}


def task_of(name: str, folder: Path) -> Task:
    backbone, adapted = ADAPTERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = adapted(read(backbone, folder))
        return about_first_word(module) if backbone == "bert" else next_words(module)


if __name__ == "__main__":
    sys.exit(0 if predict_alike(task_of(sys.argv[1], Path(sys.argv[2])), Path(sys.argv[3])) else 1)
