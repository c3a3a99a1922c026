"""A Llama with contextual positions (TAPE, arXiv 2501.00712), for transformers 4 and 5.

Beside the hidden states x [B, N, hidden] every layer carries a position state e [B, K, N, D]: cosines, then sines, of D/2
rotary frequencies for each token and key/value head. It turns queries and keys as rotary embeddings do, and each layer
changes it: what the attention weights gather of it is added, then what a gated map across channels makes of it. No map
mixes frequencies or tells cosines from sines, so that only distances between tokens count.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import DynamicCache, GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, LlamaPreTrainedModel, LlamaRMSNorm

from .configuration_tape import TapeConfig


def rope_settings(config):
    """The RoPE type and rope_theta, wherever this version of transformers keeps them."""
    rope = getattr(config, "rope_parameters", None) or config.rope_scaling or {}  # transformers 5, else 4
    theta = rope.get("rope_theta") or config.rope_theta
    return rope.get("rope_type") or rope.get("type") or "default", theta


def rotary_frequencies(config, length):
    """Inverse frequencies [D/2] and the attention factor on cosines and sines, for a sequence of this length."""
    kind, theta = rope_settings(config)
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    return 1.0 / theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim), 1.0


def start_positions(config, position_ids, lengths, dtype):
    """The position state of the first layer, the same for every channel: [B, 1, N, D]."""
    dtype = torch.promote_types(dtype, torch.float32)  # bfloat16 cannot tell position 257 from 256
    by_length = rope_settings(config)[0] in ("dynamic", "longrope")
    found = [rotary_frequencies(config, length) for length in (lengths.tolist() if by_length else [None])]
    frequencies = torch.stack([one for one, _ in found]).to(position_ids.device, dtype)  # [B|1, D/2]
    angles = position_ids.to(dtype)[:, :, None] * frequencies[:, None, :]  # [B|1, N, D/2]
    return torch.cat((angles.cos(), angles.sin()), -1)[:, None] * found[0][1]


def rotate(x, e):
    """Rotates heads [B, H, N, D] by the position state of their channels [B, K, N, D]."""
    cos, sin = e.repeat_interleave(x.shape[1] // e.shape[1], 1).chunk(2, -1)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def visible_keys(attention_mask, new, past, device, window=0):
    """Which keys the new tokens see: bool [B|1, 1, N, M], or None for plain causal attention. window: how many tokens a
    token sees, itself included; 0: all before it."""
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if attention_mask is not None and attention_mask.all():
        attention_mask = None
    hides = 0 < window < past + new
    if attention_mask is None and not hides and (past == 0 or new == 1):
        return None
    keys = torch.arange(past + new, device=device)
    queries = keys[past:, None]
    seen = (keys <= queries)[None, None]
    if hides:
        seen = seen & (keys > queries - window)
    if attention_mask is not None:
        # Padding attends to itself: the softmax of an empty row is NaN.
        seen = seen & (attention_mask.bool()[:, None, None, :] | (keys == queries))
    return seen


class TapeAttention(nn.Module):
    """Llama's attention, rotated by the position state; its weights also aggregate that state."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.gathers = layer + 1 < config.num_hidden_layers
        wide, narrow = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=config.attention_bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=config.attention_output_bias)
        self.rotates = config.rotary_layers is None or bool(config.rotary_layers[layer])
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, x, e, seen, cache):
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H|K, N, D]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = rotate(q, e), rotate(k, e)
        if self.gathers:
            # A cache takes both as values; whatever it does to those (beams, crops, devices) is right for e too.
            v = torch.cat((v, e.to(v.dtype)), -1)  # [B, K, N, 2D]
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        causal = seen is None and q.shape[2] > 1
        # One part at a time: fused kernels need values as wide as keys.
        gathered = [
            scaled_dot_product_attention(q, k, part, seen, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
            for part in v.split(self.head_dim, -1)
        ]  # [B, H, N, D] each
        return self.o_proj(gathered[0].transpose(1, 2).flatten(2)), gathered[-1]


class TapePositions(nn.Module):
    """The gated map across channels: e + W_down diag(silu(W_x y)) W_up e for the MLP's output y."""

    def __init__(self, config):
        super().__init__()
        channels, inner = config.num_key_value_heads, config.tape["width"] * config.num_attention_heads
        self.up_proj = nn.Linear(channels, inner, bias=False)
        self.x_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, channels, bias=False)

    def forward(self, e, y):
        up, down = self.up_proj.weight.to(e.dtype), self.down_proj.weight.to(e.dtype)
        gate = silu(self.x_proj(y).to(e.dtype))  # [B, N, I]
        # A token's update is linear in its gates: one product gives those of all tokens, without a tensor of [I, D]
        # per token.
        outer = down.t()[:, :, None] * up[:, None, :]  # [I, K, K]
        change = (gate @ outer.flatten(1)).unflatten(-1, outer.shape[1:])  # [B, N, K, K]
        return e + torch.einsum("bnij,bjnd->bind", change, e)


class TapeDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer):
        super().__init__()
        self.per_head = config.tape["mix"] == "per-head"
        self.self_attn = TapeAttention(config, layer)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pe = TapePositions(config)
        self.post_attention_linear = nn.Linear(config.num_attention_heads, config.num_key_value_heads, bias=False)

    def mix(self, gathered):
        """Maps what the H heads aggregated to the K channels."""
        weight = self.post_attention_linear.weight.to(gathered.dtype)  # [K, H]
        if not self.per_head:
            return torch.einsum("kh,bhnd->bknd", weight, gathered)
        means = gathered.unflatten(1, (weight.shape[0], -1)).mean(2)  # [B, K, N, D]
        return weight.sum(1)[:, None, None] * means

    def forward(self, x, e, seen=None, past_key_values=None):
        attended, gathered = self.self_attn(self.input_layernorm(x), e, seen, past_key_values)
        x = x + attended
        y = self.mlp(self.post_attention_layernorm(x))
        if self.self_attn.gathers:  # no layer reads the last one's update
            e = self.pe(e + self.mix(gathered.to(e.dtype)), y)
        return x + y, e


class TapePreTrainedModel(LlamaPreTrainedModel):
    config_class = TapeConfig
    _no_split_modules = ("TapeDecoderLayer",)
    _supports_flash_attn = _supports_flash_attn_2 = _supports_flex_attn = _supports_attention_backend = False
    _supports_static_cache = _can_compile_fullgraph = False


class TapeModel(TapePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(TapeDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        planned_length=None,
        **kwargs,
    ):
        """As Llama's. planned_length: tokens, with padding, that the text will have at last; frequencies that depend on
        a text's length (dynamic, longrope) are then chosen for that, once, and cached keys keep the right angles."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.gradient_checkpointing and self.training:
            use_cache = False
        elif use_cache is None:
            use_cache = self.config.use_cache
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        batch, new = x.shape[:2]
        past = int(past_key_values.get_seq_length()) if past_key_values is not None else 0
        if position_ids is None:
            if attention_mask is not None and attention_mask.dim() == 2:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -new:]
            else:
                position_ids = torch.arange(past, past + new, device=x.device)[None]
        lengths = position_ids.amax(-1) + 1 + max(0, (planned_length or 0) - past - new)  # [B|1]

        e = start_positions(self.config, position_ids, lengths, x.dtype)
        e = e.expand(batch, self.config.num_key_value_heads, -1, -1)
        windows = self.config.attention_windows or [0] * len(self.layers)
        seen = {window: visible_keys(attention_mask, new, past, x.device, window) for window in set(windows)}
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden = ()
        for layer, window in zip(self.layers, windows):
            if output_hidden_states:
                hidden += (x,)
            x, e = layer(x, e, seen=seen[window], past_key_values=past_key_values)
        x = self.norm(x)
        output = BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*hidden, x) if output_hidden_states else None,
        )
        return output.to_tuple() if return_dict is False else output


class TapeForCausalLM(TapePreTrainedModel, GenerationMixin):
    _tied_weights_keys = LlamaForCausalLM._tied_weights_keys  # a list in transformers 4, a dictionary in 5

    def __init__(self, config):
        super().__init__(config)
        self.model = TapeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.planned_length = None
        self.post_init()

    def _prepare_generated_length(self, generation_config, input_ids_length, inputs_tensor, **kwargs):
        generation_config = super()._prepare_generated_length(
            generation_config, input_ids_length=input_ids_length, inputs_tensor=inputs_tensor, **kwargs
        )
        # max_length does not count a prompt of embeddings.
        self.planned_length = generation_config.max_length - input_ids_length + inputs_tensor.shape[1]
        return generation_config

    def prepare_inputs_for_generation(self, *args, **kwargs):
        return super().prepare_inputs_for_generation(*args, **kwargs) | {"planned_length": self.planned_length}

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        planned_length=None,
        **kwargs,
    ):
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            planned_length=planned_length,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=found.past_key_values, hidden_states=found.hidden_states
        )
        return output.to_tuple() if return_dict is False else output
