"""Tiny models of many families, their batches, and the plain Hugging Face runs to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import outcore

VOCAB = 97
LR = 1e-3
BETAS = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build one tiny model without dropout, and what it takes."""

    name: str
    config: Callable[[], Any]
    auto: Any = hf.AutoModelForCausalLM
    generates: bool = True
    is_seq2seq: bool = False
    extra: dict[str, Any] = field(default_factory=dict)  # further arguments of every forward

    def make(self, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        model = self.auto.from_config(self.config(), attn_implementation="eager")
        # Zeroed or identical initial values (biases, norms, sinks) would hide swapped parameters.
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.02)
        return model


def _llama_like(config_class: Any, **changes: Any) -> Callable[[], Any]:
    return lambda: config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **changes,
        }
    )


_SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES = [
    Family(name="llama", config=_llama_like(hf.LlamaConfig)),
    Family(
        name="llama-bias", config=_llama_like(hf.LlamaConfig, attention_bias=True, mlp_bias=True)
    ),
    Family(name="llama-tied", config=_llama_like(hf.LlamaConfig, tie_word_embeddings=True)),
    Family(name="qwen2", config=_llama_like(hf.Qwen2Config)),
    Family(name="qwen3", config=_llama_like(hf.Qwen3Config, head_dim=8)),
    Family(name="mistral", config=_llama_like(hf.MistralConfig, sliding_window=5)),
    Family(
        name="gemma2",
        config=_llama_like(
            hf.Gemma2Config,
            head_dim=8,
            query_pre_attn_scalar=8,
            final_logit_softcapping=5.0,
            attn_logit_softcapping=10.0,
            **_SLIDING,
        ),
    ),
    Family(
        name="gemma3",
        config=_llama_like(
            hf.Gemma3TextConfig,
            head_dim=8,
            query_pre_attn_scalar=8,
            **_SLIDING,
        ),
    ),
    Family(name="phi3", config=_llama_like(hf.Phi3Config)),
    Family(
        name="granite",
        config=_llama_like(
            hf.GraniteConfig,
            logits_scaling=4.0,
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
        ),
    ),
    Family(name="cohere", config=_llama_like(hf.CohereConfig, logit_scale=0.25)),
    Family(name="olmo2", config=_llama_like(hf.Olmo2Config)),
    Family(
        name="gpt2",
        config=lambda: hf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=3,
            n_head=4,
            n_positions=64,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
    ),
    Family(
        name="gpt-neox",
        config=lambda: hf.GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
    ),
    Family(
        name="opt",
        config=lambda: hf.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=24,
            dropout=0,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
    ),
    Family(
        name="bloom",  # an alibi tensor of (batch x heads) rows
        config=lambda: hf.BloomConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            n_layer=3,
            n_head=4,
            hidden_dropout=0,
            attention_dropout=0,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
    ),
    Family(
        name="mixtral",
        config=_llama_like(hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    ),
    Family(
        name="mixtral-router",
        config=_llama_like(
            hf.MixtralConfig,
            num_local_experts=4,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.1,
        ),
        generates=False,
        extra={"output_router_logits": True},
    ),
    Family(
        name="qwen3-moe",
        config=_llama_like(
            hf.Qwen3MoeConfig, head_dim=8, num_experts=4, mlp_only_layers=[1], **_MOE
        ),
    ),
    Family(
        name="deepseek-v3",
        config=_llama_like(
            hf.DeepseekV3Config,
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            **_MOE,
        ),
    ),
    Family(
        name="gpt-oss",
        config=_llama_like(
            hf.GptOssConfig,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            **_SLIDING,
        ),
    ),
    Family(
        name="cpm-ant",  # hands on use_cache by its position
        config=lambda: hf.CpmAntConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_attention_heads=4,
            dim_head=8,
            dim_ff=48,
            num_hidden_layers=3,
            dropout_p=0.0,
            prompt_length=4,
            init_std=0.02,
        ),
    ),
    Family(
        name="jamba",  # layers of two classes in one list
        config=_llama_like(
            hf.JambaConfig,
            num_hidden_layers=4,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=2,
            use_mamba_kernels=False,
            mamba_dt_rank=4,
        ),
    ),
    Family(
        name="switch",  # its routers cast a layer of theirs in every forward
        auto=hf.AutoModelForSeq2SeqLM,
        is_seq2seq=True,
        config=lambda: hf.SwitchTransformersConfig(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_heads=4,
            num_experts=2,
            dropout_rate=0,
            router_jitter_noise=0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        ),
    ),
    Family(
        name="nllb-moe",
        auto=hf.AutoModelForSeq2SeqLM,
        is_seq2seq=True,
        config=lambda: hf.NllbMoeConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            num_experts=2,
            encoder_sparse_step=2,
            decoder_sparse_step=2,
            dropout=0,
            attention_dropout=0,
            moe_token_dropout=0,
            encoder_layerdrop=0,
            decoder_layerdrop=0,
            max_position_embeddings=64,
            router_dtype="float32",
            expert_capacity=64,  # by default it depends on how many tokens come at a time
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        ),
    ),
    Family(
        name="t5",
        auto=hf.AutoModelForSeq2SeqLM,
        is_seq2seq=True,
        config=lambda: hf.T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=3,
            num_decoder_layers=3,
            num_heads=4,
            dropout_rate=0,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        ),
    ),
    Family(
        name="bart",
        auto=hf.AutoModelForSeq2SeqLM,
        is_seq2seq=True,
        config=lambda: hf.BartConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            dropout=0,
            decoder_start_token_id=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            forced_eos_token_id=None,
        ),
    ),
    Family(
        name="deberta-v2",  # reads an embedding's weight without calling its module
        auto=hf.AutoModelForMaskedLM,
        generates=False,
        config=lambda: hf.DebertaV2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=64,
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            pad_token_id=0,
        ),
    ),
    Family(
        name="bert",
        auto=hf.AutoModelForMaskedLM,
        generates=False,
        config=lambda: hf.BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=64,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            pad_token_id=0,
        ),
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}


