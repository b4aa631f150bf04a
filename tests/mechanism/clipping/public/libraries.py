"""Architectures of the transformers library, made small: random weights, nothing is downloaded, no dropout."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

RECORDS = 4
CLASSES = 3
WORDS = 40
LENGTH = 8
Case = tuple[nn.Module, Callable[[Any, Any], Tensor], Any, Any]


@dataclass(frozen=True)
class Member:
    """One architecture; `slow` ones are left out of the quick run."""

    build: Callable[[], Case]
    slow: bool = False

    def case(self) -> Case:
        torch.manual_seed(0)
        module, loss, x, y = self.build()
        return module.double().train(), loss, x, y


MEMBERS: dict[str, Member] = {}
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32, "num_labels": CLASSES, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0,
    "classifier_dropout": 0.0,
}  # fmt: skip
NO_DROPOUT = ("dropout", "drop", "layerdrop")


def config(kind: str, **options: Any) -> Any:
    """A small configuration; every rate of dropout in it, under whatever name, is zero."""
    wanted = {name: value for name, value in (SMALL | options).items() if value != "unset"}
    made = transformers.CONFIG_MAPPING[kind](**wanted)
    for name, value in list(vars(made).items()):
        if any(part in name for part in NO_DROPOUT) and isinstance(value, float):
            setattr(made, name, 0.0)
    return made


# losses: one value per record -----------------------------------------------------------------------------------


def of_labels(output: Any, y: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(1), y, reduction="none")


def of_next_words(output: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].transpose(1, 2), y[:, 1:], reduction="none").mean(1)


def of_words(output: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.transpose(1, 2), y, reduction="none").mean(1)


def words(length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (RECORDS, length))


def labels() -> Tensor:
    return torch.randint(0, CLASSES, (RECORDS,))


# four families --------------------------------------------------------------------------------------------------


def classifier(kind: str, length: int = LENGTH, **options: Any) -> Case:
    made = transformers.AutoModelForSequenceClassification.from_config(config(kind, **options))
    return made, of_labels, words(length), labels()


def language_model(kind: str, length: int = LENGTH, experts: str | None = None, **options: Any) -> Case:
    made = transformers.AutoModelForCausalLM.from_config(config(kind, **options), experts_implementation=experts)
    x = words(length)
    return made, of_next_words, x, x.clone()


class Translator(nn.Module):
    """The library wants the target text by name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, text: Tensor, target: Tensor) -> Any:
        return self.inner(input_ids=text, decoder_input_ids=target)


def translator(kind: str, **options: Any) -> Case:
    given = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
             "decoder_start_token_id": 0} | options  # fmt: skip
    made = transformers.AutoModelForSeq2SeqLM.from_config(config(kind, **given))
    return Translator(made), of_words, (words(), words(6)), words(6)


def vision(kind: str, size: int = 32, groups: bool = False, **options: Any) -> Case:
    given = {"image_size": size, "patch_size": 8, "num_channels": 3} | options
    made = transformers.AutoModelForImageClassification.from_config(config(kind, **given))
    if groups:
        exchange_norms(made)
    return made, of_labels, torch.randn(RECORDS, 3, size, size, dtype=torch.float64), labels()


