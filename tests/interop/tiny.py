"""Tiny random checkpoints, made by transformers, in which every setting changes the logits."""

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config

VOCAB = 97
ORIGINAL = 32  # the original context of every case
BELOW, ABOVE = 20, 56  # lengths on either side of it

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "smollm3": SmolLM3Config,
}
KV_HEADS = {"mha": lambda heads: heads, "gqa": lambda heads: heads // 2, "mqa": lambda heads: 1}
BIASES = {
    "nobias": {},
    "attnbias": {"attention_bias": True},
    "mlpbias": {"mlp_bias": True},
    "allbias": {"attention_bias": True, "mlp_bias": True},
}
TIED_BIAS = {"qwen3": "attnbias", "smollm3": "allbias"}
ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
LENGTH_DEPENDENT = ("dynamic", "longrope")

# Sizes that a reader could mix up are all different; the second and third have heads * head_dim != hidden_size.
SHAPES = (
    {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 80, "num_hidden_layers": 2},
    {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 88, "num_hidden_layers": 2, "head_dim": 16},
    {"hidden_size": 60, "num_attention_heads": 6, "intermediate_size": 72, "num_hidden_layers": 3, "head_dim": 8},
)
THETAS = (10000.0, 500.0, 100000.0)

# What yarn may carry beside its factor; each moves the frequencies or the size of the cosines.
YARNS = (
    {},
    {"attention_factor": 1.3},
    {"mscale": 0.9, "mscale_all_dim": 0.4},
    {"truncate": False},
    {"beta_fast": 2.0, "beta_slow": 0.2},
    {"mscale": 0.7},  # without mscale_all_dim it counts for nothing
    {"beta_fast": 2.0, "beta_slow": 0.25, "truncate": False, "mscale": 1.2, "mscale_all_dim": 0.6},
)


def rope_parameters(kind: str, theta: float, half: int, variant: int = 0) -> dict:
    """Settings of one rotary variant; half is head_dim / 2, variant picks among the optional keys."""
    rope = {"rope_type": kind, "rope_theta": theta}
    if kind == "linear":
        rope["factor"] = 2.5
    elif kind == "dynamic":
        rope["factor"] = 3.0
    elif kind == "yarn":
        rope |= {"factor": 4.0, "original_max_position_embeddings": ORIGINAL} | YARNS[variant % len(YARNS)]
    elif kind == "llama3":
        rope |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": (4.0, 6.0)[variant % 2]}
        rope["original_max_position_embeddings"] = ORIGINAL
    elif kind == "longrope":
        rope["short_factor"] = [1.0 + 0.05 * i for i in range(half)]
        rope["long_factor"] = [1.0 + 0.5 * i for i in range(half)]
        rope["original_max_position_embeddings"] = ORIGINAL
        rope |= ({"factor": 4.0}, {"factor": 4.0, "attention_factor": 1.2}, {})[variant % 3]
    return rope


def context(kind: str) -> int:
    """max_position_embeddings: the original context where transformers reads it as such, the extended one elsewhere."""
    return {"default": ORIGINAL, "dynamic": ORIGINAL, "linear": ORIGINAL * 5 // 2}.get(kind, ORIGINAL * 4)


@dataclass(frozen=True)
class Case:
    """One checkpoint: the axes of the matrix, and what varies with the number of the case."""

    arch: str
    heads: str
    tied: bool
    bias: str
    rope: str
    number: int
    extra: dict = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        tied = "tied" if self.tied else "untied"
        return "-".join([self.arch, self.heads, tied] + [self.bias] * (self.arch not in ("mistral", "qwen2")) + [self.rope])

    @property
    def version4(self) -> bool:
        """Every third config.json is in the form that transformers 4 wrote."""
        return self.number % 3 == 0

    @property
    def shard_size(self) -> str:
        return "24KB" if self.number % 4 == 1 else "5GB"

    def config(self):
        shape = SHAPES[self.number % len(SHAPES)]
        usual = Qwen3Config.head_dim if self.arch == "qwen3" else shape["hidden_size"] // shape["num_attention_heads"]
        width = shape.get("head_dim", usual)
        settings = shape | {
            "vocab_size": VOCAB,
            "num_key_value_heads": KV_HEADS[self.heads](shape["num_attention_heads"]),
            "max_position_embeddings": context(self.rope),
            "rms_norm_eps": (1e-6, 1e-5, 1e-3)[self.number % 3],
            "tie_word_embeddings": self.tied,
            "rope_parameters": rope_parameters(self.rope, THETAS[self.number // 3 % 3], width // 2, self.number),
            "bos_token_id": 1,
            "eos_token_id": [2, 5] if self.number % 2 else 2,
            "pad_token_id": 0 if self.number % 5 == 0 else None,
        }
        settings |= BIASES[self.bias]
        if self.arch == "mistral":
            settings["sliding_window"] = None
        if self.arch == "smollm3":  # of two or three layers, one or two that do not rotate
            settings |= ({"no_rope_layer_interval": 2}, {"no_rope_layers": [0, 1, 0, 1]})[self.number % 2]
        return CONFIGS[self.arch](**settings | self.extra)

    def save(self, folder: Path, dtype=torch.float32) -> Path:
        """Writes the checkpoint and returns its folder."""
        model = random_model(self.config(), seed=self.number).to(dtype)
        model.save_pretrained(folder, max_shard_size=self.shard_size)
        (folder / "generation_config.json").unlink(missing_ok=True)  # the config alone must be enough
        if self.version4:
            to_version4(folder / "config.json")
        return folder


def matrix() -> list[Case]:
    """Every combination of the axes; biases vary where the architecture leaves a choice, of the newer ones with tied."""
    axes = [
        (arch, heads, tied, bias, rope)
        for arch in CONFIGS
        for heads in KV_HEADS
        for tied in (False, True)
        for bias in (BIASES if arch == "llama" else (TIED_BIAS.get(arch, "nobias") if tied else "nobias",))
        for rope in ROPES
    ]
    numbers = list(range(len(axes)))
    random.Random(0).shuffle(numbers)  # so that what follows from the number meets every value of every axis
    return [Case(*axis, number) for axis, number in zip(axes, numbers)]


def random_model(config, seed: int):
    """A model of which nothing is zero or one, with logits of order one that lean on attention and position."""
    model = AutoModelForCausalLM.from_config(config).eval()
    source = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=source)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(1.6 / math.sqrt(weight.shape[-1]) * noise)
    model.tie_weights()
    return model


def tokens(count: int, seed: int) -> list[int]:
    """Random ids, without the special ones."""
    source = torch.Generator().manual_seed(2000 + seed)
    return torch.randint(6, VOCAB, (count,), generator=source).tolist()


def with_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer.json for a random model, so that it takes texts and can become a GGUF file."""
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    tokens = ["<unk>", "<s>", "</s>", *map(chr, alphabet[: VOCAB - 3])]
    special = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for i, token in enumerate(tokens[:3])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []}
    whole = {"version": "1.0", "added_tokens": special, "pre_tokenizer": byte_level, "decoder": byte_level}
    (folder / "tokenizer.json").write_text(json.dumps(whole | {"model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def to_version4(path: Path) -> None:
    """Rewrites a config.json as transformers 4 had it: rope_theta, rope_scaling with `type`, torch_dtype."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.31.0"
    if config["model_type"] == "llama" and config["num_key_value_heads"] == config["num_attention_heads"]:
        del config["num_key_value_heads"]  # as in the first Llama configs
    path.write_text(json.dumps(config, indent=2) + "\n")
