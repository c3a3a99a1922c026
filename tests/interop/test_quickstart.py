"""tools/quickstart from beginning to end in small: what it promises to leave, cut off in between and run again."""

import json
import os
import subprocess
import sys

import models

HURRY = ("steps=2", "batch=1", "micro_batch=1", "schedule.warmup=0")


def quickstart(folder, tapetune, **options):
    command = [models.ROOT / "tools" / "quickstart", folder, *HURRY]
    environment = os.environ | {"TAPETUNE_BIN": str(tapetune.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, **options)


def test_the_corpus_reaches_back_from_afar(tmp_path):
    """Always the same, true to itself within a document, and with ties that the base model's context does not reach."""
    for name in ("a", "b"):
        command = [sys.executable, models.ROOT / "tools" / "corpus.py", tmp_path / name, "--tokens", "40000"]
        subprocess.run(command, check=True)
    text = (tmp_path / "a" / "train.txt").read_text()
    assert text == (tmp_path / "b" / "train.txt").read_text()
    assert text != (tmp_path / "a" / "held-out.txt").read_text()
    known = json.loads((tmp_path / "a" / "tokenizer.json").read_text())["model"]["vocab"]
    assert set(text.split()) <= set(known)
    near, far, does = 0, 0, {}
    for village in text.splitlines():
        words, last, surnames = village.split(), {}, {}
        for at in range(0, len(words), 3):
            name, surname, verb = words[at : at + 3]
            assert surnames.setdefault(name, surname) == surname, f"{name} has two surnames in one village"
            assert does.setdefault(name, verb) == verb, f"{name} does two things"
            near += name in last and at - last[name] < 128
            far += name in last and at - last[name] >= 128
            last[name] = at
        assert len(set(surnames.values())) == len(surnames), "two people of a village share a surname"
    assert 0.25 < far / (near + far) < 0.4, f"{far} of {near + far} people were last named from afar"


def test_quickstart_leaves_a_report_a_model_and_a_line(tapetune, tmp_path):
    (tmp_path / "q").mkdir()  # with a choice of the user's own of what is measured
    plan = {"data": str(tmp_path / "q" / "held-out.tokens"), "contexts": [128, 512], "limit": 1100}
    (tmp_path / "q" / "eval.yaml").write_text(json.dumps(plan))
    done = quickstart(tmp_path / "q", tapetune)
    assert done.returncode == 0, done.stderr[-2000:]
    report = tmp_path / "q" / "compare" / "report.html"
    results = json.loads(report.with_name("results.json").read_text())
    names = [entry["name"] for entry in results["entries"]]
    assert names == ["base model", "lora", "longlora", "theta-scaling", "tape"]
    assert results["base_context"] * 4 == results["trained_context"]
    assert report.exists() and str(report) in done.stderr
    assert (tmp_path / "q" / "merged" / "config.json").exists()
    table, written = done.stdout.split(f"report: {report}")
    assert "| tape |" in table and written.strip(), "the merged model wrote nothing"
    again = quickstart(tmp_path / "q", tapetune)
    assert again.returncode == 0 and again.stdout == done.stdout
    assert "training" not in again.stderr
