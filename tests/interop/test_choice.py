"""Multiple choice beside transformers, question by question, worded as lm-evaluation-harness does, stated here anew."""

import csv
import json
import os

import peer
import pytest
import torch
from transformers import PreTrainedTokenizerFast

LETTERS = "ABCD"
# SmolLM2 answers a few questions of each task; TAPETUNE_QUESTIONS=200 for a longer look.
QUESTIONS = int(os.environ.get("TAPETUNE_QUESTIONS", 2))


def subject_names(folder) -> list[str]:
    return [path.name.removesuffix("_test.csv") for path in sorted((folder / "test").glob("*_test.csv"))]


def mmlu_text(row) -> str:
    choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip(LETTERS, row[1:5]))
    return f"{row[0].strip()}{choices}\nAnswer:"


def mmlu(folder, limit: int, subjects: int) -> list[tuple[str, list[str], int]]:
    """Prompt, choices and answer of the first questions of the first subjects, after five solved ones."""
    asked = []
    for subject in subject_names(folder)[:subjects]:
        rows = {}
        for split in ("dev", "test"):
            with open(folder / split / f"{subject}_{split}.csv", newline="", encoding="utf8") as file:
                rows[split] = list(csv.reader(file))[1:]
        header = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        header += "".join(f"{mmlu_text(row)} {LETTERS[int(row[5])]}\n\n" for row in rows["dev"][:5])
        asked += [(header + mmlu_text(row), list(LETTERS), int(row[5])) for row in rows["test"][:limit]]
    return asked


def arc(path, limit: int, shots: list) -> list[tuple[str, list[str], int]]:
    def text(one):
        return f"Question: {one['question']}\nAnswer:"

    def answer(one):
        return one["choices"]["label"].index(one["answerKey"])

    header = "".join(f"{text(one)} {one['choices']['text'][answer(one)]}\n\n" for one in shots)
    return [(header + text(one), one["choices"]["text"], answer(one)) for one in json.loads(path.read_text())[:limit]]


def log_likelihoods(model, tokenizer, prompt: str, choices: list[str], context: int) -> list[float]:
    """As lm-evaluation-harness: of the tokens that a choice adds, after the last tokens that fit the model."""
    asked, seen, found = len(tokenizer(prompt).input_ids), {}, []
    for choice in choices:
        ids = tokenizer(f"{prompt} {choice}").input_ids
        added = len(ids) - asked
        ids = ids[-(context + 1) :]
        read = tuple(ids[:-1])
        if read not in seen:
            logits = model(torch.tensor([read]), use_cache=False, logits_to_keep=added).logits[0]
            seen[read] = torch.log_softmax(logits.double(), -1)
        found.append(seen[read][torch.arange(added), torch.tensor(ids[-added:])].sum().item())
    return found


def compare(tapetune, folder, asked, tmp_path, *words, tolerance=2e-3) -> dict:
    details = tmp_path / "details.jsonl"
    seconds = 300 + 5 * len(asked)  # until it counts as stuck
    found = json.loads(tapetune("eval", "choice", folder, "--json", "--details", details, *words, seconds=seconds))
    lines = [json.loads(line) for line in details.read_text().splitlines()]
    assert len(lines) == len(asked)
    # tokenizer.json as it stands: AutoTokenizer builds SmolLM2's anew, without its rule that parts digits from the rest.
    model, tokenizer = peer.load(folder, torch.float32), PreTrainedTokenizerFast.from_pretrained(folder)
    right, peers = {"acc": 0, "acc_norm": 0}, {"acc": 0, "acc_norm": 0, "same": 0, "furthest": 0.0}
    for i, (line, (prompt, choices, answer)) in enumerate(zip(lines, asked)):
        assert line["prompt"] == prompt, f"question {i}"
        assert (line["choices"], line["answer"]) == (choices, answer), f"question {i}"
        theirs = log_likelihoods(model, tokenizer, prompt, choices, found["model_context"])
        assert line["log_likelihoods"] == pytest.approx(theirs, abs=tolerance), f"question {i}"
        norms = [value / len(choice) for value, choice in zip(theirs, choices)]
        for key, values, chosen in (("acc", theirs, line["chosen"]), ("acc_norm", norms, line["chosen_norm"])):
            # Two choices closer than the rounding of either side are both right.
            assert values[chosen] >= max(values) - tolerance, f"question {i}: {chosen} of {values}"
            right[key] += chosen == answer
            peers[key] += values.index(max(values)) == answer
            peers["same"] += values[chosen] == max(values)
        peers["furthest"] = max(peers["furthest"], *(abs(a - b) for a, b in zip(line["log_likelihoods"], theirs)))
    for key, count in right.items():
        assert found["results"][key] == pytest.approx(count / len(asked)), key
    print(f"{len(asked)} questions: {right} right, with transformers {peers}")
    return found


def test_mmlu_equals_transformers(shared, stories260k, tapetune, tmp_path):
    """The model's context is short, so that most questions lose their beginning."""
    folder = shared("data", "bench", "mmlu")
    found = compare(
        tapetune, stories260k, mmlu(folder, 1, 57), tmp_path, "--task", "mmlu", "--data", folder, "--limit", 1
    )
    assert found["shortened"] > 50
    assert [group["name"] for group in found["groups"]] == ["humanities", "social sciences", "STEM", "other"]
    assert [group["questions"] for group in found["groups"]] == [13, 12, 19, 13]


@pytest.mark.parametrize("shots", (0, 3))
def test_arc_equals_transformers(shared, stories260k, shots, tapetune, tmp_path):
    path, train = (shared("data", "bench", "arc", f"ARC-Easy-{split}.json") for split in ("test", "train"))
    asked = arc(path, 30, json.loads(train.read_text())[:shots])
    words = ("--shots", shots, "--shots-from", train) if shots else ()
    compare(tapetune, stories260k, asked, tmp_path, "--task", "arc", "--data", path, "--limit", 30, *words)


@pytest.fixture
def cores():
    """How many to use: more than one where there is much to compute."""
    count = os.cpu_count() if QUESTIONS > 50 else 1
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(1)


@pytest.mark.slow
def test_smollm2_on_mmlu(shared, smollm2, cores, tapetune, tmp_path):
    folder = shared("data", "bench", "mmlu")
    subjects, limit = min(57, QUESTIONS), -(-QUESTIONS // 57)
    names = ",".join(subject_names(folder)[:subjects])
    words = ("--task", "mmlu", "--data", folder, "--limit", limit, "--subjects", names, "--threads", cores)
    compare(tapetune, smollm2, mmlu(folder, limit, subjects), tmp_path, *words)


@pytest.mark.slow
def test_smollm2_on_arc(shared, smollm2, cores, tapetune, tmp_path):
    path = shared("data", "bench", "arc", "ARC-Easy-test.json")
    asked = arc(path, QUESTIONS, [])
    words = ("--task", "arc", "--data", path, "--limit", QUESTIONS, "--threads", cores)
    compare(tapetune, smollm2, asked, tmp_path, *words)
