"""Run with transformers 4 first on PYTHONPATH: for each folder of the request on standard input, the logits of ids, and
greedy ids after a prompt, with a cache and without, as JSON on standard output."""

import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
torch.set_grad_enabled(False)
torch.set_num_threads(1)


def answer(folder, ids, prompt, new):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", trust_remote_code=True, output_loading_info=True
    )
    model.eval()
    model.generation_config.eos_token_id = None
    start = torch.tensor([prompt])
    greedy = {"attention_mask": torch.ones_like(start), "do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
    return {
        "trouble": {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys},
        "logits": model(torch.tensor([ids]), use_cache=False).logits[0].tolist(),
        "cached": model.generate(start, **greedy)[0, len(prompt) :].tolist(),
        "uncached": model.generate(start, use_cache=False, **greedy)[0, len(prompt) :].tolist(),
    }


request = json.load(sys.stdin)
json.dump({"version": transformers.__version__, "answers": [answer(**one) for one in request]}, sys.stdout)
