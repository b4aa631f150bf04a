"""Networks that nobody here wrote, each with made-up records that it can learn from: random weights, nothing loaded.

`python -m tests.running.architectures NAME FOLDER` loads the posteriors of that folder in a fresh process and says
whether they predict what they did before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from confide.data import Input, Schema
from confide.data.trees import rows_of
from confide.models.likelihoods import Likelihood, Tokens
from confide.posteriors.files import load_posterior

RECORDS, LENGTH, WORDS = 48, 6, 20
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 16, "num_labels": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A network with records that it can learn from."""

    module: nn.Module
    x: Any
    y: Tensor
    schema: Schema
    likelihood: Likelihood | None = None

    @property
    def new(self) -> Any:
        return rows_of(self.x, slice(0, 4))


TASKS: dict[str, Callable[..., Task]] = {}


def task(function: Callable[[], Task]) -> Callable[..., Task]:
    def build(seed: int = 0) -> Task:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return function()

    TASKS[function.__name__.replace("_", "-")] = build
    return build


def words() -> dict[str, Tensor]:
    """Texts in which every word follows from the one before; some are shorter, with padding behind a mask."""
    first = torch.randint(0, WORDS - 3, (RECORDS, 1))
    ids = 3 + (first + torch.arange(LENGTH)) % (WORDS - 3)
    mask = torch.ones(RECORDS, LENGTH, dtype=torch.long)
    mask[::3, -2:] = 0
    return {"input_ids": torch.where(mask == 1, ids, 0), "attention_mask": mask}


TEXT = {"input_ids": Input(vocabulary=WORDS), "attention_mask": Input(vocabulary=2)}


def about_first_word(module: nn.Module) -> Task:
    x = words()
    y = (x["input_ids"][:, 0] >= WORDS // 2).long()
    return Task(module, x, y, Schema(classes=2, records=RECORDS, inputs=TEXT))


def next_words(module: nn.Module) -> Task:
    x = words()
    y = torch.where(x["attention_mask"] == 1, x["input_ids"], -100)
    schema = Schema(classes=WORDS, records=RECORDS, inputs=TEXT)
    return Task(module, x, y, schema, Tokens(WORDS, shifted=True, length=LENGTH))


def library(kind: str, head: str, **options: Any) -> nn.Module:
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**SMALL | options)
    made: nn.Module = getattr(transformers, head).from_config(config)
    return made


LABELS, LANGUAGE, IMAGES = (
    f"AutoModelFor{head}" for head in ("SequenceClassification", "CausalLM", "ImageClassification")
)


def dropped(layer: nn.Module) -> nn.Module:
    """A layer followed by dropout, for architectures that were published without any."""
    return nn.Sequential(layer, nn.Dropout(0.1))


@task
def bert() -> Task:
    return about_first_word(library("bert", LABELS))


@task
def bert_on_tokens() -> Task:
    """A label for every word, none for padding."""
    x = words()
    y = torch.where(x["attention_mask"] == 1, (x["input_ids"] >= WORDS // 2).long(), -100)
    module = library("bert", "AutoModelForTokenClassification")
    return Task(module, x, y, Schema(classes=2, records=RECORDS, inputs=TEXT), Tokens(2))


@task
def distilbert() -> Task:
    return about_first_word(library("distilbert", LABELS, dim=16, n_layers=1, n_heads=2, hidden_dim=24))


@task
def gpt2() -> Task:
    return next_words(library("gpt2", LANGUAGE, n_embd=16, n_layer=1, n_head=2, n_positions=16))


@task
def gpt2_with_labels() -> Task:
    return about_first_word(library("gpt2", LABELS, n_embd=16, n_layer=1, n_head=2, n_positions=16))


@task
def llama() -> Task:
    module: Any = library("llama", LANGUAGE, num_key_value_heads=1, attention_dropout=0.1)
    module.model.norm = dropped(module.model.norm)
    return next_words(module)


@task
def mixtral() -> Task:
    import transformers

    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=1, head_dim=8, num_local_experts=3, num_experts_per_tok=2
    )
    module: Any = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="batched_mm")
    module.model.norm = dropped(module.model.norm)
    return next_words(module)


