"""What transformers and PEFT do for `tools/bench step`, in a process of its own; prints one JSON object.

step.py --context N --checkpointing off|full --repeat R --threads T [--train-also embeddings,norms]

LoRA of rank 8 on q, k, v, o of the random Llama that tapetune_step builds too: forward with labels, then backward.
"""

import argparse
import json
import time

import torch
from llama58m import CONFIG, add_settings, trained, with_lora
from transformers import LlamaForCausalLM


def main():
    parser = argparse.ArgumentParser()
    add_settings(parser)
    parser.add_argument("--repeat", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = with_lora(LlamaForCausalLM(CONFIG), options.checkpointing, options.train_also)
    ids = torch.randint(0, CONFIG.vocab_size, (1, options.context))

    seconds = []
    for _ in range(options.repeat + 1):  # the first is the warm-up
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        seconds.append(time.perf_counter() - start)
    count = sum(parameter.numel() for parameter in trained(model))
    print(json.dumps({"seconds": seconds[1:], "loss": loss.item(), "trained_parameters": count}))


main()