def batch_of(
    family: Family | None = None, *, sequences: int = 5, seq_len: int = 12, seed: int = 0
) -> dict[str, Any]:
    """Random tokens with a padding mask and labels that are partly -100."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (sequences, seq_len), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -seq_len // 3 :] = 0
    mask[-1, -1:] = 0
    ids[mask == 0] = 0
    labels = ids.clone()
    labels[:, : seq_len // 4] = -100
    labels[mask == 0] = -100
    if family is not None and family.is_seq2seq:
        labels = torch.randint(3, VOCAB, (sequences, seq_len - 3), generator=generator)
        labels[0, -3:] = -100
    extra = {} if family is None else family.extra
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **extra}


def groups_of(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


@dataclass(frozen=True, kw_only=True)
class PlainRun:
    """What plain Hugging Face and torch.optim.AdamW come to."""

    losses: list[float]
    grad_norms: list[float]
    first_gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]


def train_plain(
    model: nn.Module,
    batches: list[dict[str, Any]],
    *,
    max_grad_norm: float | None = 1.0,
    **adamw: Any,
) -> PlainRun:
    optimizer = torch.optim.AdamW(groups_of(model), lr=LR, betas=BETAS, **adamw)
    losses, norms, first = [], [], {}
    for i, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if i == 0:
            first = {
                name: None if p.grad is None else p.grad.clone()
                for name, p in model.named_parameters()
            }
        norm = torch.nn.utils.clip_grad_norm_(
            model.parameters(), max_grad_norm if max_grad_norm is not None else float("inf")
        )
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return PlainRun(losses=losses, grad_norms=norms, first_gradients=first, parameters=parameters)


def offloaded(model: Any, **options: Any) -> Any:
    """Offload with the options that most tests use: fp32 on the CPU device, everything on host."""
    return outcore.offload(
        model, **{"device": "cpu", "dtype": torch.float32, "micro_batch": 2, **options}
    )


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    difference = (ours.detach().double() - theirs.detach().double()).norm()
    return float(difference / theirs.detach().double().norm().clamp(min=1e-12))


def gradients_of(model: Any) -> dict[str, Tensor]:
    """The gradients that wait for the next step, by parameter name, in fp32; absent ones left out.

    Reads the sink's homes: offloaded parameters have no ``.grad``.
    """
    backend = outcore.engine_of(model).backend
    sink = backend._waiting
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for unit in backend.units:
        for start, fence in sink._fences.get(unit.index, {}).items():
            fence.block()
            for f in unit.layout.trainable:
                if unit.arrives_whole or f.offset == start:
                    flat = sink._homes[unit.index][f.offset : f.end]
                    found[names[id(unit.parameters[f.name])]] = flat.view(f.shape).float().clone()
    return found
