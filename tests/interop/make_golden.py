"""Writes tests/data: a tiny random Llama and transformers' logits for it under every rotary variant.

The C++ tests compare with these numbers where no Python is at hand. Run with the environment of tools/setup --full:
    python tests/interop/make_golden.py
"""

import json
import pathlib

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
CONTEXT = 48
SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-5, bos_token_id=1,
             eos_token_id=2)
FACTORS = [1.0 + 0.25 * i for i in range(8)]
# name: (max_position_embeddings, rope settings)
VARIANTS = {
    "default": (CONTEXT, {}),
    "linear": (2 * CONTEXT, {"rope_type": "linear", "factor": 2.0}),
    "dynamic": (CONTEXT, {"rope_type": "dynamic", "factor": 2.0}),
    "yarn": (2 * CONTEXT, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": CONTEXT}),
    "yarn-mscale": (2 * CONTEXT, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": CONTEXT,
                                  "mscale": 0.8, "mscale_all_dim": 0.5, "beta_fast": 16.0, "truncate": False}),
    "llama3": (2 * CONTEXT, {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": CONTEXT,
                             "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "longrope": (2 * CONTEXT, {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": CONTEXT,
                               "short_factor": FACTORS, "long_factor": [2 * f for f in FACTORS]}),
}


def main():
    torch.manual_seed(0)
    numbers, configs, weights = {}, {}, None
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 80))
    numbers["tokens"] = tokens[0]
    for name, (context, rope) in VARIANTS.items():
        config = LlamaConfig(**SIZES, max_position_embeddings=context, rope_theta=10000.0,
                             rope_scaling=dict(rope) if rope else None)
        model = LlamaForCausalLM(config).eval()
        if weights is None:
            # Larger than an initialisation's: logits of order one make an absolute tolerance mean something.
            weights = {k: torch.randn_like(v) * (0.25 if v.dim() == 2 else 0.5) + ("norm" in k)
                       for k, v in model.state_dict().items()}
            save_file(weights, DATA / "tiny-model.safetensors", metadata={"format": "pt"})
        model.load_state_dict(weights)
        for length in (40, 80):  # below and above the original context
            with torch.no_grad():
                out = model(tokens[:, :length], output_hidden_states=True)
            numbers[f"{name}.{length}"] = out.logits[0].contiguous()
            if name == "default" and length == 40:
                for k, hidden in enumerate(out.hidden_states):
                    numbers[f"hidden.{k}"] = hidden[0].contiguous()
        configs[name] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES,
                         "max_position_embeddings": context, "tie_word_embeddings": False, "rope_theta": 10000.0,
                         "rope_scaling": rope or None}
    save_file(numbers, DATA / "tiny-logits.safetensors")
    (DATA / "tiny-configs.json").write_text(json.dumps(configs, indent=1) + "\n")


if __name__ == "__main__":
    main()
