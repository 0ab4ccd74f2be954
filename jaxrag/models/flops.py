"""How much arithmetic a request costs, counted from the config alone.

Three conventions, never mixed: what is really multiplied (``forward_flops``), TurboRAG's
(``turborag_flops``, the one that results report as ``flops``) and Block-Attention's
(``block_attention_flops``). A multiply-add is 2 FLOPs in each. Norms, rotation, softmax,
activations and short convolutions are left out: they are below a percent of any model worth
serving.
"""

from collections.abc import Sequence

from jaxrag.base.config import ModelConfig
from jaxrag.base.errors import RequestError


def turborag_flops(
    config: ModelConfig, num_input: int, num_context: int, *, attention_matmuls: int = 2
) -> int:
    """Prefill to the first token, in the convention of TurboRAG appendix C; lm_head left out.

    ``num_input`` tokens are computed, and each is charged ``num_context`` visible keys (no causal
    triangle). The convention of table 4 is the whole prompt for ``num_context`` in every method,
    and a query of 128 tokens behind 8192 tokens of text: with Qwen2-7B, 8320 computed of 8320
    (naive) and 128 of 8320 (turbo) give its 136.36 and 2.09 TFLOPs (digits cut off, not rounded).

    The appendix prints C_attn = 2 x heads x head_size x n_context, one of the two attention
    products, which gives 122.47 and 1.88. Table 4 has both QK and PV; so has this function, and
    ``attention_matmuls=1`` gives the formula as printed. C_o is 2 x hidden^2 in either case.

    Raises RequestError unless 0 <= num_input <= num_context and attention_matmuls is 1 or 2.
    """
    if not 0 <= num_input <= num_context:
        raise RequestError(f"num_input={num_input}: expected 0 to num_context={num_context}")
    if attention_matmuls not in (1, 2):
        raise RequestError(f"attention_matmuls={attention_matmuls}: expected 1 or 2")
    c = config
    q = 2 * c.model_dim * c.num_heads * c.head_dim
    attention = attention_matmuls * 2 * c.num_heads * c.head_dim * num_context
    output = 2 * c.model_dim**2
    layers = _attending(c) * (q + attention + output) + _kv_flops(c) + _mlp_flops(c)
    return num_input * (layers + _recurrent_flops(c))


def score_flops(config: ModelConfig, num_queries: int, num_keys: int) -> int:
    """Scores of one layer alone, one product: what a selector spends on top of its passes.

    Raises RequestError on a negative number of tokens.
    """
    _check_count("num_queries", num_queries)
    _check_count("num_keys", num_keys)
    return 2 * config.num_heads * config.head_dim * num_queries * num_keys


def block_attention_flops(config: ModelConfig, num_computed: int) -> int:
    """Prefill to the first token, in the convention of Block-Attention section 3.2, table 2.

    The table fits 2 x weights x computed tokens: every weight matrix once per token, lm_head
    included, embedding table and attention over the keys left out, and its digits cut off, not
    rounded. "Prompt length" counts the whole input, so the full-attention row computes all of it
    and the block row its last 50 tokens; ``num_computed`` is that number.

    Raises RequestError when num_computed is negative.
    """
    _check_count("num_computed", num_computed)
    return num_computed * (_layers_flops_per_token(config) + _lm_head_flops(config))


def forward_flops(config: ModelConfig, spans: Sequence[tuple[int, int]], num_logits: int) -> int:
    """Matrix-multiply FLOPs of one forward pass as the rule of visibility lets it run.

    ``spans`` are runs of new tokens ``(num_new, num_before)``: token i of a run attends
    ``num_before + i + 1`` keys, itself included, fewer in the layers of a sliding window. A
    question of 50 tokens behind 8192 cached ones is ``[(50, 8192)]``; full attention over the same
    prompt ``[(8242, 0)]``; chunks encoded in isolation ``[(t, 0) for t in chunks]``; a recomputed
    token at order o ``(1, o)``. QK and PV are both counted, the output projection as N*H x D,
    and the lm_head for ``num_logits`` tokens.

    Raises RequestError on a negative length.
    """
    for num_new, num_before in spans:
        _check_count("num_new", num_new)
        _check_count("num_before", num_before)
    _check_count("num_logits", num_logits)
    c = config
    num_new_total = sum(num_new for num_new, _ in spans)
    uses_window = c.window_layers or (True,) * c.num_layers
    num_windowed = 0 if c.sliding_window is None else sum(uses_window)
    pairs = sum(
        (_attending(c) - num_windowed) * _visible_pairs(num_new, num_before, None)
        + num_windowed * _visible_pairs(num_new, num_before, c.sliding_window)
        for num_new, num_before in spans
    )
    attention = 2 * 2 * c.num_heads * c.head_dim * pairs
    layers = num_new_total * _layers_flops_per_token(c)
    return layers + attention + num_logits * _lm_head_flops(c)


def _layers_flops_per_token(c: ModelConfig) -> int:
    """Every weight matrix of every layer that a token meets, once."""
    qo = 2 * c.model_dim * c.head_dim * (2 + c.output_gate) * c.num_heads
    return _attending(c) * qo + _kv_flops(c) + _mlp_flops(c) + _recurrent_flops(c)


def _attending(c: ModelConfig) -> int:
    """How many layers attend."""
    return c.num_layers - len(c.stacks.get("recurrent", ()))


def _recurrent_flops(c: ModelConfig) -> int:
    """The layers that keep a state: their projections, and three products with the state."""
    if (r := c.recurrent) is None:
        return 0
    values = r.value_heads * r.value_dim
    projected = c.model_dim * (r.channels + 2 * values + 2 * r.value_heads)
    return 2 * sum(r.layers) * (projected + 3 * r.key_dim * values)


def _kv_flops(c: ModelConfig) -> int:
    """Projections of K and V, of the layers that have some."""
    return c.num_kv_layers * 2 * c.model_dim * c.head_dim * 2 * c.num_kv_heads


def _mlp_flops(c: ModelConfig) -> int:
    """The MLPs of all layers; of experts those that a token goes through, and the choice.

    What a layer makes of an input of its own are three products as well.
    """
    one = 2 * 3 * c.model_dim
    if c.experts is None:
        widths = sum(map(c.mlp_dim_of, range(c.num_layers)))
        return one * (widths + c.num_layers * (c.input_dim or 0))
    width, beside = c.mlp_dim, 0
    if c.experts.beside is not None:
        width, beside = c.experts.beside, c.mlp_dim
    chosen = one * (c.experts.active * width + beside + (c.experts.shared or 0))
    return c.num_layers * (chosen + 2 * c.model_dim * c.experts.count)


def _lm_head_flops(c: ModelConfig) -> int:
    return 2 * c.model_dim * c.vocab_size


def _visible_pairs(num_new: int, num_before: int, window: int | None) -> int:
    """Sum over i < num_new of min(num_before + i + 1, window)."""
    growing = num_new if window is None else min(max(window - num_before, 0), num_new)
    triangle = growing * num_before + growing * (growing + 1) // 2
    return triangle if window is None else triangle + (num_new - growing) * window


def _check_count(name: str, count: int) -> None:
    if count < 0:
        raise RequestError(f"{name}={count}: expected a number of tokens, 0 or more")
