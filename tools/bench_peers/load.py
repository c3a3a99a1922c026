"""What transformers does for `tools/bench load`, in a process of its own; prints one JSON object.

load.py first MODEL IDS        from nothing to the first logits
load.py run MODEL IDS NEW      loads, then prefill and cached greedy decoding
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


class Clock:
    """A streamer: generate() hands it the prompt first and then every token as it comes."""

    def __init__(self):
        self.times, self.tokens = [], []

    def put(self, value):
        self.times.append(time.perf_counter())
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


def main():
    what, folder, ids = sys.argv[1:4]
    ids = torch.tensor([[int(word) for word in ids.split(",")]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    if what == "first":
        model(ids, use_cache=False).logits.sum().item()
        # The monotonic clock is one for all processes of a machine: the caller knows when it started this one.
        print(json.dumps({"monotonic": time.monotonic()}))
        return

    seconds = []
    for _ in range(4):  # the first is the warm-up
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        seconds.append(time.perf_counter() - start)
    new = int(sys.argv[4])
    clock = Clock()
    model.generation_config.eos_token_id = None
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, streamer=clock, pad_token_id=0
    )
    result = {
        "prefill_tokens": ids.shape[1],
        "prefill_seconds": seconds,
        "decode_tokens": new - 1,  # the first new token comes out of the prefill
        "decode_seconds": clock.times[-1] - clock.times[1],
        "tokens": clock.tokens[ids.shape[1] :],
    }
    print(json.dumps(result))


with torch.inference_mode():
    main()