@task
def mamba() -> Task:
    module: Any = library("mamba", LANGUAGE, state_size=4, time_step_rank=2, use_cache=False)
    module.backbone.norm_f = dropped(module.backbone.norm_f)
    return next_words(module)


@task
def t5() -> Task:
    """The target is the text itself, behind a first word that starts it."""
    module = library("t5", "AutoModelForSeq2SeqLM", d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    text = words()
    target = torch.cat([torch.zeros(RECORDS, 1, dtype=torch.long), text["input_ids"][:, :-1]], 1)
    x = {**text, "decoder_input_ids": target}
    y = torch.where(text["attention_mask"] == 1, text["input_ids"], -100)
    schema = Schema(classes=WORDS, records=RECORDS, inputs={**TEXT, "decoder_input_ids": Input(vocabulary=WORDS)})
    return Task(module, x, y, schema, Tokens(WORDS, length=LENGTH))


# images -------------------------------------------------------------------------------------------------------------


def about_brightness(module: nn.Module, name: str | None, size: int = 16) -> Task:
    pixels = torch.randn(RECORDS, 3, size, size)
    y = torch.arange(RECORDS) % 2
    pixels += (2.0 * y - 1)[:, None, None, None]
    schema = Schema(classes=2, records=RECORDS, inputs={name or "0": Input(bounds=(-4, 4))})
    return Task(module, {name: pixels} if name else pixels, y, schema)


def about_stripes(module: nn.Module, size: int = 16) -> Task:
    """Upright or lying: for networks whose normalisation takes brightness away."""
    pixels = torch.randn(RECORDS, 3, size, size)
    y = torch.arange(RECORDS) % 2
    wave = 1.5 * torch.cos(torch.arange(size) * torch.pi / 2)
    pixels += torch.where(y[:, None, None, None] == 1, wave.view(1, 1, 1, -1), wave.view(1, 1, -1, 1))
    return Task(module, pixels, y, Schema(classes=2, records=RECORDS, inputs={"0": Input(bounds=(-4, 4))}))


@task
def vit() -> Task:
    options = {"image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.1}
    return about_brightness(library("vit", IMAGES, **options), "pixel_values")


@task
def convnext() -> Task:
    module: Any = library("convnext", IMAGES, hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, patch_size=2)
    module.classifier = nn.Sequential(nn.Dropout(0.1), module.classifier)
    return about_brightness(module, "pixel_values")


class FastNorm(nn.LayerNorm):
    """As timm has it: a subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class LayerScale(nn.Module):
    """A factor for every feature (Touvron et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class FusedAttention(nn.Module):
    """One matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        records, positions, width = x.shape
        split = self.qkv(x).reshape(records, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split.unbind(0), dropout_p=0.1 if self.training else 0.0)
        found: Tensor = self.proj(mixed.transpose(1, 2).reshape(records, positions, width))
        return found


class EncoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = FastNorm(width), FusedAttention(width, 2), LayerScale(width)
        self.norm2, self.ls2 = FastNorm(width), LayerScale(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        found: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return found


class VisionTransformer(nn.Module):
    """Of timm, written by hand: the library needs torchvision. Patches, a class token, learnt positions, blocks."""

    def __init__(self, width: int = 16, patches: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, patches + 1, width) * 0.02)
        self.blocks = nn.Sequential(EncoderBlock(width), EncoderBlock(width))
        self.norm, self.head = FastNorm(width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1) + self.pos_embed
        found: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return found


@task
def timm_vit() -> Task:
    return about_brightness(VisionTransformer(), None)


class Block(nn.Module):
    """Of a residual network (He et al. 2016), with group normalisation."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(2, outer), nn.GroupNorm(2, outer)])
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(inner)) + self.short(x))


@task
def resnet18_with_group_norm() -> Task:
    widths = (4, 4, 8, 8, 8, 12, 12, 12, 12)
    blocks = [Block(widths[n], widths[n + 1], 1 + (widths[n] != widths[n + 1])) for n in range(8)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 2)]
    return about_stripes(nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), *blocks, *head))


