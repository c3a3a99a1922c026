"""Pass keys: prompts beside the papers' generator with numpy, answers beside transformers' generation."""

import json
import shutil

import numpy
import peer
import pytest
import tiny
import torch
from transformers import AutoTokenizer, LlamaConfig

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
GARBAGE = " ".join(["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."] * 5000)


def paper_prompt(characters: int, seed: int) -> tuple[str, str]:
    """What LongLoRA's and TAPE's scripts draw."""
    numpy.random.seed(seed)
    before = numpy.random.randint(0, characters)
    key = numpy.random.randint(1, 50000)
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    question = "What is the pass key? The pass key is"
    return "\n".join([TASK, GARBAGE[:before], needle, GARBAGE[: characters - before], question]), str(key)


def paper_lengths(interval: int, most: int) -> list[int]:
    return [int(3.75 * (i + 1) * interval // 1024 * 1024) for i in range(most // interval)]


def evaluate(tapetune, model, tmp_path, *words) -> tuple[dict, list[dict]]:
    """The JSON object, and a line a trial."""
    details = tmp_path / "trials.jsonl"
    found = json.loads(tapetune("eval", "passkey", model, "--json", "--details", details, *words))
    return found, [json.loads(line) for line in details.read_text().splitlines()]


@pytest.fixture(scope="module")
def llama2(shared, tmp_path_factory):
    """Llama 2's tokenizer with a model that fits it and knows nothing."""
    folder = tmp_path_factory.mktemp("llama2") / "model"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny.random_model(LlamaConfig(vocab_size=32000, **sizes), 1).save_pretrained(folder)
    for file in shared("data", "llama2-tokenizer").iterdir():
        if file.name.startswith(("tokenizer", "special")):
            shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("first_seed", (0, 4000))
def test_prompts_equal_the_papers_generator(llama2, first_seed, tapetune, tmp_path):
    found, trials = evaluate(tapetune, llama2, tmp_path, "--trials", 3, "--seed", first_seed)
    tokenizer = AutoTokenizer.from_pretrained(llama2)
    assert found["matched"] == "tokens"
    assert [cell["characters"] for cell in found["cells"]] == paper_lengths(1000, 8192)
    assert len(trials) == 24
    lengths = {}
    for trial in trials:
        text, key = paper_prompt(trial["characters"], trial["seed"])
        what = f"{trial['characters']} characters, seed {trial['seed']}"
        assert trial["key"] == key, what
        ids = tokenizer(text).input_ids
        peer.assert_same_ids(trial["prompt_tokens"], ids, what)
        lengths.setdefault(trial["characters"], []).append(len(ids))
        answer = tokenizer(key).input_ids[1:]
        assert len(trial["answer_tokens"]) == len(answer), what
        assert trial["correct"] == (trial["answer_tokens"] == answer), what
    for cell in found["cells"]:
        assert cell["context"] == pytest.approx(numpy.mean(lengths[cell["characters"]])), cell
    assert found["tokens_computed"] < 0.8 * found["tokens_read"]


def test_lengths_to_32k(llama2, tapetune, tmp_path):
    words = ("--trials", 1, "--interval", 16000, "--max-tokens", 32768)
    found, trials = evaluate(tapetune, llama2, tmp_path, *words)
    assert [cell["characters"] for cell in found["cells"]] == paper_lengths(16000, 32768)
    tokenizer = AutoTokenizer.from_pretrained(llama2)
    for trial in trials:
        theirs = tokenizer(paper_prompt(trial["characters"], 0)[0]).input_ids
        peer.assert_same_ids(trial["prompt_tokens"], theirs, f"{trial['characters']} characters")


def compare_answers(folder, trials, tolerance):
    model, tokenizer = peer.load(folder, torch.float32), AutoTokenizer.from_pretrained(folder)
    for trial in trials:
        what = f"{trial['characters']} characters, depth {trial['depth']}, seed {trial['seed']}"
        peer.assert_greedy(model, trial["prompt_tokens"], trial["answer_tokens"], tolerance, what)
        text = tokenizer.decode(trial["answer_tokens"]).strip()
        following = text[len(trial["key"]) :]
        right = text.startswith(trial["key"]) and not following[:1].isdigit()
        assert trial["correct"] == right, f"{what}: {text!r} for {trial['key']}"


def test_answers_equal_transformers(stories260k, tapetune, tmp_path):
    found, trials = evaluate(tapetune, stories260k, tmp_path, "--context", "300,400", "--trials", 2)
    assert all(len(trial["prompt_tokens"]) <= 400 for trial in trials)
    compare_answers(stories260k, trials, 1e-3)


@pytest.mark.slow
def test_smollm2_finds_keys(smollm2, tapetune, tmp_path):
    found, trials = evaluate(tapetune, smollm2, tmp_path, "--context", 512, "--depths", "0.1,0.9", "--trials", 2)
    assert found["matched"] == "text"
    compare_answers(smollm2, trials, 1e-3)
    assert sum(cell["correct"] for cell in found["cells"]) > 0, trials
