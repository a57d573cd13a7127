"""A block's attention as numbers: operations, and the bytes of masks, scores and positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outcore.units import BYTES_OF


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One block's attention. Widths are heads times head size; pairs are (query, key)."""

    num_heads: int
    key_width: int
    value_width: int
    is_causal: bool
    window: int | None = None  # keys that a query sees; None: all
    crosses: bool = False  # attends to an encoder as well
    repeated_width: int = 0  # what keys and values are widened by, where each head needs its own
    is_eager: bool = False  # written out in torch operations, not one fused
    has_dropout: bool = False  # of its scores, in training
    has_softcap: bool = False

    def pairs(self, seq_len: int) -> float:
        """Return the pairs of one sequence; causal attention counts at half."""
        if self.window is not None and self.window < seq_len:
            seen = seq_len * self.window - (self.window**2 / 2 if self.is_causal else 0)
        else:
            seen = seq_len**2 * (0.5 if self.is_causal else 1.0)
        return float(seen + (seq_len**2 if self.crosses else 0))

    def table_bytes(self, dtype: str) -> int:
        """Return what a token's position takes: cosines and sines of a head's size."""
        return 2 * self.key_width // self.num_heads * BYTES_OF[dtype]

    def mask_bytes(self, seq_len: int, dtype: str, *, is_masked: bool) -> int:
        """Return the mask that the model makes, for each token; 0 where a causal flag will do.

        ``is_masked``: the sequences need one, for documents that do not see each other or padding.
        """
        if self.is_eager:
            return seq_len * BYTES_OF[dtype]
        has_window = self.window is not None and self.window < seq_len
        return seq_len if is_masked or has_window else 0

    def kept_bytes(self, seq_len: int, dtype: str, *, is_masked: bool, is_compiled: bool) -> float:
        """Return what attention saves for each token because of its mask, or of its scores."""
        has_mask = self.mask_bytes(seq_len, dtype, is_masked=is_masked) > 0
        num_scores = self._num_scores(is_compiled=is_compiled)
        if num_scores and not self.crosses and not is_compiled and dtype == "bf16":
            num_scores += 2  # the softmax is in fp32, and what it gives is cast
        elements = num_scores * self.num_heads * seq_len
        if has_mask and not is_compiled:  # compiled, both are made again from what is there
            elements += self.repeated_width
            if not num_scores:
                elements += seq_len  # the mask, in the type of the scores
        return float(elements * BYTES_OF[dtype])

    def working_bytes(
        self, seq_len: int, dtype: str, *, is_masked: bool, is_compiled: bool
    ) -> float:
        """Return what is there beside that, for each token, while attention is differentiated."""
        num_scores = self._num_scores(is_compiled=is_compiled)
        if num_scores:  # their gradient, and the one before it
            return float(max(1, 3 - num_scores) * self.num_heads * seq_len * BYTES_OF[dtype])
        if is_compiled and self.mask_bytes(seq_len, dtype, is_masked=is_masked):
            return float((seq_len + self.repeated_width) * BYTES_OF[dtype])
        return 0.0

    def _num_scores(self, *, is_compiled: bool) -> int:
        """Return how many matrices of (query, key) are saved for a head.

        A fused attention saves none; on a CPU there is none with dropout. Written out: after the
        softmax, before a cap, and with dropout what is dropped and what is left.
        """
        if not self.is_eager and (is_compiled or not self.has_dropout):
            return 0
        num_scores = 1 + self.has_softcap + 2 * self.has_dropout
        return num_scores * (2 if self.crosses else 1)

    def forward_flops(self, seq_len: int) -> float:
        """Return the operations of one sequence: scores, and the weighted sum of values."""
        return 2.0 * (self.key_width + self.value_width) * self.pairs(seq_len)


def attention_of(text: Any, index: int, *, is_decoder: bool, crosses: bool) -> Attention | None:
    """Return the attention of block ``index`` by the text model's configuration; None without."""
    num_heads = getattr(text, "num_attention_heads", None)
    types = getattr(text, "layer_types", None)
    kind = types[index] if types is not None and index < len(types) else ""
    if not num_heads or kind == "linear_attention":
        return None
    size = getattr(text, "head_dim", None) or getattr(text, "d_kv", None)
    size = size or text.hidden_size // num_heads
    key_size = getattr(text, "qk_nope_head_dim", 0) + getattr(text, "qk_rope_head_dim", 0)
    if not getattr(text, "kv_lora_rank", None):
        key_size = 0  # only multi-head latent attention cuts its heads in two
    value_size = getattr(text, "v_head_dim", None) if key_size else None
    window = getattr(text, "sliding_window", None)
    if kind == "chunked_attention":
        window = getattr(text, "attention_chunk_size", None)
    elif kind == "full_attention" or getattr(text, "use_sliding_window", True) is False:
        window = None
    dropouts = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    num_repeated = num_heads - (getattr(text, "num_key_value_heads", None) or num_heads)
    names = getattr(text, "architectures", None) or [""]
    is_masked_lm = names[0].endswith("ForMaskedLM")
    return Attention(
        num_heads=num_heads,
        key_width=num_heads * (key_size or size),
        value_width=num_heads * (value_size or size),
        is_causal=is_decoder and not is_masked_lm,
        window=window if isinstance(window, int) else None,
        crosses=crosses,
        repeated_width=num_repeated * ((key_size or size) + (value_size or size)),
        # A bias that is learned leaves no fused attention, whatever was asked for.
        is_eager=getattr(text, "_attn_implementation", None) == "eager"
        or hasattr(text, "relative_attention_num_buckets"),
        has_dropout=any(getattr(text, name, None) for name in dropouts),
        has_softcap=bool(getattr(text, "attn_logit_softcapping", None)),
    )
