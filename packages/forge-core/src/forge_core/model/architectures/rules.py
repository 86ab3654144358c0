"""Names of a dense decoder's tensors in Hugging Face files."""

from __future__ import annotations

from forge_core.config.tables import ModelConfig
from forge_core.contract.architecture import TensorRule, rename

LAYER = "layers.{layer}."
IGNORED = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
"""A buffer that releases of transformers before 4.32 saved."""

_NORMS = {
    "pre": {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"},
    "post": {"post_attention_layernorm": "attn_post_norm", "post_feedforward_layernorm": "mlp_post_norm"},
    "sandwich": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
}


def decoder_rules(
    model: ModelConfig, *, theirs: str = "model.", ours: str = "", head: str = "lm_head", mlp: bool = True
) -> list[TensorRule]:
    """Rules of embedding, blocks, final norm and head.

    Args:
        model: the resolved table; `block_norm` decides what the norms are called.
        theirs, ours: what comes before "layers." on each side (a decoder inside a larger model).
        head: name of the head on their side.
        mlp: with the dense feed-forward part; a family with another one adds its own rules.
    """
    rules = [
        rename(f"{theirs}embed_tokens.weight", f"{ours}embed.weight"),
        rename(f"{theirs}norm.weight", f"{ours}norm.weight"),
        rename(f"{head}.weight", f"{ours}head.weight"),
    ]
    names = {f"self_attn.{x}_proj": f"attn.{x}_proj" for x in "qkvo"}
    names |= {f"self_attn.{x}_norm": f"attn.{x}_norm" for x in "qk"}
    if mlp:
        names |= {f"mlp.{x}_proj": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    names |= _NORMS[model.block_norm]
    for one, other in names.items():
        for part in ("weight", "bias"):
            rules.append(rename(f"{theirs}{LAYER}{one}.{part}", f"{ours}{LAYER}{other}.{part}"))
    return rules