def exchange_norms(module: nn.Module) -> None:
    """Group normalisation where the architecture was published with batch normalisation."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, nn.GroupNorm(2 if child.num_features % 2 == 0 else 1, child.num_features))
        elif isinstance(child, nn.BatchNorm1d):
            setattr(module, name, nn.GroupNorm(1, child.num_features))
        else:
            exchange_norms(child)


@dataclass
class Family:
    build: Callable[..., Case]
    members: dict[str, dict[str, Any]] = field(default_factory=dict)


EXPERTS = {
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "num_experts": 3,
    "moe_intermediate_size": 16,
    "experts": "batched_mm",
}
KEYS = {"num_key_value_heads": 1, "head_dim": 8}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
FAMILIES = [
    Family(
        classifier,
        {
            "bert": {},
            "distilbert": {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 24, "seq_classif_dropout": 0.0},
            "roberta": {"pad_token_id": 0},
            "electra": {"embedding_size": 12},
            "albert": {"embedding_size": 12},
            "deberta": {},
            "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
            "funnel": {
                "num_hidden_layers": "unset",
                "block_sizes": [1, 1],
                "d_model": 16,
                "n_head": 2,
                "d_head": 8,
                "d_inner": 24,
                "num_decoder_layers": 1,
            },
            "xlnet": {"max_position_embeddings": "unset", "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24},
            "mpnet": {"pad_token_id": 0},
            "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 1},
            "squeezebert": {"embedding_size": 16},
            "convbert": {"embedding_size": 16, "conv_kernel_size": 3},
            "fnet": {},
            "nystromformer": {"segment_means_seq_len": 8, "num_landmarks": 4},
            "roformer": {"embedding_size": 16},
            "big_bird": {"attention_type": "original_full"},
            "longformer": {"attention_window": 4, "pad_token_id": 0},
            "reformer": {
                "attn_layers": ["local", "lsh"],
                "local_attn_chunk_length": 4,
                "lsh_attn_chunk_length": 4,
                "num_buckets": 2,
                "axial_pos_shape": [2, 4],
                "axial_pos_embds_dim": [8, 8],
                "attention_head_size": 8,
                "feed_forward_size": 24,
                "is_decoder": False,
            },
            "rembert": {"input_embedding_size": 12},
            "esm": {"mask_token_id": 3, "pad_token_id": 0},
            "modernbert": {"global_attn_every_n_layers": 2},
            "xlm": {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "n_words": WORDS, "pad_token_id": 0},
            "ibert": {"pad_token_id": 0},
            "yoso": {},
            "nomic_bert": {"pad_token_id": 0},
        },
    ),
    Family(
        language_model,
        {
            "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
            "openai-gpt": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
            "gpt_neo": {
                "num_layers": 2,
                "num_heads": 2,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 4,
            },
            "gpt_neox": {},
            "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
            "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
            "bloom": {"n_layer": 2, "n_head": 2},
            "ctrl": {"n_embd": 16, "dff": 24, "n_layer": 2, "n_head": 2},
            "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "num_attention_heads": 4, "rotary_dim": 4},
            "biogpt": {},
            "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32},
            "falcon": {},
            "llama": KEYS,
            "mistral": KEYS,
            "qwen2": KEYS,
            "qwen3": KEYS,
            "gemma": KEYS,
            "gemma2": KEYS | {"sliding_window": 4, "query_pre_attn_scalar": 8},
            "phi": {},
            "phi3": {},
            "olmo": {},
            "stablelm": {"num_key_value_heads": 2},
            "starcoder2": KEYS,
            "cohere": KEYS,
            "granite": KEYS,
            "mixtral": KEYS | EXPERTS,
            "olmoe": EXPERTS,
            "qwen2_moe": EXPERTS | {"num_key_value_heads": 2, "shared_expert_intermediate_size": 16},
            "granitemoe": EXPERTS,
            "gpt_oss": KEYS | EXPERTS,
            "deepseek_v3": {
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 4,
                "v_head_dim": 8,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "experts": "batched_mm",
                "moe_intermediate_size": 8,
                "num_key_value_heads": 2,
            },
            "mamba": {"state_size": 4, "time_step_rank": 2},
            "mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
            "rwkv": {"attention_hidden_size": 16},
            "recurrent_gemma": {
                "lru_width": 16,
                "num_key_value_heads": 1,
                "block_types": ["recurrent", "attention"],
                "attention_window_size": 4,
            },
            "jamba": EXPERTS
            | {
                "mamba_d_state": 4,
                "mamba_dt_rank": 2,
                "num_key_value_heads": 1,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "use_mamba_kernels": False,
            },
            "xlstm": {"num_heads": 2, "embedding_dim": 16, "num_blocks": 2, "chunk_size": 8},
        },
    ),
    Family(
        translator,
        {
            "t5": {"d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
            "bart": {},
            "pegasus": {},
            "mbart": {},
            "marian": {},
            "blenderbot": {},
            "m2m_100": {"pad_token_id": 0},
            "prophetnet": {
                "num_hidden_layers": "unset",
                "pad_token_id": 0,
                "encoder_layers": "unset",
                "decoder_layers": "unset",
                "num_encoder_layers": 2,
                "num_decoder_layers": 2,
                "num_encoder_attention_heads": 2,
                "num_decoder_attention_heads": 2,
                "ngram": 2,
            },
            "led": {
                "attention_window": 4,
                "max_encoder_position_embeddings": 32,
                "max_decoder_position_embeddings": 32,
            },
        },
    ),
    Family(
        vision,
        {
            "vit": {},
            "beit": {"use_mask_token": False},
            "dinov2": {},
            "vit_msn": {},
            "swin": {
                "embed_dim": 8,
                "depths": [1, 1],
                "num_heads": [1, 2],
                "num_hidden_layers": "unset",
                "num_attention_heads": "unset",
                "patch_size": 4,
                "window_size": 2,
            },
            "swinv2": {
                "embed_dim": 8,
                "depths": [1, 1],
                "num_heads": [1, 2],
                "num_hidden_layers": "unset",
                "num_attention_heads": "unset",
                "patch_size": 4,
                "window_size": 4,
            },
            "convnext": STAGES | {"patch_size": 4, "num_stages": 2},
            "convnextv2": STAGES | {"patch_size": 4, "num_stages": 2},
            "focalnet": {
                "embed_dim": 8,
                "hidden_sizes": [8, 16],
                "depths": [1, 1],
                "focal_levels": [1, 1],
                "focal_windows": [3, 3],
                "patch_size": 4,
            },
            "poolformer": STAGES
            | {"num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1], "pool_size": 3},
            "segformer": STAGES
            | {
                "num_encoder_blocks": 2,
                "sr_ratios": [2, 1],
                "patch_sizes": [3, 3],
                "strides": [2, 2],
                "num_attention_heads": [1, 2],
                "mlp_ratios": [2, 2],
            },
            "pvt": STAGES
            | {
                "num_encoder_blocks": 2,
                "sequence_reduction_ratios": [2, 1],
                "patch_sizes": [4, 2],
                "strides": [4, 2],
                "num_attention_heads": [1, 2],
                "mlp_ratios": [2, 2],
            },
            "resnet": {
                "groups": True,
                "embedding_size": 8,
                "hidden_sizes": [8, 16],
                "depths": [1, 1],
                "layer_type": "basic",
            },
            "mobilenet_v2": {"groups": True, "depth_multiplier": 0.25},
            "efficientnet": {
                "groups": True,
                "width_coefficient": 0.1,
                "depth_coefficient": 0.1,
                "hidden_dim": 128,
                "dropout_rate": 0.0,
            },
            "mobilevit": {
                "groups": True,
                "hidden_sizes": [8, 8, 8],
                "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16],
                "num_attention_heads": 2,
            },
            "hiera": {
                "image_size": [32, 32],
                "embed_dim": 8,
                "depths": [1, 1],
                "num_heads": [1, 2],
                "patch_size": [4, 4],
                "patch_stride": [4, 4],
                "patch_padding": [0, 0],
                "num_query_pool": 1,
                "masked_unit_size": [2, 2],
                "query_stride": [2, 2],
                "mask_unit_attention": [True, False],
            },
        },
    ),
]
# One of each kind, so that the quick run stays quick.
QUICK = frozenset(
    {"bert", "distilbert", "xlnet", "fnet", "nystromformer", "gpt2"}
    | {
        "gpt_neox",
        "opt",
        "llama",
        "mixtral",
        "t5",
        "vit",
        "convnext",
        "resnet",
    }
)
for family in FAMILIES:
    for kind, chosen in family.members.items():
        MEMBERS[kind] = Member(partial(family.build, kind, **chosen), kind not in QUICK)
