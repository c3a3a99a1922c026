"""What transformers does for `tools/bench eval`, in a process of its own; prints one JSON object.

eval.py MODEL TOKENS CONTEXT     perplexity of 16-bit tokens in windows side by side
"""

import json
import math
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main():
    folder, file, context = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ids = torch.from_numpy(np.fromfile(file, dtype=np.uint16).astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    start, total, tokens = time.perf_counter(), 0.0, 0
    for begin in range(0, len(ids) - context, context):
        window = ids[begin : begin + context + 1]
        logits = model(window[None, :-1], use_cache=False).logits[0]
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        tokens += context
    seconds = time.perf_counter() - start
    print(json.dumps({"tokens_per_s": tokens / seconds, "perplexity": math.exp(total / tokens)}))


with torch.inference_mode():
    main()
