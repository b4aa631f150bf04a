"""Networks of the transformers library, and some of papers, that the other tables lack; built from short lines.

They stand in one table with those of `architectures`, which says how they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from confide.data import Input, Schema
from confide.models.likelihoods import Tokens
from confide.models.networks import group_normed
from tests.running.architectures import (
    LABELS,
    LENGTH,
    RECORDS,
    SMALL,
    TEXT,
    WORDS,
    Task,
    about_brightness,
    about_first_word,
    about_stripes,
    dropped,
    library,
    next_words,
    task,
    words,
)
from tests.running.more_architectures import about_pitch


def listed(name: str, build: Callable[[], Task]) -> None:
    """Under its name in the table."""
    build.__name__ = name
    task(build)


# next words ---------------------------------------------------------------------------------------------------------

KEYS: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 3, "moe_intermediate_size": 16}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "shared_expert_intermediate_size": 16,
}  # fmt: skip
# the kind, where its last normalisation is, behind which dropout is put, and its options
LANGUAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("transformer.ln_f", {"n_layer": 1, "n_head": 2}),
    "olmo2": ("model.norm", {}),
    "cohere2": ("model.norm", KEYS),
    "nemotron": ("model.norm", KEYS),
    "persimmon": ("model.final_layernorm", {}),
    "gpt_bigcode": ("transformer.ln_f", {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}),
    "gemma3_text": ("model.norm", {**KEYS, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "smollm3": ("model.norm", {"num_key_value_heads": 1, "no_rope_layers": [1]}),
    "diffllama": ("model.norm", {"num_key_value_heads": 2}),
    "exaone4": ("model.norm", {"num_key_value_heads": 1, "layer_types": ["full_attention"], "sliding_window": 4}),
    "bitnet": ("model.norm", {"num_key_value_heads": 1}),
    "lfm2": ("model.embedding_norm", {"num_key_value_heads": 1, "layer_types": ["conv"], "block_multiple_of": 8}),
    "falcon_mamba": ("backbone.norm_f", {"state_size": 4, "time_step_rank": 2}),
    "qwen3_moe": ("model.norm", {**KEYS, **EXPERTS, "decoder_sparse_step": 1}),
    "qwen3_next": ("model.norm", {**KEYS, **EXPERTS, **LINEAR}),
}


def language(kind: str, norm: str, options: dict[str, Any]) -> Task:
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**SMALL | {"use_cache": False} | options)
    experts = {"experts_implementation": "batched_mm"} if "num_experts" in options else {}
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **experts)
    place, _, name = norm.rpartition(".")
    setattr(module.get_submodule(place), name, dropped(module.get_submodule(norm)))
    return next_words(module)


for kind, (norm, options) in LANGUAGES.items():
    listed(kind, lambda kind=kind, norm=norm, options=options: language(kind, norm, options))


# labels of texts, and texts of texts --------------------------------------------------------------------------------

SENTENCES: dict[str, dict[str, Any]] = {
    "megatron-bert": {},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX", "max_position_embeddings": 24},
    "luke": {"entity_vocab_size": 5, "entity_emb_size": 4, "max_position_embeddings": 24},
    "layoutlm": {"max_2d_position_embeddings": 16},
    "data2vec-text": {"max_position_embeddings": 24},
}
for kind, options in SENTENCES.items():
    listed(kind, lambda kind=kind, options=options: about_first_word(library(kind, LABELS, **options)))


@task
def eurobert() -> Task:
    made: Any = library("eurobert", LABELS, num_key_value_heads=1)
    made.dense = dropped(made.dense)
    return about_first_word(made)


OF_T5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.1}
TEXTS: dict[str, dict[str, Any]] = {
    "umt5": OF_T5,
    "longt5": {**OF_T5, "local_radius": 2},
    "switch_transformers": {**OF_T5, "num_decoder_layers": 1, "num_experts": 2},
}


def text_to_text(kind: str, options: dict[str, Any]) -> Task:
    module = library(kind, "AutoModelForSeq2SeqLM", decoder_start_token_id=2, **options)
    text = words()
    target = torch.cat([torch.full((RECORDS, 1), 2), text["input_ids"][:, :-1]], 1)
    y = torch.where(text["attention_mask"] == 1, text["input_ids"], -100)
    schema = Schema(classes=WORDS, records=RECORDS, inputs={**TEXT, "decoder_input_ids": Input(vocabulary=WORDS)})
    return Task(module, {**text, "decoder_input_ids": target}, y, schema, Tokens(WORDS, length=LENGTH))


for kind, options in TEXTS.items():
    listed(kind, lambda kind=kind, options=options: text_to_text(kind, options))


# pictures, films and sound ------------------------------------------------------------------------------------------

PATCHES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8, "hidden_dropout_prob": 0.1, "num_labels": 2,
}  # fmt: skip
STAGES: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 2}
PYRAMID: dict[str, Any] = {
    **STAGES, "image_size": 16, "num_encoder_blocks": 2, "sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2],
    "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
}  # fmt: skip
PICTURES: dict[str, dict[str, Any]] = {
    "dinov2_with_registers": PATCHES,
    "ijepa": PATCHES,
    "regnet": {**STAGES, "embedding_size": 8, "groups_width": 8},
    "bit": {**STAGES, "embedding_size": 8, "num_groups": 2},
    "pvt_v2": PYRAMID,
}


def pictures(kind: str, options: dict[str, Any]) -> Task:
    import transformers

    from tests.mechanism.clipping.public.libraries import exchange_norms

    module: Any = transformers.AutoModelForImageClassification.from_config(transformers.CONFIG_MAPPING[kind](**options))
    exchange_norms(module)
    if "patch_size" in options:
        return about_brightness(module, "pixel_values")
    module.classifier = nn.Sequential(nn.Dropout(0.1), module.classifier)
    made = about_stripes(module)
    schema = Schema(classes=2, records=RECORDS, inputs={"pixel_values": Input(bounds=(-4, 4))})
    return replace(made, x={"pixel_values": made.x}, schema=schema)


for kind, options in PICTURES.items():
    listed(kind, lambda kind=kind, options=options: pictures(kind, options))

FILMS: dict[str, dict[str, Any]] = {
    "timesformer": {"num_frames": 2},
    "videomae": {"num_frames": 2, "tubelet_size": 2},
    "vivit": {"num_frames": 2, "tubelet_size": [2, 8, 8]},
}


def films(kind: str, options: dict[str, Any]) -> Task:
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**PATCHES | options)
    module: nn.Module = transformers.AutoModelForVideoClassification.from_config(config)
    y = torch.arange(RECORDS) % 2
    x = torch.randn(RECORDS, 2, 3, 16, 16) + (2.0 * y - 1).view(-1, 1, 1, 1, 1)
    schema = Schema(classes=2, records=RECORDS, inputs={"pixel_values": Input(bounds=(-5, 5))})
    return Task(module, {"pixel_values": x}, y, schema)


for kind, options in FILMS.items():
    listed(kind, lambda kind=kind, options=options: films(kind, options))

WAVES: dict[str, Any] = {
    "conv_dim": [8, 8], "conv_kernel": [8, 4], "conv_stride": [4, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
    "apply_spec_augment": False, "classifier_proj_size": 8, "hidden_dropout": 0.1, "layerdrop": 0.0,
}  # fmt: skip
SPECTRUM: dict[str, Any] = {
    "patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": 32, "num_mel_bins": 16,
    "hidden_dropout_prob": 0.1,
}  # fmt: skip
SOUNDS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "hubert": ((128,), WAVES),
    "wavlm": ((128,), {**WAVES, "num_buckets": 8, "max_bucket_distance": 16}),
    "sew": ((128,), {**WAVES, "squeeze_factor": 2}),
    "wav2vec2-conformer": ((128,), {**WAVES, "conv_depthwise_kernel_size": 3}),
    "audio-spectrogram-transformer": ((32, 16), SPECTRUM),
}
for kind, (shape, options) in SOUNDS.items():
    listed(
        kind,
        lambda kind=kind, shape=shape, options=options: about_pitch(
            group_normed(library(kind, "AutoModelForAudioClassification", **options)), "input_values", shape
        ),
    )


# series and tables --------------------------------------------------------------------------------------------------

SERIES: dict[str, Any] = {
    "num_input_channels": 2, "num_targets": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8,
}  # fmt: skip
MORE: dict[str, Any] = {
    "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 24, "norm_type": "layernorm",
    "use_cls_token": True, "ff_dropout": 0.1,
}  # fmt: skip


class SeriesClassifier(nn.Module):
    """The library wants the series by name, and has a name of its own for what comes out."""

    def __init__(self, inner: nn.Module, output: str) -> None:
        super().__init__()
        self.inner, self.output = inner, output

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(past_values=x)[self.output]
        return found


def series(module: nn.Module) -> Task:
    y, time = torch.arange(RECORDS) % 2, torch.arange(32) / 32
    wave = torch.sin(2 * torch.pi * time * torch.where(y == 1, 8.0, 2.0).unsqueeze(1))
    x = wave.unsqueeze(2) + 0.3 * torch.randn(RECORDS, 32, 2)
    return Task(module, {"x": x}, y, Schema(classes=2, records=RECORDS, inputs={"x": Input(bounds=(-3, 3))}))


@task
def patchtst() -> Task:
    import transformers

    module = transformers.PatchTSTForClassification(transformers.PatchTSTConfig(**SERIES, **MORE))
    return series(SeriesClassifier(module, "prediction_logits"))


@task
def patchtsmixer() -> Task:
    import transformers

    config = transformers.PatchTSMixerConfig(
        **SERIES, d_model=8, num_layers=1, norm_mlp="LayerNorm", dropout=0.1, head_dropout=0.1
    )
    module = transformers.PatchTSMixerForTimeSeriesClassification(config)
    return series(SeriesClassifier(module, "prediction_outputs"))


class DecayingCell(nn.Module):
    """Che et al. 2018: values that are missing fade to a mean, and the state fades with the time since they came."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fade = nn.GRUCell(4, 12), nn.Linear(2, 12)
        self.forget, self.drop, self.head = nn.Parameter(torch.ones(2)), nn.Dropout(0.1), nn.Linear(12, 2)

    def forward(self, x: Tensor, known: Tensor, since: Tensor) -> Tensor:
        state, last = x.new_zeros(len(x), 12), x.new_zeros(len(x), 2)
        for time in range(x.shape[1]):
            here, gap = known[:, time].to(x.dtype), since[:, time]
            value = here * x[:, time] + (1 - here) * torch.exp(-torch.relu(self.forget * gap)) * last
            last = here * x[:, time] + (1 - here) * last
            state = self.cell(torch.cat([value, here], 1), torch.exp(-torch.relu(self.fade(gap))) * state)
        found: Tensor = self.head(self.drop(state))
        return found


