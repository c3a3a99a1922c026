"""TAPE in transformers: the folder that `tapetune merge` writes, run by the Python files that it carries."""

import json
import math
import shutil
from dataclasses import dataclass

import models
import peer
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4  # absolute on logits of standard deviation 2
COUNT = 40  # tokens of a text, and past the original context of the tiny models
NEW = 24  # tokens to generate


@dataclass(frozen=True)
class Case:
    """A base model (none: stories260K), and TAPE's settings on it."""

    id: str
    base: tiny.Case | None
    words: str = ""

    def save_base(self, shared_folder, folder):
        return shared_folder if self.base is None else self.base.save(folder)

    def prompt(self, count=COUNT, seed=1):
        # stories260K has 512 tokens, the tiny models 97; the ids below that are ordinary in both.
        return [1, *tiny.tokens(count - 1, seed)]


def grouped(arch="llama", heads="gqa", tied=False, bias="nobias", rope="default", number=2):
    return tiny.Case(arch, heads, tied, bias, rope, number)


def windowed(arch, number, **settings):
    return tiny.Case(arch, "gqa", False, "nobias", "default", number, settings)


STORIES = [
    Case("stories260k", None, "mix=full"),
    Case("stories260k-per-head", None, "mix=per-head scaling=linear factor=2"),
]
TINY = [
    Case("gqa", grouped()),
    Case("gqa-per-head", grouped(), "mix=per-head"),
    Case("mha-narrow", grouped(heads="mha", number=1), "width=2"),
    Case("mha-per-head", grouped(heads="mha", number=1), "width=3 mix=per-head"),
    Case("mqa-theta", grouped(heads="mqa"), "theta=50000"),
    Case("tied", grouped(tied=True, number=4), "train_also=embeddings,norms"),
    Case("untied", grouped(tied=True, number=4), "train_also=embeddings,lm_head untie=true"),
    Case("lora", grouped(number=5), "rank=4 targets=q,v,down"),
    Case("bias", grouped(bias="allbias")),
    Case("mistral", grouped("mistral")),
    Case("qwen2", grouped("qwen2")),
    Case("qwen3", grouped("qwen3", number=4)),
    Case("smollm3", grouped("smollm3", bias="allbias", number=5), "rank=4"),
    Case("window", windowed("mistral", 5, sliding_window=6)),
    Case("windows", windowed("qwen3", 8, sliding_window=6, use_sliding_window=True, max_window_layers=1)),
    Case("window-off", windowed("mistral", 5, sliding_window=6), "attention.window=none"),
    Case("linear", grouped(), "scaling=linear factor=2"),
    Case("yarn", grouped(), "scaling=yarn factor=4"),
    Case("dynamic", grouped(), "scaling=dynamic factor=3"),
    Case("base-yarn", grouped(rope="yarn", number=8)),
    Case("base-dynamic", grouped(rope="dynamic", number=5)),
    Case("base-llama3", grouped(rope="llama3")),
    Case("base-longrope", grouped(rope="longrope")),
]


