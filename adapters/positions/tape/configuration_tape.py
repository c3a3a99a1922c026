"""A Llama with contextual positions (TAPE, arXiv 2501.00712): its settings, for transformers 4 and 5."""

from transformers import LlamaConfig

MIXES = ("full", "per-head")


class TapeConfig(LlamaConfig):
    """Llama's settings, and what TAPE adds to them.

    tape: {"mix": ..., "width": ...}. mix is "full" (a matrix mixes what the heads attend to into the position
    channels) or "per-head" (each channel takes its own heads, scaled by a row sum of that matrix); the position
    update is width times as wide as there are attention heads.
    attention_output_bias: whether o_proj has a bias, where that is not the same as for q, k and v (Qwen2).
    attention_windows: for each layer, how many tokens a token sees, itself included; 0: all before it (Mistral).
    qk_norm: whether each head of queries and keys goes through a norm before it is rotated (Qwen3).
    rotary_layers: 1 for layers that rotate queries and keys, 0 for others (SmolLM3).
    """

    model_type = "tape_llama"

    def __init__(
        self,
        tape=None,
        attention_output_bias=None,
        attention_windows=None,
        qk_norm=False,
        rotary_layers=None,
        **kwargs,
    ):
        for key in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
            kwargs.pop(key, None)  # caches must keep all tokens: the model itself hides those behind a window
        super().__init__(**kwargs)
        self.attention_windows, self.qk_norm, self.rotary_layers = attention_windows, qk_norm, rotary_layers
        self.tape = {"mix": "full", "width": 4} | (tape or {})
        if self.tape["mix"] not in MIXES:
            raise ValueError(f"tape.mix must be one of {', '.join(MIXES)}, but is {self.tape['mix']}")
        self.attention_output_bias = self.attention_bias if attention_output_bias is None else attention_output_bias
