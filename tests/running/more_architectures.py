"""More networks that nobody here wrote, of kinds that the first table lacks: sound, two texts, sets, graphs, densities.

They stand in one table with those of `architectures`, which says how they are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from confide.data import Input, Schema
from confide.models.likelihoods import Tokens
from tests.running.architectures import (
    LABELS,
    LANGUAGE,
    LENGTH,
    RECORDS,
    TEXT,
    WORDS,
    Task,
    about_brightness,
    about_first_word,
    dropped,
    library,
    next_words,
    task,
    words,
)


@task
def electra() -> Task:
    return about_first_word(library("electra", LABELS, embedding_size=16))


@task
def albert() -> Task:
    """One layer that is used several times."""
    return about_first_word(library("albert", LABELS, embedding_size=8, num_hidden_layers=2))


@task
def roberta() -> Task:
    """Positions follow from where the padding is."""
    return about_first_word(library("roberta", LABELS, max_position_embeddings=24))


@task
def deberta() -> Task:
    return about_first_word(library("deberta-v2", LABELS, relative_attention=True, pos_att_type=["c2p", "p2c"]))


@task
def opt() -> Task:
    module: Any = library("opt", LANGUAGE, ffn_dim=24, word_embed_proj_dim=16, dropout=0.1)
    module.model.decoder.final_layer_norm = dropped(module.model.decoder.final_layer_norm)
    return next_words(module)


@task
def phi() -> Task:
    return next_words(library("phi", LANGUAGE, resid_pdrop=0.1))


@task
def qwen2() -> Task:
    module: Any = library("qwen2", LANGUAGE, num_key_value_heads=1)
    module.model.norm = dropped(module.model.norm)
    return next_words(module)


@task
def gemma() -> Task:
    module: Any = library("gemma", LANGUAGE, num_key_value_heads=1, head_dim=8)
    module.model.norm = dropped(module.model.norm)
    return next_words(module)


@task
def rwkv() -> Task:
    module: Any = library(
        "rwkv", LANGUAGE, attention_hidden_size=16, num_hidden_layers=2, context_length=16, use_cache=False
    )
    module.rwkv.ln_out = dropped(module.rwkv.ln_out)
    return next_words(module)


@task
def bart() -> Task:
    """From the text to the same text, behind a first word that starts it."""
    module: Any = library(
        "bart", "AutoModelForSeq2SeqLM", d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, decoder_start_token_id=2,
    )  # fmt: skip
    module.model.decoder.layernorm_embedding = dropped(module.model.decoder.layernorm_embedding)
    text = words()
    target = torch.cat([torch.full((RECORDS, 1), 2), text["input_ids"][:, :-1]], 1)
    x = {**text, "decoder_input_ids": target}
    y = torch.where(text["attention_mask"] == 1, text["input_ids"], -100)
    inputs = {**TEXT, "decoder_input_ids": Input(vocabulary=WORDS)}
    return Task(
        module, x, y, Schema(classes=WORDS, records=RECORDS, inputs=inputs), Tokens(WORDS, length=LENGTH)
    )  # fmt: skip


@task
def swin() -> Task:
    """Windows that shift, and tables of relative positions."""
    import transformers

    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4, num_labels=2,
        hidden_dropout_prob=0.1,
    )  # fmt: skip
    module: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
    return about_brightness(module, "pixel_values")


def about_pitch(module: nn.Module, name: str, shape: tuple[int, ...]) -> Task:
    """A tone in noise, low or high along the last axis."""
    y = torch.arange(RECORDS) % 2
    time = torch.arange(shape[-1]) / shape[-1]
    tone = torch.sin(2 * torch.pi * time * torch.where(y == 1, 20.0, 5.0).unsqueeze(1))
    sound = tone.view(RECORDS, *[1] * (len(shape) - 1), -1) + 0.3 * torch.randn(RECORDS, *shape)
    return Task(module, {name: sound}, y, Schema(classes=2, records=RECORDS, inputs={name: Input(bounds=(-3, 3))}))


@task
def wav2vec2() -> Task:
    """The wave itself, through convolutions."""
    module = library(
        "wav2vec2", "AutoModelForAudioClassification", conv_dim=[8, 8], conv_kernel=[8, 4], conv_stride=[4, 4],
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
        classifier_proj_size=8, hidden_dropout=0.1, layerdrop=0.0,
    )  # fmt: skip
    return about_pitch(module, "input_values", (128,))


@task
def whisper() -> Task:
    """A spectrogram."""
    module: Any = library(
        "whisper", "AutoModelForAudioClassification", d_model=16, encoder_layers=1, encoder_attention_heads=2,
        encoder_ffn_dim=24, num_mel_bins=4, max_source_positions=32, classifier_proj_size=8, dropout=0.1,
    )  # fmt: skip
    module.projector = dropped(module.projector)
    return about_pitch(module, "input_features", (4, 64))


# in plain torch -----------------------------------------------------------------------------------------------------


class Contracting(nn.Module):
    """Ronneberger et al. 2015: down, up again, what was seen on the way beside it; a label for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.inner = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, 1, 1), nn.SiLU(), nn.Dropout2d(0.1))
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.down(x)
        found: Tensor = self.out(torch.cat([kept, self.up(self.inner(kept))], 1))
        return found.flatten(2).transpose(1, 2)


