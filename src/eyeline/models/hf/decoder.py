"""The names that every `...ForCausalLM` folder gives to a decoder's tensors."""

from eyeline.core.key_rules import KeyRule


def keys_of(blocks: dict[str, str]) -> tuple[KeyRule, ...]:
    """Rules for a folder of a `...ForCausalLM`, from the names inside a block and inside their layer."""
    return (
        KeyRule("embed.weight", "model.embed_tokens.weight"),
        *(KeyRule(f"blocks.{{i}}.{ours}", f"model.layers.{{i}}.{theirs}") for ours, theirs in blocks.items()),
        KeyRule("norm.weight", "model.norm.weight"),
        KeyRule("head.weight", "lm_head.weight"),  # of a tied model it is the embedding, and most files leave it out
    )


NORM_NAMES = {"norm1.weight": "input_layernorm.weight", "norm2.weight": "post_attention_layernorm.weight"}
ATTENTION_NAMES = {f"attn.{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"}
HEAD_NORM_NAMES = {f"attn.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
FEED_FORWARD_NAMES = {f"mlp.{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
ROUTER_NAMES = {"mlp.router.weight": "mlp.gate.weight"}
EXPERT_NAMES = {f"mlp.experts.{x}": f"mlp.experts.{{e}}.{x}_proj.weight" for x in ("gate", "up", "down")}  # on disk, one tensor per expert
