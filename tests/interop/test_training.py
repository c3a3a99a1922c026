"""Training beside transformers + PEFT with its own AdamW, and what TensorBoard reads of a run."""

import json

import numpy
import peer
import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model

CONTEXT, ROWS, STEPS = 32, 4, 5
BASES = {name: tiny.Case(name, "gqa", False, "nobias", "default", seed) for name, seed in (("llama", 1), ("qwen2", 3))}
BASES["window"] = tiny.Case("mistral", "gqa", False, "nobias", "default", 2, {"sliding_window": 7})


@pytest.fixture(scope="module", params=BASES)
def run(request, tapetune, tmp_path_factory):
    """A run of a few steps from an adapter that PEFT made: (model folder, adapter, windows, run folder)."""
    scratch = tmp_path_factory.mktemp(request.param)
    model, adapter, data = BASES[request.param].save(scratch / "model"), scratch / "start", scratch / "data.bin"
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    get_peft_model(peer.load(model, torch.float32), config).save_pretrained(adapter)
    # As many windows as a step takes: every step sees all of them, in whatever order.
    tokens = numpy.array(tiny.tokens(CONTEXT * ROWS + 1, 7), dtype=numpy.uint16)
    tokens.tofile(data)
    recipe = scratch / "recipe.yaml"
    recipe.write_text(
        f"model: {model}\ndata: {data}\nrun: {scratch / 'run'}\ncontext: {CONTEXT}\nsteps: {STEPS}\nbatch: {ROWS}\n"
        "adapter: {method: lora, rank: 4, alpha: 12}\noptimizer: {lr: 1.0e-2, clip: 0}\ndtype: f32\n"
        f"init_from: {adapter}\nmicro_batch: 2\n"
    )
    tapetune("train", recipe)
    windows = [tokens[i * CONTEXT : (i + 1) * CONTEXT + 1].astype(numpy.int64) for i in range(ROWS)]
    return model, adapter, torch.tensor(numpy.array(windows)), scratch / "run"


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_losses_equal_peft(run):
    model, adapter, windows, folder = run
    theirs = PeftModel.from_pretrained(peer.load(model, torch.float32), adapter, is_trainable=True)
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    losses = []
    for line in lines:
        with torch.enable_grad():
            logits = theirs(windows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in theirs.parameters() if p.grad is not None))
        assert abs(line["loss"] - loss.item()) < 1e-4, f"step {line['step']}: {line['loss']}, PEFT has {loss.item()}"
        assert abs(line["grad_norm"] - norm.item()) < 1e-3 * norm.item(), f"gradient norm of step {line['step']}"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01  # or the comparison would mean little


def test_tensorboard_reads_a_run(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run[-1]
    events = EventAccumulator(str(folder)).Reload()
    assert {"loss", "lr", "grad_norm", "tokens_per_s"} <= set(events.Tags()["scalars"])
    read = {event.step: event.value for event in events.Scalars("loss")}
    assert read == {line["step"]: pytest.approx(line["loss"], rel=1e-6) for line in metrics(folder)}


def test_the_result_loads_in_peft(run):
    model, _, windows, folder = run
    theirs = PeftModel.from_pretrained(peer.load(model, torch.float32), folder / "adapter")
    assert any(p.abs().max() > 0 for name, p in theirs.named_parameters() if "lora_B" in name)
    logits = theirs(windows[:, :-1]).logits
    assert torch.isfinite(logits).all()
