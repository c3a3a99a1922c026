"""Adapters that we write are what PEFT and transformers take."""

import copy
import json
import math
import warnings
from dataclasses import dataclass, field

import peer
import pytest
import tiny
import torch
from adapter_peers import (
    ATTENTION,
    COUNT,
    EVERYTHING,
    PREFIX,
    TOLERANCE,
    assert_agree,
    base,
    contents,
    load_adapter,
    load_base,
    noise_like,
    plain,
    shifted_groups,
)
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass(frozen=True)
class Fresh:
    """An adapter that tapetune makes, with what PEFT's side needs to mean the same."""

    id: str
    base: str
    method: str
    words: str = ""
    rope: dict = field(default_factory=dict, hash=False)  # what the method changes in the base's rotary settings
    config: dict = field(default_factory=dict, hash=False)  # what adapter_config.json must say
    also: tuple = ()  # trained whole
    targets: tuple = tuple(ATTENTION)
    group: float = 0.0  # the part of the context that attention sees in training

    @property
    def options(self):
        return ["--method", self.method, "rank=4", "alpha=12", *self.words.split()]

    def trained(self, model):
        """The names of all that the method trains, from those of the plain model."""
        parts = {"embeddings": "embed_tokens.weight", "norms": "norm.weight", "lm_head": "lm_head.weight"}
        names = [name for name, _ in model.named_parameters() if name.endswith("weight")]
        whole = [name for name in names if any(name.endswith(parts[what]) for what in self.also)]
        adapted = [name.removesuffix("weight") for name in names if name.split(".")[-2] in self.targets]
        ends = ["lora_A.weight", "lora_B.weight"] + ["lora_magnitude_vector"] * self.config.get("use_dora", False)
        return sorted(whole + [name + end for name in adapted for end in ends])


ALSO = ("embeddings", "norms")
TRAIN_ALSO = "train_also=embeddings,norms"
FRESH = [
    Fresh("lora", "llama", "lora"),
    Fresh("head-norms-also", "qwen3", "lora", TRAIN_ALSO, also=ALSO),
    Fresh("lora-also", "mistral", "lora", TRAIN_ALSO, also=ALSO),
    Fresh("rslora-also", "llama", "lora", f"rslora=true {TRAIN_ALSO}", config={"use_rslora": True}, also=ALSO),
    Fresh("dora-also", "qwen2", "lora", f"dora=true {TRAIN_ALSO}", config={"use_dora": True}, also=ALSO),
    Fresh("dora", "bias", "lora", "dora=true dropout=0.1", config={"use_dora": True, "lora_dropout": 0.1}),
    Fresh("everything", "qwen2", "lora", "targets=q,k,v,o,gate,up,down", targets=tuple(EVERYTHING)),
    Fresh("head", "mistral", "lora", "targets=q,v,lm_head", targets=("q_proj", "v_proj", "lm_head")),
    Fresh("head-also", "llama", "lora", "train_also=lm_head", also=("lm_head",)),
    Fresh("tied-also", "tied", "lora", TRAIN_ALSO, config={"ensure_weight_tying": True}, also=ALSO),
    Fresh("longlora", "llama", "longlora", f"group=0.25 {TRAIN_ALSO}", also=ALSO, group=0.25),
    Fresh("in-windows", "window", "lora", TRAIN_ALSO, also=ALSO),
    Fresh("theta", "llama", "theta-scaling", "theta=1e6", {"rope_theta": 1e6}),
    Fresh("linear", "qwen2", "lora", "scaling=linear factor=2", {"rope_type": "linear", "factor": 2.0}),
    Fresh("theta-linear", "llama", "theta-scaling", "scaling=linear factor=2",  # as the paper's run; 1e6 by default
          {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}),
    Fresh("theta-also", "mistral", "theta-scaling", f"theta=2e5 {TRAIN_ALSO}", {"rope_theta": 2e5}, also=ALSO),
]


