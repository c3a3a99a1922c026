"""Adapters that PEFT saved mean the same here, and what cannot is refused."""

import copy
import json
import subprocess
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
    KINDS,
    NORMS,
    TOLERANCE,
    assert_agree,
    base,
    contents,
    load_adapter,
    load_base,
    plain,
    randomise,
)
from peft import (
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)


@dataclass(frozen=True)
class Saved:
    """An adapter that PEFT makes."""

    id: str
    base: str
    settings: dict = field(hash=False)

    def save(self, base, folder, seed=0):
        """Writes it with random values, and returns the model that has them."""
        settings = {"r": 4, "lora_alpha": 12, "target_modules": ATTENTION} | self.settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it saves an embedding's base layer too, that it unties
            # A copy: LoraConfig makes sets of lists and adds to them.
            config = LoraConfig(task_type="CAUSAL_LM", **copy.deepcopy(settings))
            model = get_peft_model(load_base(base(self.base)), config)
            randomise(model, seed)
            model.save_pretrained(folder)
        return model.eval()


SAVED = [
    Saved(f"{arch}-{kind}-{name}", arch, settings | {"target_modules": targets})
    for arch in tiny.CONFIGS
    for kind, settings in KINDS.items()
    for name, targets in (("attention", ATTENTION), ("everything", EVERYTHING))
]
SAVED += [
    Saved("window", "window", {"modules_to_save": ["embed_tokens", *NORMS]}),
    Saved("window-dora", "window", KINDS["dora"] | {"target_modules": EVERYTHING}),
    Saved("windows-of-some-layers", "windows", {}),
    Saved("norms-of-heads", "qwen3", {"modules_to_save": [*NORMS, "q_norm", "k_norm"]}),
    Saved("bias-dora", "bias", KINDS["dora"] | {"target_modules": EVERYTHING}),
    Saved("lora-head", "llama", {"target_modules": [*ATTENTION, "lm_head"]}),
    Saved("dora-head", "qwen2", KINDS["dora"] | {"target_modules": [*ATTENTION, "lm_head"]}),
    Saved("whole-modules", "llama", {"modules_to_save": ["embed_tokens", *NORMS]}),
    Saved("whole-modules-short", "mistral", KINDS["dora"] | {"modules_to_save": ["embed_tokens", "norm"]}),
    Saved("whole-head", "qwen2", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    Saved("rank-1-of-some", "mistral", {"r": 1, "lora_alpha": 3, "target_modules": ["v_proj", "down_proj"]}),
    Saved("dropout", "llama", {"lora_dropout": 0.3}),  # off in all that is compared here
    Saved("all-linear", "llama", {"target_modules": "all-linear"}),  # saved as the full name of each
    Saved("tied", "tied", {}),
    Saved("tied-head", "tied", {"target_modules": [*ATTENTION, "lm_head"]}),
    # PEFT trains one matrix for both ends only when it is told to; else the head stays the frozen matrix.
    Saved("tied-kept", "tied", {"modules_to_save": ["embed_tokens", *NORMS], "ensure_weight_tying": True}),
    Saved("tied-parted", "tied", {"modules_to_save": ["embed_tokens"]}),
    # Some of the layers, some of the modules.
    Saved("layers", "llama", {"layers_to_transform": [1], "target_modules": EVERYTHING}),
    Saved("layers-pattern", "qwen2", KINDS["dora"] | {"layers_to_transform": 0, "layers_pattern": "layers"}),
    Saved("excluded", "llama", {"target_modules": EVERYTHING, "exclude_modules": ["up_proj", "layers.0.self_attn.q_proj"]}),
    Saved("excluded-pattern", "mistral", {"exclude_modules": r".*\.0\.self_attn\.[qk]_proj"}),
    Saved("excluded-head", "llama", {"target_modules": [*ATTENTION, "lm_head"], "exclude_modules": ["layers.1.self_attn.v_proj"]}),
    Saved("layers-excluded", "tied", {"layers_to_transform": [0], "exclude_modules": ["k_proj"]}),
    Saved("pattern", "bias", {"target_modules": r".*\.(0\.self_attn\.q_proj|1\.mlp\.down_proj)"}),
]


@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.id)
def test_peft_saves(case, base, tapetune, tmp_path):
    folder, adapter, ids = base(case.base), tmp_path / "adapter", tiny.tokens(COUNT, 7)
    model = case.save(base, adapter)
    moved = (model(torch.tensor([ids])).logits[0] - peer.forward(load_base(folder), ids)).abs().max()
    assert moved > 0.3, "the adapter hardly changes the logits, so that they show nothing"
    assert_agree(tapetune, model, folder, adapter, ids)


