"""What transformers and PEFT do for `tools/bench train`, in a process of its own.

train.py make FOLDER         saves a random Llama of 58M parameters, which both sides train
train.py run FOLDER DATA --context N --checkpointing off|full --steps S --threads T [--train-also embeddings,norms]
                             trains it on 16-bit token ids, a window a step; prints one JSON object

LoRA of rank 8 on q, k, v, o; AdamW in its fused form, gradients clipped to a norm of 1. The loop is bare: the Trainer of
transformers does the same work, and takes longer to start.
"""

import argparse
import json
import time

import numpy
import torch
from llama58m import CONFIG, add_settings, trained, with_lora
from transformers import LlamaForCausalLM


def make(options) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(options.folder)


def run(options) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    base = LlamaForCausalLM.from_pretrained(options.folder, dtype=torch.float32, attn_implementation="sdpa")
    model = with_lora(base, options.checkpointing, options.train_also)
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters, lr=2e-5, weight_decay=0.0, fused=True)
    data = numpy.memmap(options.data, dtype=numpy.uint16, mode="r")
    windows = (len(data) - 1) // options.context

    def window(index: int) -> torch.Tensor:  # [1, context + 1]
        begin = index % windows * options.context
        return torch.from_numpy(data[begin : begin + options.context + 1].astype(numpy.int64)).unsqueeze(0)

    batch = window(0)
    # The monotonic clock is one for all processes of a machine: the caller knows when it started this one.
    first_step_at = time.monotonic()
    seconds, losses = [], []
    for step in range(options.steps):
        start = time.perf_counter()
        ids, targets = batch[:, :-1], batch[:, 1:].contiguous()
        loss = model(input_ids=ids, labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        batch = window(step + 1)
        seconds.append(time.perf_counter() - start)
    count = sum(parameter.numel() for parameter in parameters)
    result = {"first_step_at": first_step_at, "seconds": seconds, "losses": losses, "trained_parameters": count}
    print(json.dumps(result))


def main():
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers(dest="what", required=True)
    verbs.add_parser("make").add_argument("folder")
    verb = verbs.add_parser("run")
    verb.add_argument("folder")
    verb.add_argument("data")
    verb.add_argument("--steps", type=int, required=True)
    add_settings(verb)
    options = parser.parse_args()
    {"make": make, "run": run}[options.what](options)


main()
