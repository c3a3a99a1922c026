"""Merged models in transformers, merges beside PEFT's merge_and_unload, and adapters on their way there and back."""

import json
import warnings

import adapter_peers
import numpy
import peer
import pytest
import test_adapters
import test_adapters_written
import tiny
import torch
from peft import PeftModel

TOLERANCE = 1e-4
COUNT = 32
# What a method or a merge may change of a model's settings; all others must survive.
CHANGED = ("rope_parameters", "max_position_embeddings", "tie_word_embeddings", "dtype")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """base("llama", torch.bfloat16) is the folder of that checkpoint, made when first asked for."""
    folders = {}

    def find(name, dtype=torch.float32):
        if (name, dtype) not in folders:
            folders[name, dtype] = adapter_peers.BASES[name].save(tmp_path_factory.mktemp(name) / "model", dtype)
        return folders[name, dtype]

    return find


def stored(folder):
    """All tensors of a folder, whatever its shards."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in peer.tensors(file).items()}


def ulps(ours, theirs):
    """The largest distance in representable numbers."""
    kind = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    steps = []
    for tensor in (ours, theirs):
        bits = tensor.contiguous().view(kind).to(torch.int64)
        steps.append(torch.where(bits < 0, torch.iinfo(kind).min - bits, bits))  # in the order of the numbers
    return int((steps[0] - steps[1]).abs().max())


# --- what we train, in transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", test_adapters_written.FRESH, ids=lambda case: case.id)
def test_transformers_loads_a_merge(case, base, tapetune, tmp_path):
    """No missing, unexpected or new key, and the logits of the adapter beside its base."""
    folder, adapter, merged = base(case.base), tmp_path / "adapter", tmp_path / "merged"
    ids = tiny.tokens(COUNT, 11)
    tapetune("adapter", folder, *case.options, "--seed", 5, "--out", adapter)
    test_adapters_written.fill(adapter)
    tapetune("merge", adapter, "--model", folder, "--out", merged)
    expected = tapetune.logits(folder, ids, "--adapter", adapter, "--dtype", "f32")["logits"]
    assert (expected - peer.forward(peer.load(folder), ids)).abs().max() > 0.3, "the adapter hardly changes the logits"
    peer.assert_close(peer.forward(peer.load(merged), ids), expected, TOLERANCE, "transformers on the merged model")
    peer.assert_close(tapetune.logits(merged, ids)["logits"], expected, TOLERANCE, "tapetune on the merged model")

    before, after = peer.config(folder), peer.config(merged)
    assert {k: v for k, v in after.items() if k not in CHANGED} == {k: v for k, v in before.items() if k not in CHANGED}
    for key, value in case.rope.items():
        assert after["rope_parameters"][key] == value, key
    longer = int(case.rope.get("factor", 1) * before["max_position_embeddings"])
    assert after["max_position_embeddings"] == longer
    assert after["tie_word_embeddings"] == before["tie_word_embeddings"]
    tapetune("verify", adapter, merged, "--model", folder)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_narrow_merge(dtype, base, tapetune, tmp_path):
    """In the base's dtype: the model that the adapter and its base make in f32, every weight rounded once."""
    folder, adapter = base("llama", dtype), tmp_path / "adapter"
    merged, wide = tmp_path / "merged", tmp_path / "wide"
    ids = tiny.tokens(COUNT, 12)
    tapetune("adapter", folder, "--method", "lora", "rank=4", "train_also=embeddings,norms", "--out", adapter)
    test_adapters_written.fill(adapter)
    tapetune("merge", adapter, "--model", folder, "--out", merged)
    tapetune("merge", adapter, "--model", folder, "--dtype", "f32", "--out", wide)
    expected = tapetune.logits(folder, ids, "--adapter", adapter, "--dtype", "f32")["logits"]
    exact, narrow = peer.load(wide), peer.load(merged)
    peer.assert_close(peer.forward(exact, ids), expected, TOLERANCE, "merged in f32")
    assert narrow.dtype == dtype
    for name, tensor in exact.state_dict().items():
        assert torch.equal(narrow.state_dict()[name], tensor.to(dtype)), f"{name} is not the f32 merge rounded once"
    away = float((peer.forward(narrow, ids).float() - expected).norm() / expected.norm())
    rounded = float((peer.forward(exact.to(dtype), ids).float() - expected).norm() / expected.norm())
    assert 0 < away <= 1.01 * rounded, f"{away:.4f} of the logits are lost, {rounded:.4f} by rounding alone"


RECIPES = {
    "lora": "adapter: {method: lora, rank: 4}\npositions: {scaling: linear, factor: 2}",
    "longlora": "adapter: {method: longlora, rank: 4}\ntrain_also: [embeddings, norms]",
    "theta": "adapter: {method: theta-scaling, rank: 4}\npositions: {theta: 1.0e+5}",
    "full": "adapter: {method: full}",
}


def train(tapetune, model, scratch, recipe, more=""):
    """The folder of a run of three steps."""
    numpy.array(tiny.tokens(COUNT * 8 + 1, 13), dtype=numpy.uint16).tofile(scratch / "data.bin")
    run = scratch / "run"
    (scratch / "recipe.yaml").write_text(
        f"model: {model}\ndata: {scratch / 'data.bin'}\nrun: {run}\ncontext: {COUNT}\nsteps: 3\nbatch: 2\n"
        f"{recipe}\noptimizer: {{lr: 2.0e-2}}\ndtype: f32\n{more}"
    )
    tapetune("train", scratch / "recipe.yaml")
    return run