# --- what PEFT has and tapetune does not: refused by name, and the remedy works ---------------------------------------

MERGE = "model.merge_and_unload().save_pretrained(DIR)"
NEVER = "cannot be merged into the weights"


@dataclass(frozen=True)
class Refused:
    id: str
    config: object = field(hash=False)
    name: str  # what the error must name
    remedy: str = MERGE

    @staticmethod
    def lora(id, name=None, remedy=MERGE, **settings):
        return Refused(id, LoraConfig(**({"r": 4, "target_modules": ATTENTION} | settings)), name or f"{id} = ", remedy)


REFUSED = [
    Refused.lora("rank_pattern", rank_pattern={"q_proj": 2}),
    Refused.lora("alpha_pattern", alpha_pattern={"q_proj": 2}),
    Refused.lora("bias", bias="lora_only"),
    Refused.lora("lora_bias", remedy="only where the projections have a bias", lora_bias=True),
    Refused.lora("layer_replication", remedy=NEVER, layer_replication=[(0, 2), (1, 2)]),
    Refused.lora("trainable_token_indices", trainable_token_indices=[3, 5]),
    Refused.lora("pissa", "init_lora_weights = ", init_lora_weights="pissa"),
    Refused.lora("olora", "init_lora_weights = ", init_lora_weights="olora"),
    Refused.lora("embeddings", "target_modules has the embeddings", target_modules=["q_proj", "embed_tokens"]),
    Refused.lora("whole-projection", "modules_to_save has model.layers.0.mlp.up_proj.weight", modules_to_save=["up_proj"]),
    Refused.lora("some-norms", "modules_to_save has 2 of the model's 5 norms", modules_to_save=["input_layernorm"]),
    Refused("ia3", IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "peft_type IA3"),
    Refused("vera", VeraConfig(r=4, target_modules=["q_proj", "o_proj"]), "peft_type VERA"),
    Refused("loha", LoHaConfig(r=4, target_modules=ATTENTION), "peft_type LOHA"),
    Refused("lokr", LoKrConfig(r=4, target_modules=ATTENTION), "peft_type LOKR"),
    Refused("oft", OFTConfig(r=4, oft_block_size=0, target_modules=["q_proj"]), "peft_type OFT"),
    Refused("ln-tuning", LNTuningConfig(target_modules=NORMS), "peft_type LN_TUNING"),
    Refused("prompt-tuning", PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "peft_type PROMPT_TUNING", NEVER),
    Refused("prefix-tuning", PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "peft_type PREFIX_TUNING", NEVER),
]


