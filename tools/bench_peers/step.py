"""What transformers and PEFT do for `tools/bench step`, in a process of its own; prints one JSON object.

step.py --context N --checkpointing off|full --repeat R --threads T [--train-also embeddings,norms]

LoRA of rank 8 on q, k, v, o of the random Llama that tapetune_step builds too: forward with labels, then backward.
"""

import argparse
import json
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
ALSO = {"embeddings": "embed_tokens", "norms": "norm"}  # the layers' norms end so too


def build(checkpointing: str, also: list[str]):
    torch.manual_seed(0)
    model = get_peft_model(LlamaForCausalLM(CONFIG), LORA)
    # Not modules_to_save, which keeps a second copy of all it trains: this is the leaner of the two ways.
    for name, parameter in model.named_parameters():
        if any(name.endswith(f"{ALSO[what]}.weight") for what in also):
            parameter.requires_grad_(True)
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--checkpointing", choices=("off", "full"), required=True)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--train-also", default="")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = build(options.checkpointing, [word for word in options.train_also.split(",") if word])
    ids = torch.randint(0, CONFIG.vocab_size, (1, options.context))

    seconds = []
    for _ in range(options.repeat + 1):  # the first is the warm-up
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        seconds.append(time.perf_counter() - start)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(json.dumps({"seconds": seconds[1:], "loss": loss.item(), "trained_parameters": trained}))


main()