# tables and sequences in plain torch --------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 12)
        self.lstm = nn.LSTM(12, 16, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 2))

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.words(ids))
        found: Tensor = self.head(states.mean(1))
        return found


@task
def lstm_on_tokens() -> Task:
    ids = torch.randint(0, WORDS, (RECORDS, LENGTH))
    schema = Schema(classes=2, records=RECORDS, inputs=Input(vocabulary=WORDS))
    return Task(Recurrent(), ids, (ids[:, 0] >= WORDS // 2).long(), schema)


class Tabular(nn.Module):
    """A transformer over columns (Gorishniy et al. 2021): numbers and categories are tokens, beside a mask."""

    def __init__(self, numbers: int, categories: int, kinds: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(numbers, 16) / 4)
        self.shift = nn.Parameter(torch.zeros(numbers, 16))
        self.lookup = nn.Embedding(categories * kinds, 16)
        self.places = [place * kinds for place in range(categories)]
        self.first = nn.Parameter(torch.zeros(16))
        self.body = nn.TransformerEncoderLayer(16, 2, 24, 0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, numbers: Tensor, categories: Tensor, known: Tensor) -> Tensor:
        tokens = numbers.unsqueeze(2) * self.scale + self.shift
        tokens = tokens * known.unsqueeze(2)
        looked_up = self.lookup(categories + torch.tensor(self.places))
        first = self.first.expand(len(numbers), 1, 16)
        found: Tensor = self.head(self.body(torch.cat([first, tokens, looked_up], 1))[:, 0])
        return found


@task
def ft_transformer() -> Task:
    numbers = torch.randn(RECORDS, 3).double()  # numpy's type against the module's
    categories, known = torch.randint(0, 4, (RECORDS, 2)), torch.rand(RECORDS, 3) > 0.1
    inputs = [Input(bounds=(-3, 3)), Input(vocabulary=4), Input(vocabulary=2)]
    y = (numbers[:, 0] > 0).long()
    return Task(Tabular(3, 2, 4), (numbers, categories, known), y, Schema(classes=2, records=RECORDS, inputs=inputs))


class Ensemble(nn.Module):
    """Members that share a matrix and have scales of their own (Gorishniy et al. 2025); their logits are averaged."""

    def __init__(self, features: int, members: int = 4) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.randn(members, features).sign())
        self.shared = nn.Linear(features, 16)
        self.drop = nn.Dropout(0.1)
        self.heads = nn.Parameter(torch.randn(members, 16, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.drop(torch.relu(self.shared(x.unsqueeze(1) * self.scales)))
        return torch.einsum("bmi,mio->bmo", inner, self.heads).mean(1)


@task
def tab_m() -> Task:
    x = torch.randn(RECORDS, 5)
    return Task(Ensemble(5), {"x": x}, (x[:, 0] > 0).long(), Schema(classes=2, records=RECORDS))


def same_predictions(name: str, folder: Path) -> bool:
    return predict_alike(TASKS[name](), folder)


def predict_alike(made: Task, folder: Path) -> bool:
    """Whether every posterior in the folder predicts what stands beside it."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        posterior = load_posterior(file, made.module)
        before = torch.load(file.with_suffix(".pt"))
        if not torch.allclose(posterior.summary(made.new).centre, before, atol=1e-6):
            return False
    return bool(files)


if __name__ == "__main__":
    from tests.running import (  # noqa: F401 - one table
        architectures,
        further_architectures,
        more_architectures,
        unusual_architectures,
    )

    sys.exit(0 if architectures.same_predictions(sys.argv[1], Path(sys.argv[2])) else 1)
