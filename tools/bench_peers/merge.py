"""PEFT's merge: the base in its dtype, the adapter on it, merge_and_unload, save_pretrained."""

import sys

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
base, adapter, out = sys.argv[1:]
with torch.no_grad():
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
