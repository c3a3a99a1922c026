"""Model cards of merged models and of adapters: their Python lines, run as they are under transformers 4 and 5."""

import json
import os
import re
import subprocess
import sys

import models
import peer
import pytest
import tiny
import torch
from tokenizers import Tokenizer, models as tokenizer_models, pre_tokenizers

FACTOR = 2
MERGES = {
    f"{method}-{scaling}": (method, f"rank=4 scaling={scaling} factor={FACTOR}")
    for method in ("lora", "tape")
    for scaling in ("linear", "yarn")
}
BARE = "lora-without-tokenizer_config"  # whose base has a tokenizer.json alone
MERGES[BARE] = MERGES["lora-linear"]
# Runs the lines of each card in the folder that holds the model, as somebody would who copies them.
RUN = """
import json, os, sys
import torch, transformers
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)
torch.set_grad_enabled(False)
answers = {"version": transformers.__version__}
for name, (folder, lines, prompt) in json.load(sys.stdin).items():
    os.chdir(folder)
    found = {}
    exec(lines, found)
    inputs = found["tokenizer"](prompt, return_tensors="pt")
    ids = inputs.input_ids
    logits = found["model"].eval()(ids, use_cache=False).logits[0]
    longest = min(found["tokenizer"].model_max_length, 10**9)
    answers[name] = {"ids": ids[0].tolist(), "logits": logits.tolist(), "longest": longest, "inputs": sorted(inputs)}
print(json.dumps(answers))
"""


def save_tokenizer(folder, named):
    """Words w0 to w96, with a limit of the base model's context; named: with the class that reads it."""
    words = {f"w{i}": i for i in range(tiny.VOCAB)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_max_length": tiny.ORIGINAL, "unk_token": "w0"}
    if named:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def cards(tapetune, tmp_path_factory):
    """For each merge the folder around it, and the Python lines of its card."""
    made = {}
    for number, (name, (method, words)) in enumerate(MERGES.items()):
        folder = tmp_path_factory.mktemp(name)
        base = tiny.Case("llama", "gqa", False, "nobias", "default", 2).save(folder / "base")
        save_tokenizer(base, named=number % 2 == 0 or method == "lora")
        if name == BARE:
            (base / "tokenizer_config.json").unlink()
        tapetune("adapter", base, "--method", method, *words.split(), "--seed", 3, "--out", folder / "adapter")
        tapetune("merge", folder / "adapter", "--model", base, "--out", folder / "merged")
        card = (folder / "merged" / "README.md").read_text()
        lines = "".join(re.findall(r"^```python\n(.*?)^```$", card, flags=re.M | re.S))
        assert "AutoModelForCausalLM.from_pretrained" in lines and "AutoTokenizer.from_pretrained" in lines
        assert ("trust_remote_code" in lines) == (method == "tape")
        serve = re.findall(r"vllm serve merged --max-model-len (\d+)\n", card)
        assert serve == ([str(FACTOR * tiny.ORIGINAL)] if method == "lora" else [])
        made[name] = folder, lines
    return made


@pytest.mark.parametrize("words", ("scaling=linear factor=2", "scaling=yarn factor=2", "theta=50000", ""))
def test_the_lines_of_an_adapter_card_give_the_same_model(words, tapetune, tmp_path):
    base = tiny.Case("llama", "gqa", False, "nobias", "default", 2).save(tmp_path / "base")
    tapetune("adapter", base, "--method", "lora", "rank=4", *words.split(), "--seed", 3, "--out", tmp_path / "drawn")
    tapetune("merge", tmp_path / "drawn", "--model", base, "--adapter", "--out", tmp_path / "adapter")
    card = (tmp_path / "adapter" / "README.md").read_text()
    lines = "".join(re.findall(r"^```python\n(.*?)^```$", card, flags=re.M | re.S))
    assert ("config.rope_parameters" in lines) == (words != "")
    ids = tiny.tokens(FACTOR * tiny.ORIGINAL - 4, 9)
    script = f"import json, os, torch\nos.chdir({str(tmp_path)!r})\n{lines}\n" + (
        f"with torch.no_grad(): print(json.dumps(model.float().eval()(torch.tensor([{ids}])).logits[0].tolist()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ours = tapetune.logits(base, ids, "--adapter", tmp_path / "drawn", "--dtype", "f32")["logits"]
    peer.assert_close(torch.tensor(json.loads(done.stdout.splitlines()[-1])), ours, 1e-4, f"PEFT with {words or 'no scaling'}")


@pytest.mark.parametrize("version", (4, 5))
def test_the_lines_of_a_card_run(version, cards, tapetune):
    environment = dict(os.environ)
    if version == 4:
        package = models.cache() / "transformers4"
        if not package.is_dir():
            pytest.skip(f"{package} is not there: run tools/setup --full")
        environment["PYTHONPATH"] = str(package)
    ids = tiny.tokens(FACTOR * tiny.ORIGINAL - 4, 9)  # longer than the base model's context
    prompt = " ".join(f"w{i}" for i in ids)
    request = {name: (str(folder), lines, prompt) for name, (folder, lines) in cards.items()}
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(request), capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers.pop("version").startswith(f"{version}.")
    for name, answer in answers.items():
        folder, _ = cards[name]
        assert answer["ids"] == ids, f"{name}: the tokenizer gives other ids"
        if name == BARE:
            assert answer["inputs"] == ["attention_mask", "input_ids"], f"{name}: a Llama takes none of the others"
        else:
            assert answer["longest"] == FACTOR * tiny.ORIGINAL, f"{name}: model_max_length is {answer['longest']}"
        ours = tapetune.logits(folder / "base", ids, "--adapter", folder / "adapter", "--dtype", "f32")["logits"]
        peer.assert_close(torch.tensor(answer["logits"]), ours, 1e-4, f"{name} in transformers {version}")