def refusal(tapetune, *words):
    done = subprocess.run([tapetune.path, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout, done
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: [adapter]"), done.stderr
    return done.stderr


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.id)
def test_refused(case, base, tapetune, tmp_path):
    folder, adapter, merged, ids = base("llama"), tmp_path / "adapter", tmp_path / "merged", tiny.tokens(COUNT, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(load_base(folder), copy.deepcopy(case.config))
        source = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=source))
        model.save_pretrained(adapter)
    out = tmp_path / "logits.safetensors"
    said = refusal(tapetune, "logits", folder, "--adapter", adapter, "--tokens", "3,4", "--out", out)
    assert case.name in said and case.remedy in said, said
    assert not out.exists()
    assert case.name in refusal(tapetune, "merge", adapter, "--model", folder, "--out", merged) and not merged.exists()
    if case.remedy != MERGE:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = PeftModel.from_pretrained(load_base(folder), adapter).merge_and_unload()
    whole.save_pretrained(merged)
    ours = tapetune.logits(merged, ids, "--dtype", "f32")["logits"]
    peer.assert_close(ours, peer.forward(whole, ids), TOLERANCE, "what PEFT merged")


def test_unknown_settings(base, tapetune, tmp_path):
    """Every setting that this PEFT writes is known; one that is not is named and ignored, as PEFT does."""
    folder, adapter, out = base("llama"), tmp_path / "adapter", tmp_path / "logits.safetensors"
    Saved("plain", "llama", {}).save(base, adapter)
    words = [tapetune.path, "logits", folder, "--adapter", adapter, "--tokens", "3,4", "--force", "--out", out]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_future": 3, "future": None}))
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == 0 and "use_future = 3 is unknown and ignored" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def test_base_model_name(base, tapetune, tmp_path):
    """The base model is where adapter_config.json says: for merge, and for an adapter that is given as the model."""
    folder, adapter, merged, ids = base("llama"), tmp_path / "adapter", tmp_path / "merged", tiny.tokens(COUNT, 7)
    model = Saved("plain", "llama", {}).save(base, adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    expected = model(torch.tensor([ids])).logits[0]
    peer.assert_close(tapetune.logits(adapter, ids, "--dtype", "f32")["logits"], expected, TOLERANCE, "the adapter")
    tapetune("merge", adapter, "--out", merged)
    peer.assert_close(tapetune.logits(merged, ids, "--dtype", "f32")["logits"], expected, TOLERANCE, "merged")


# The layout on disk does not depend on the architecture: one of each is enough where only that is compared.
ONE_OF_EACH = [case for case in SAVED if not case.id.startswith(("mistral", "qwen", "smollm3"))]


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=lambda case: case.id)
def test_copy(case, base, tapetune, tmp_path):
    """Inspected, read and written again: the same bits under the same names, and the same model to PEFT."""
    folder, adapter, new, ids = base(case.base), tmp_path / "adapter", tmp_path / "new", tiny.tokens(COUNT, 8)
    model = case.save(base, adapter, seed=1)
    tapetune("adapter", folder, "--adapter", adapter, "--out", new)
    said = json.loads(tapetune("inspect", folder, "--adapter", adapter, "--json"))["adapter"]
    trained = model.get_nb_trainable_parameters()[0]
    assert (said["method"], said["trained_parameters"]) == ("lora", trained)

    ours, theirs = contents(new), contents(adapter)
    for name in [name for name in theirs if ".base_layer." in name]:
        # PEFT saves the frozen matrix of a head that has LoRA too, and loads adapters without it as well.
        assert name not in ours or torch.equal(ours.pop(name), theirs[name])
        del theirs[name]
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), f"{name} is not as it was"

    before, after = PeftConfig.from_pretrained(adapter), PeftConfig.from_pretrained(new)
    for key in ("r", "lora_alpha", "use_rslora", "use_dora", "lora_dropout", "bias", "ensure_weight_tying"):
        assert getattr(after, key) == getattr(before, key), key
    with warnings.catch_warnings():
        if case.id in ("tied-parted", "tied-head"):  # of these PEFT says that they part what was tied
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            written = PeftModel.from_pretrained(load_base(folder), new)
        else:
            written = load_adapter(folder, new)
    prompt = torch.tensor([ids])
    assert torch.equal(written(prompt).logits, model(prompt).logits), "PEFT gives other logits for what was written"


# --- from tapetune to PEFT ------------------------------------------------------------------------------------------