@task
def u_net() -> Task:
    y = torch.randint(0, 2, (RECORDS, 2, 2)).repeat_interleave(4, 1).repeat_interleave(4, 2)
    x = y.unsqueeze(1) + 0.5 * torch.randn(RECORDS, 1, 8, 8)
    labels = y.flatten(1).clone()
    labels[:, ::7] = -100  # pixels that nobody has labelled
    schema = Schema(classes=2, records=RECORDS, inputs={"0": Input(bounds=(-3, 4))})
    return Task(Contracting(), x, labels, schema, Tokens(2, length=64))


class SetTransformer(nn.Module):
    """Lee et al. 2019: learnt points that a set attends to, and that attend to it, and one that pools it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.points = nn.Parameter(torch.randn(1, 3, width) / 4)
        self.seed = nn.Parameter(torch.randn(1, 1, width) / 4)
        self.induce, self.back, self.pool = (
            nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 2)

    def forward(self, members: Tensor, present: Tensor) -> Tensor:
        x, absent = self.enter(members), present == 0
        points = self.induce(self.points.expand(len(x), -1, -1), x, x, key_padding_mask=absent)[0]
        x = x + self.back(x, points, points)[0]
        pooled = self.pool(self.seed.expand(len(x), -1, -1), x, x, key_padding_mask=absent)[0]
        found: Tensor = self.head(self.drop(pooled[:, 0]))
        return found


@task
def set_transformer() -> Task:
    members, present = torch.randn(RECORDS, 5, 2), (torch.rand(RECORDS, 5) > 0.2).long()
    present[:, 0] = 1
    y = torch.arange(RECORDS) % 2
    members[..., 0] += (2.0 * y - 1).unsqueeze(1)
    inputs = {"members": Input(bounds=(-4, 4)), "present": Input(vocabulary=2)}
    x = {"members": members, "present": present}
    return Task(SetTransformer(), x, y, Schema(classes=2, records=RECORDS, inputs=inputs))


class GraphNetwork(nn.Module):
    """Kipf and Welling 2017 on one graph for each record: features of nodes beside their adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 12), nn.Linear(12, 12)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(12, 2)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        edges = adjacency.to(nodes.dtype) + torch.eye(nodes.shape[1])
        spread = edges / edges.sum(-1, keepdim=True)
        inner = torch.relu(spread @ self.first(nodes))
        found: Tensor = self.head(self.drop(torch.relu(spread @ self.second(inner))).mean(1))
        return found


@task
def graph_network() -> Task:
    nodes = torch.randn(RECORDS, 5, 3)
    adjacency = torch.triu((torch.rand(RECORDS, 5, 5) > 0.5).long(), 1)
    y = torch.arange(RECORDS) % 2
    nodes[..., 1] += (2.0 * y - 1).unsqueeze(1)
    inputs = {"nodes": Input(bounds=(-4, 4)), "adjacency": Input(vocabulary=2)}
    x = {"nodes": nodes, "adjacency": adjacency + adjacency.transpose(1, 2)}
    return Task(GraphNetwork(), x, y, Schema(classes=2, records=RECORDS, inputs=inputs))


class GatedSequence(nn.Module):
    """A two-layered GRU that reads both ways, over a convolution along time."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(2, 8, 3, padding=1)
        self.gru = nn.GRU(8, 6, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(torch.tanh(self.enter(x)).transpose(1, 2))
        found: Tensor = self.head(self.drop(states.mean(1)))
        return found


@task
def gru_on_series() -> Task:
    made = about_pitch(GatedSequence(), "x", (2, 24))
    return made


class Volumes(nn.Module):
    """Convolutions of three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv3d(4, 8, 3, 2), nn.SiLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


@task
def conv3d() -> Task:
    y = torch.arange(RECORDS) % 2
    x = torch.randn(RECORDS, 1, 6, 6, 6) + (y - 0.5).view(-1, 1, 1, 1, 1)
    return Task(Volumes(), x, y, Schema(classes=2, records=RECORDS, inputs={"0": Input(bounds=(-4, 4))}))