@task
def gru_d() -> Task:
    y = torch.arange(RECORDS) % 2
    x = torch.randn(RECORDS, 5, 2) + (2.0 * y - 1).view(-1, 1, 1)
    known, since = (torch.rand(RECORDS, 5, 2) > 0.3).long(), torch.rand(RECORDS, 5, 2)
    inputs = {"x": Input(bounds=(-4, 4)), "known": Input(vocabulary=2), "since": Input(bounds=(0, 1))}
    return Task(
        DecayingCell(), {"x": x, "known": known, "since": since}, y, Schema(classes=2, records=RECORDS, inputs=inputs)
    )


class TabTransformer(nn.Module):
    """Huang et al. 2020: categories attend to each other, numbers join behind."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups = nn.ModuleList([nn.Embedding(4, 8) for _ in range(3)])
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True)
        self.body, self.norm = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.LayerNorm(3)
        self.head = nn.Sequential(nn.Linear(27, 16), nn.SELU(), nn.Linear(16, 2))

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        tokens = torch.stack([lookup(kinds[:, place]) for place, lookup in enumerate(self.lookups)], 1)
        found: Tensor = self.head(torch.column_stack([self.body(tokens).flatten(1), self.norm(numbers)]))
        return found


@task
def tab_transformer() -> Task:
    numbers, kinds = torch.randn(RECORDS, 3), torch.randint(0, 4, (RECORDS, 3))
    inputs = {"numbers": Input(bounds=(-4, 4)), "kinds": Input(vocabulary=4)}
    y = (kinds[:, 0] >= 2).long()
    return Task(
        TabTransformer(), {"numbers": numbers, "kinds": kinds}, y, Schema(classes=2, records=RECORDS, inputs=inputs)
    )


class Quantised(torch.autograd.Function):
    """Weights of three values, whose gradient passes by (Li et al. 2016)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.sign() * (weight.abs() > 0.7 * weight.abs().mean()) * weight.abs().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class TernaryCells(nn.Module):
    """A recurrent network of LSTM cells, whose head has ternary weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop, self.head = nn.LSTMCell(2, 12), nn.Dropout(0.1), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 12), x.new_zeros(len(x), 12)
        for time in range(x.shape[1]):
            state = self.cell(x[:, time], state)
        return nn.functional.linear(self.drop(state[0]), Quantised.apply(self.head.weight), self.head.bias)


@task
def ternary_cells() -> Task:
    y = torch.arange(RECORDS) % 2
    x = torch.randn(RECORDS, 5, 2) + (2.0 * y - 1).view(-1, 1, 1)
    return Task(TernaryCells(), x, y, Schema(classes=2, records=RECORDS, inputs={"0": Input(bounds=(-5, 5))}))