@pytest.mark.parametrize("case", FRESH, ids=lambda case: case.id)
def test_peft_loads(case, base, tapetune, tmp_path):
    folder, adapter, ids = base(case.base), tmp_path / "adapter", tiny.tokens(COUNT, 9)
    tapetune("adapter", folder, *case.options, "--seed", 5, "--out", adapter)
    plain_model = load_base(folder, case.rope)

    config = json.loads((adapter / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "bias": "none"} | case.config
    assert {key: config.get(key) for key in expected} == expected
    names = sorted(name for name in contents(adapter) if ".base_layer." not in name)
    kept = ["lm_head.weight"] if case.config.get("ensure_weight_tying") else []  # PEFT's second name of the matrix
    assert names == sorted(case.trained(plain_model) + kept)

    # The start: PEFT has the base's logits (in the method's rotary settings), and so have we, either way.
    model, expected = load_adapter(folder, adapter, case.rope), peer.forward(plain_model, ids)
    peer.assert_close(model(torch.tensor([ids])).logits[0], expected, TOLERANCE, "PEFT on a fresh adapter")
    for options in (["--adapter", adapter], case.options):
        ours = tapetune.logits(folder, ids, *options, "--dtype", "f32")["logits"]
        peer.assert_close(ours, expected, TOLERANCE, f"tapetune with a fresh adapter by {options[0]}")

    # A trained one: the same folder with other values.
    fill(adapter)
    model = load_adapter(folder, adapter, case.rope)
    assert (model(torch.tensor([ids])).logits[0] - expected).abs().max() > 0.3, "the values hardly change the logits"
    mask = None
    if case.group:
        mask = shifted_groups(plain_model.config.num_attention_heads, COUNT, int(case.group * COUNT))
    assert_agree(tapetune, model, folder, adapter, ids, ("off", "selective"), mask)

    if case.method != "lora":  # a copy keeps what adapter_config.json has no word for
        new = tmp_path / "new"
        tapetune("adapter", folder, "--adapter", adapter, "--out", new)
        assert json.loads(tapetune("inspect", folder, "--adapter", new, "--json"))["adapter"]["method"] == case.method
        assert_agree(tapetune, load_adapter(folder, new, case.rope), folder, new, ids, ("full",), mask)


def fill(adapter):
    """Random values in place of an adapter's own; the file is otherwise as it was."""
    path = adapter / "adapter_model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    source = torch.Generator().manual_seed(4000)
    tensors = contents(adapter)
    for name, tensor in tensors.items():
        if ".base_layer." not in name:
            tensors[name] = noise_like(name, tensor, source)
    config = json.loads((adapter / "adapter_config.json").read_text())
    if config.get("ensure_weight_tying"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file({PREFIX + name: tensor for name, tensor in tensors.items()}, path, metadata)


def test_start_values(base, tapetune, tmp_path):
    """A is drawn as PEFT draws it, by the seed; B is zero; a magnitude is its row's norm; the rest is the base's."""
    folder, model = base("llama"), load_base(base("llama"))
    options = ["--method", "lora", "rank=16", "dora=true", TRAIN_ALSO]
    for seed, name in ((1, "one"), (1, "again"), (2, "other")):
        tapetune("adapter", folder, *options, "--seed", seed, "--out", tmp_path / name)
    one, again, other = (contents(tmp_path / name) for name in ("one", "again", "other"))
    weights = model.state_dict()
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name]), f"{name} differs with the same seed"
        if name.endswith("lora_A.weight"):
            assert not torch.equal(tensor, other[name]), f"{name} is the same with another seed"
            bound = 1 / math.sqrt(tensor.shape[1])  # kaiming_uniform_ with a = sqrt(5)
            assert tensor.abs().max() <= bound and abs(float(tensor.std()) / bound - 3**-0.5) < 0.1, name
        elif name.endswith("lora_B.weight"):
            assert not tensor.any(), name
        elif name.endswith("lora_magnitude_vector"):
            norm = weights[name.replace("lora_magnitude_vector", "weight")].norm(dim=1)
            peer.assert_close(tensor[:, None], norm[:, None], 1e-5, name)
        else:
            assert torch.equal(tensor, weights[name]), f"{name} does not start as the base's"


def test_transformers_takes_it(base, tapetune, tmp_path):
    """transformers loads adapters by itself, without a PeftModel, and has nothing to remark either."""
    folder, adapter, ids = base("llama"), tmp_path / "adapter", tiny.tokens(COUNT, 10)
    tapetune("adapter", folder, "--method", "lora", "rank=4", "--out", adapter)
    fill(adapter)
    model = load_base(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_adapter(adapter)
    ours = tapetune.logits(folder, ids, "--adapter", adapter, "--dtype", "f32")["logits"]
    peer.assert_close(ours, peer.forward(model, ids), TOLERANCE, "transformers' own load_adapter")