def load(folder, dtype=None):
    """The model by its own code; every tensor must have its place."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or "auto", trust_remote_code=True, output_loading_info=True
    )
    trouble = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
    assert not trouble, f"transformers does not take {folder} whole: {trouble}"
    assert type(model).__name__ == "TapeForCausalLM"
    return model.eval()


def randomise(adapter, seed):
    """Position weights of a size that moves the logits, in the last layer too; other trained tensors move a little."""
    source = torch.Generator().manual_seed(4000 + seed)
    path = adapter / "adapter_model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        noise = torch.randn(tensor.shape, generator=source)
        if name.endswith(("post_attention_linear.weight", "pe.up_proj.weight", "pe.down_proj.weight")):
            tensors[name] = 0.5 / math.sqrt(tensor.shape[-1]) * noise
        elif name.endswith("pe.x_proj.weight"):
            tensors[name] = 1.0 / math.sqrt(tensor.shape[-1]) * noise
        else:
            tensors[name] = tensor + 0.1 * tensor.abs().mean().clamp_min(0.3) * noise
    tied = {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"}
    if tied <= tensors.keys() and json.loads((adapter / "tapetune.json").read_text()).get("untie") is not True:
        tensors["base_model.model.lm_head.weight"] = tensors["base_model.model.model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})


@pytest.fixture(scope="module")
def made(tapetune, tmp_path_factory, request):
    """made(case) is (base, adapter, merged): folders, made when first asked for."""
    kept = {}

    def make(case):
        if case.id not in kept:
            folder = tmp_path_factory.mktemp(case.id)
            shared_folder = request.getfixturevalue("stories260k") if case.base is None else None
            base = case.save_base(shared_folder, folder / "base")
            tapetune("adapter", base, "--method", "tape", *case.words.split(), "--out", folder / "adapter")
            randomise(folder / "adapter", seed=len(case.id))
            tapetune("merge", folder / "adapter", "--model", base, "--out", folder / "merged")
            kept[case.id] = (base, folder / "adapter", folder / "merged")
        return kept[case.id]

    return make


def logits(model, ids, **given):
    return model(torch.tensor([ids]), use_cache=False, **given).logits[0]


def generate(model, ids, new=NEW, **given):
    """The new ids of greedy generation, which no end token stops."""
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([ids])
    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": new} | given
    return model.generate(prompt, **given)[0, len(ids) :].tolist()


def padded(texts):
    """Texts of several lengths in one batch, padded on the left with an ordinary token that would show."""
    longest = max(map(len, texts))
    ids = torch.tensor([[7] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    return ids, mask


@pytest.mark.parametrize("case", STORIES + TINY, ids=lambda case: case.id)
def test_logits(case, made, tapetune):
    base, adapter, merged = made(case)
    ids = case.prompt()
    ours = tapetune.logits(base, ids, "--adapter", adapter, "--hidden", "--dtype", "f32")
    found = load(merged)(torch.tensor([ids]), output_hidden_states=True)
    for layer, hidden in enumerate(found.hidden_states):
        peer.assert_close(ours[f"hidden.{layer}"], hidden[0], TOLERANCE, f"{case.id}: input of layer {layer}")
    peer.assert_close(ours["logits"], found.logits[0], TOLERANCE, case.id)
    again = tapetune.logits(merged, ids, "--dtype", "f32")["logits"]
    peer.assert_close(again, found.logits[0], TOLERANCE, f"{case.id}: tapetune on the merged folder")
    plain = tapetune.logits(base, ids)["logits"]
    moved = float((plain - ours["logits"]).abs().max())
    assert moved > 0.3, f"the adapter moves the logits by {moved:.2e} only, so that they show nothing"


@pytest.mark.parametrize("case", STORIES + TINY, ids=lambda case: case.id)
def test_generate(case, made, tapetune):
    """With a cache, without one, and by tapetune: the same tokens."""
    base, adapter, merged = made(case)
    model, ids = load(merged), case.prompt(20)
    cached, plain = generate(model, ids), generate(model, ids, use_cache=False)
    peer.assert_same_ids(cached, plain, f"{case.id}: cached and uncached")
    words = ["--adapter", adapter, "--ignore-eos", "--dtype", "f32", "--context", 20 + NEW]
    ours = tapetune.generate(base, ids, NEW, *words)["tokens"]
    peer.assert_same_ids(ours, cached, f"{case.id}: tapetune and transformers")


@pytest.mark.parametrize("case", STORIES + TINY, ids=lambda case: case.id)
def test_cache(case, made):
    """Logits in pieces of several lengths, each behind a past, as in one go."""
    model, ids = load(made(case)[2]), case.prompt()
    whole, cache, parts = logits(model, ids), None, []
    for begin, end in ((0, 17), (17, 18), (18, 29), (29, COUNT)):
        out = model(torch.tensor([ids[begin:end]]), past_key_values=cache, use_cache=True, planned_length=COUNT)
        cache = out.past_key_values
        parts.append(out.logits[0])
    peer.assert_close(torch.cat(parts), whole, TOLERANCE, case.id)


@pytest.mark.parametrize("case", STORIES + TINY, ids=lambda case: case.id)
def test_left_padding(case, made):
    """Rows of a padded batch are what they are alone: logits, and tokens generated with a cache and without."""
    model = load(made(case)[2])
    texts = [case.prompt(count, seed) for seed, count in enumerate((COUNT, 5, 23, 1))]
    ids, mask = padded(texts)
    together = model(ids, attention_mask=mask).logits
    for row, text in zip(together, texts):
        peer.assert_close(row[-len(text) :], logits(model, text), TOLERANCE, f"{case.id}: row of {len(text)} tokens")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    for use_cache in (True, False):
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, use_cache=use_cache)
        for row, text in zip(out[:, ids.shape[1] :].tolist(), texts):
            peer.assert_same_ids(row, generate(model, text), f"{case.id}: {len(text)} tokens, use_cache={use_cache}")


def test_beams(made):
    """Beam search moves rows of the cache about; positions must go with them."""
    case = TINY[0]
    model, ids = load(made(case)[2]), case.prompt(12)
    cached, plain = (generate(model, ids, num_beams=4, use_cache=use) for use in (True, False))
    peer.assert_same_ids(cached, plain, "beams with a cache and without")


@pytest.mark.parametrize("case", TINY[:2], ids=lambda case: case.id)
def test_start_is_the_base(case, tapetune, tmp_path):
    """Untrained, TAPE changes nothing."""
    base = case.base.save(tmp_path / "base")
    tapetune("adapter", base, "--method", "tape", *case.words.split(), "--out", tmp_path / "adapter")
    tapetune("merge", tmp_path / "adapter", "--model", base, "--out", tmp_path / "merged")
    ids = case.prompt()
    peer.assert_close(logits(load(tmp_path / "merged"), ids), peer.forward(peer.load(base), ids), 1e-5, case.id)


@pytest.mark.parametrize("case", [TINY[0], TINY[5], TINY[10], TINY[12]], ids=lambda case: case.id)
def test_saved_again(case, made, tmp_path):
    """save_pretrained writes the code too, and what comes back is the same model."""
    model, ids = load(made(case)[2]), case.prompt()
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert again.config.tape == model.config.tape


def test_bf16(made, tapetune):
    """Half precision for weights, not for angles: it loses about what tapetune's bf16 does, far from the start too."""
    case = TINY[0]
    folder, ids = made(case)[2], case.prompt()
    exact, model = logits(load(folder), ids), load(folder, torch.bfloat16)

    def lost(rounded):
        return float((rounded.float() - exact).norm() / exact.norm())

    ours = lost(tapetune.logits(folder, ids, "--dtype", "bf16")["logits"])
    for offset in (0, 1001):
        theirs = lost(logits(model, ids, position_ids=torch.arange(offset, offset + COUNT)[None]))
        assert theirs < 1.5 * ours, f"at offset {offset} bf16 loses {theirs:.3f} of the logits, in tapetune {ours:.3f}"