@pytest.mark.parametrize("method", RECIPES)
@pytest.mark.parametrize("name", ("llama", "tied"))
def test_a_run(name, method, base, tapetune, tmp_path):
    folder, merged, ids = base(name), tmp_path / "merged", tiny.tokens(COUNT, 14)
    run = train(tapetune, folder, tmp_path, RECIPES[method])
    tapetune("merge", run, "--out", merged)
    tapetune("verify", run, merged)
    expected = tapetune.logits(folder, ids, "--adapter", run / "adapter", "--dtype", "f32")["logits"]
    assert (expected - peer.forward(peer.load(folder), ids)).abs().max() > 0.05, "the training hardly changed the logits"
    model = peer.load(merged)
    peer.assert_close(peer.forward(model, ids), expected, TOLERANCE, "transformers on the merged run")
    assert model.config.tie_word_embeddings == (name == "tied")
    said = json.loads((merged / "tapetune_provenance.json").read_text())
    assert said["recipe"] == (run / "recipe.yaml").read_text()


# --- beside PEFT ----------------------------------------------------------------------------------------------------

# PEFT adds a tied head's LoRA matrices to the embeddings too, and warns of it; that is another model than it was before.
SAME = [case for case in test_adapters.SAVED if case.id != "tied-head"]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("f32", "bf16"))
@pytest.mark.parametrize("case", SAME, ids=lambda case: case.id)
def test_merge_and_unload(case, dtype, base, tapetune, tmp_path):
    """A PEFT-made adapter, merged by either: nearly all numbers to the last bit, none further than a step away."""
    folder, adapter, merged = base(case.base, dtype), tmp_path / "adapter", tmp_path / "merged"
    case.save(lambda name: base(name, dtype), adapter)
    tapetune("merge", adapter, "--model", folder, "--out", merged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tied embeddings part
        theirs = PeftModel.from_pretrained(peer.load(folder), adapter).merge_and_unload(safe_merge=False)
    kept = dict(theirs.named_parameters())  # a tied matrix once
    ours = stored(merged)
    assert sorted(ours) == sorted(kept)
    total = exact = 0
    for name, tensor in kept.items():
        assert ours[name].dtype == tensor.dtype, name
        if dtype == torch.bfloat16:
            assert ulps(ours[name], tensor.detach()) <= 1, f"{name}: {ulps(ours[name], tensor.detach())} steps away"
        else:
            peer.assert_close(ours[name], tensor, 2e-6 * float(tensor.abs().max()), name)
        total += tensor.numel()
        exact += int((ours[name] == tensor).sum())
    assert exact / total > 0.98, f"only {exact / total:.4f} of the numbers are PEFT's to the bit"
    assert peer.load(merged).config.tie_word_embeddings == theirs.config.tie_word_embeddings


def test_a_tied_head_with_a_pair(base, tapetune, tmp_path):
    """The model as it was with its adapter: the head parts from the embeddings, which stay."""
    case = next(case for case in test_adapters.SAVED if case.id == "tied-head")
    folder, adapter, merged, ids = base("tied"), tmp_path / "adapter", tmp_path / "merged", tiny.tokens(COUNT, 15)
    model = case.save(base, adapter)
    tapetune("merge", adapter, "--model", folder, "--out", merged)
    result = peer.load(merged)
    assert not result.config.tie_word_embeddings
    peer.assert_close(peer.forward(result, ids), model(torch.tensor([ids])).logits[0], TOLERANCE, "the parted model")


@pytest.mark.parametrize("method", ("lora", "longlora"))
def test_exported_adapter(method, base, tapetune, tmp_path):
    """`merge --adapter` of a run: PEFT takes all of it without a remark, and has our logits."""
    folder, exported, ids = base("llama"), tmp_path / "exported", tiny.tokens(COUNT, 16)
    run = train(tapetune, folder, tmp_path, RECIPES[method])
    tapetune("merge", run, "--adapter", "--out", exported)
    model = adapter_peers.load_adapter(folder, exported, {"rope_type": "linear", "factor": 2.0} if method == "lora" else None)
    ours = tapetune.logits(folder, ids, "--adapter", exported, "--dtype", "f32")["logits"]
    peer.assert_close(model(torch.tensor([ids])).logits[0], ours, TOLERANCE, "PEFT on the exported adapter")


def test_there_and_back(base, tapetune, tmp_path):
    """Trained here, on in PEFT, back here, and merged: the same model at every border."""
    folder, ids = base("llama"), tiny.tokens(COUNT, 17)
    run = train(tapetune, folder, tmp_path, "adapter: {method: lora, rank: 4}")
    tapetune("merge", run, "--adapter", "--out", tmp_path / "out")
    model = PeftModel.from_pretrained(peer.load(folder, torch.float32), tmp_path / "out", is_trainable=True)
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.5)
    with torch.enable_grad():
        model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "peft")
    theirs = model(torch.tensor([ids])).logits[0]
    ours = tapetune.logits(folder, ids, "--adapter", tmp_path / "peft", "--dtype", "f32")["logits"]
    peer.assert_close(ours, theirs, TOLERANCE, "what PEFT trained on")

    (tmp_path / "again").mkdir()
    recipe = f"adapter: {{method: lora, rank: 4}}\ninit_from: {tmp_path / 'peft'}"
    last = train(tapetune, folder, tmp_path / "again", recipe)
    tapetune("merge", last, "--out", tmp_path / "merged")
    after = tapetune.logits(folder, ids, "--adapter", last / "adapter", "--dtype", "f32")["logits"]
    assert (after - ours).abs().max() > 0.01, "the last training changed nothing"
    peer.assert_close(peer.forward(peer.load(tmp_path / "merged"), ids), after, TOLERANCE, "merged in the end")
