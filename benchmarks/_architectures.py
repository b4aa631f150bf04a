"""Networks that nobody here wrote, of random weights, each with a batch of made-up records, in two sizes."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._models import Case, cross_entropy

WORDS = 1000


class Logits(nn.Module):
    """A model of the transformers library as a function of one tensor."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(**{self.name: x}).logits
        return found


def next_word(output: Tensor, y: Tensor) -> Tensor:
    """Mean over positions of a record: its own, of fixed length."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="none").view(len(y), -1).mean(1)


def _library(kind: str, head: str, name: str, **options: Any) -> nn.Module:
    import transformers

    experts = options.pop("experts_implementation", None)
    config = transformers.CONFIG_MAPPING[kind](**options)
    extra = {} if experts is None else {"experts_implementation": experts}
    return Logits(getattr(transformers, f"AutoModelFor{head}").from_config(config, **extra), name)


def _words(records: int, length: int) -> Tensor:
    return torch.randint(3, WORDS, (records, length))


def _language(name: str, module: nn.Module, records: int, length: int) -> Case:
    ids = _words(records, length)
    return Case(name, module, ids, ids, next_word)


SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
SPECIAL: dict[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(tiny: bool) -> Case:
    """GPT-2 small, as published."""
    options = (
        {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 128, "vocab_size": WORDS, **SPECIAL} if tiny else {}
    )
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _language("gpt2", _library("gpt2", "CausalLM", "input_ids", **options, **dropout, use_cache=False), 4, 64)


def bert(tiny: bool) -> Case:
    """BERT base, as published."""
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    options = {**SMALL, "vocab_size": WORDS, **SPECIAL} if tiny else {}
    module = _library("bert", "SequenceClassification", "input_ids", **options, **dropout, num_labels=2)
    return Case("bert", module, _words(8, 64), torch.randint(2, (8,)), cross_entropy)


def vit(tiny: bool) -> Case:
    """ViT-B/16, as published."""
    options = {**SMALL, "image_size": 64, "patch_size": 8} if tiny else {}
    module = _library("vit", "ImageClassification", "pixel_values", **options, num_labels=10)
    pixels = torch.rand(16, 3, 64, 64) if tiny else torch.rand(4, 3, 224, 224)
    return Case("vit", module, pixels, torch.randint(10, (len(pixels),)), cross_entropy)


class Residual(nn.Module):
    """A block of a residual network with group normalisation."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList([nn.GroupNorm(8, outer), nn.GroupNorm(8, outer)])
        self.short = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(inner)) + self.short(x))


def resnet18_gn(tiny: bool) -> Case:
    widths = [8, 8, 8, 16, 16] if tiny else [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Residual(a, b, 1 + (a != b)) for a, b in pairwise(widths)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)]
    stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
    module = nn.Sequential(stem, nn.GroupNorm(8, widths[0]), nn.ReLU(), *blocks, *head)
    return Case("resnet18_gn", module, torch.rand(16, 3, 32, 32), torch.randint(10, (16,)), cross_entropy)


class Recurrent(nn.Module):
    """Tokens, an LSTM, the mean of its states, a linear read-out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, width), nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.words(ids))[0].mean(1))
        return found


def lstm(tiny: bool) -> Case:
    return Case("lstm", Recurrent(16 if tiny else 256), _words(64, 64), torch.randint(2, (64,)), cross_entropy)


def mamba(tiny: bool) -> Case:
    size = {"hidden_size": 32 if tiny else 256, "num_hidden_layers": 1 if tiny else 2, "state_size": 8}
    module = _library("mamba", "CausalLM", "input_ids", **size, vocab_size=WORDS, use_cache=False, **SPECIAL)
    return _language("mamba", module, 8, 32)


def mixtral(tiny: bool) -> Case:
    size = {**SMALL, "intermediate_size": 64}
    if not tiny:
        size |= {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 512}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "use_cache": False}
    options = {**size, **experts, "vocab_size": WORDS, "experts_implementation": "batched_mm", **SPECIAL}
    return _language("mixtral", _library("mixtral", "CausalLM", "input_ids", **options), 8, 32)


ARCHITECTURES: dict[str, Callable[[bool], Case]] = {
    made.__name__: made for made in (gpt2, bert, vit, resnet18_gn, lstm, mamba, mixtral)
}