def test_gradient_checkpointing(made):
    case = TINY[0]
    model, ids = load(made(case)[2]).train(), torch.tensor([case.prompt()])

    def gradients():
        model.zero_grad()
        with torch.enable_grad():
            model(ids, labels=ids).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients()
    last = model.config.num_hidden_layers - 1
    assert sorted(plain) == sorted(again)
    assert "model.layers.0.pe.up_proj.weight" in plain and f"model.layers.{last}.pe.up_proj.weight" not in plain
    for name, grad in plain.items():
        peer.assert_close(again[name], grad, 1e-6 * max(1.0, float(grad.abs().max())), f"gradient of {name}")


@pytest.mark.parametrize("name", ["tape-official-a", "tape-official-b"])
def test_authors_checkpoints(name, shared, tapetune, tmp_path):
    """A checkpoint of the authors' own code, read here as it is, and merged to run in transformers: the logits, loss,
    hidden states and gradients that their code gave."""
    shipped = models.ROOT / "tests" / "data" / name
    golden = shipped if shipped.exists() else shared("golden", name)
    # The folder also holds the expected numbers, which are not a shard of the model.
    (tmp_path / "theirs").mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(golden / file, tmp_path / "theirs")
    tapetune("merge", tmp_path / "theirs", "--out", tmp_path / "merged")
    expected, model = load_file(golden / "expected.safetensors"), load(tmp_path / "merged")
    ids = expected["input_ids"].reshape(-1, expected["input_ids"].shape[-1])
    for row, wanted in zip(ids.tolist(), expected["logits"].view(*ids.shape, -1)):
        ours = tapetune.logits(tmp_path / "theirs", row, "--dtype", "f32")["logits"]
        peer.assert_close(ours, wanted, 1e-4, "tapetune on the authors' checkpoint")
    with torch.enable_grad():
        found = model(ids, labels=ids, output_hidden_states=True)
        found.loss.backward()
    peer.assert_close(found.logits.detach(), expected["logits"].view_as(found.logits), 1e-5, "logits")
    peer.assert_close(found.loss.detach()[None], expected["loss"].reshape(1), 1e-5, "loss")
    for layer, hidden in enumerate(found.hidden_states):
        peer.assert_close(hidden.detach(), expected[f"hidden.{layer}"].view_as(hidden), 1e-4, f"hidden.{layer}")
    gradients = {f"grad.{key}": weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    assert sorted(gradients) == sorted(key for key in expected if key.startswith("grad."))
    for key, grad in gradients.items():
        peer.assert_close(grad, expected[key], 1e-4 * float(expected[key].abs().max()), key)
