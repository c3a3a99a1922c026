"""170 kills (SIGKILL) at named moments of core/moment.h: results are complete or absent, and end up bit for bit the same.
30 of an export are in tests/output_test.cpp, 50 for every method of training in test_cut_off.py."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import models
import numpy
import pytest
import tiny

PATIENCE = 60  # seconds until a process that does not reach its moment counts as stuck


def environment(**more):
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


def kill_at(tapetune, moment, words):
    """Kills the command at the moment; False where it ends before."""
    process = subprocess.Popen(
        [tapetune.path, "-q", *map(str, words)],
        env=environment(TAPETUNE_STOP_AT=moment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + PATIENCE
    while not (found := os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)):
        assert time.monotonic() < end, f"{moment} is not reached"
        time.sleep(0.002)
    if found.si_code != os.CLD_STOPPED:
        said = process.communicate()[1]
        assert process.returncode == 0, said
        return False
    process.kill()
    process.communicate()
    return True


def tree(path):
    """Every file below, or the file itself, with its bytes; nothing where there is none."""
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def partials(folder):
    return [name for name in os.listdir(folder) if ".partial-" in name or ".replaced-" in name or ".removed" in name]


@pytest.fixture(scope="module")
def made(tapetune, tmp_path_factory):
    """A model, tokens, a trained run and a text."""
    scratch = tmp_path_factory.mktemp("kills")
    model = tiny.Case("llama", "gqa", False, "nobias", "default", 1).save(scratch / "model")
    numpy.array(tiny.tokens(4000, 7), dtype=numpy.uint16).tofile(scratch / "data.bin")
    recipe = scratch / "lora.yaml"
    recipe.write_text(
        f"model: {model}\ndata: {scratch / 'data.bin'}\nrun: {scratch / 'run'}\ncontext: 16\n"
        "adapter: {method: lora, rank: 2}\nsteps: 60\nbatch: 2\noptimizer: {lr: 3.0e-3}\ndtype: f32\nsave_every: 2\n"
        "held_out: 0.1\nseed: 3\n"
    )
    tapetune("train", recipe, "--threads", "1")
    return scratch


def one_output(tapetune, folder, words, moments):
    """Kills a command that writes one file or folder at each of these moments; returns how often it was killed."""
    out, reference = folder / "out", folder / "reference" / "out"  # a model card has the name
    reference.parent.mkdir()
    tapetune(*words, "--out", reference)
    expected = tree(reference)
    kills = 0
    for moment in moments:
        if not kill_at(tapetune, moment, [*words, "--out", out]):
            pytest.fail(f"{' '.join(map(str, words))}: ended before {moment}")
        kills += 1
        found = tree(out) if out.exists() else None
        assert found in (None, expected), f"{moment}: neither complete nor absent"
        assert (found is not None) == moment.startswith("committed"), moment
        if found is not None:
            subprocess.run(["rm", "-r", out], check=True)
    tapetune(*words, "--out", out)
    assert tree(out) == expected
    assert not partials(folder)
    return kills


def test_merge(tapetune, made, tmp_path):
    moments = [f"tensor:{n}" for n in range(1, 21)] + [f"file:{n}" for n in range(1, 5)] + ["commit:1", "committed:1"] * 8
    assert one_output(tapetune, tmp_path, ["merge", made / "run"], moments) == 40


def test_pack(tapetune, made, tmp_path):
    corpus = tmp_path / "corpus"
    subprocess.run([sys.executable, models.ROOT / "tools" / "corpus.py", corpus, "--tokens", "40000"], check=True)
    text = (corpus / "train.txt").read_text()
    (corpus / "train.txt").write_text(text * (5_000_000 // len(text)))  # some batches
    moments = [f"batch:{n}" for n in range(1, 4)] * 4 + ["file:1", "commit:1", "committed:1"] * 6
    words = ["data", "pack", corpus / "train.txt", "--model", corpus, "--delimiter", "\n", "--threads", "1"]
    assert one_output(tapetune, tmp_path, words, moments) == 30


def test_train(tapetune, made, tmp_path):
    words = ["train", made / "lora.yaml", f"run={tmp_path / 'run'}", "--threads", "1"]
    checkpoints = tmp_path / "run" / "checkpoints"
    furthest = kills = 0
    source = random.Random(2)
    # How often a moment is passed at most; few enough that most kills come before a process's first checkpoint.
    moments = {"step": 3, "saving": 3, "commit": 2, "committed": 2, "file": 4, "remove": 1, "hash": 1}
    while kills < 60:
        moment = source.choice([name for name in moments if name != "remove" or furthest >= 6])
        if not kill_at(tapetune, f"{moment}:{source.randint(1, moments[moment])}", words):
            pytest.fail("the run ended before 60 kills; give it more steps")
        kills += 1
        names = os.listdir(checkpoints) if checkpoints.exists() else []
        saved = max((int(name[5:]) for name in names if name.startswith("step-")), default=0)
        assert saved >= furthest, "a checkpoint was lost"
        furthest = saved
    tapetune(*words)
    assert tree(tmp_path / "run" / "adapter") == tree(made / "run" / "adapter")
    assert not partials(checkpoints) and not partials(tmp_path / "run")


def test_compare(tapetune, made, tmp_path):
    def words(folder):
        recipes = [made / "lora.yaml", made / "tape.yaml"]
        return ["compare", *recipes, "steps=6", "--runs", folder / "runs", "--out", folder / "out", "--threads", "1"]

    (made / "tape.yaml").write_text(
        (made / "lora.yaml").read_text().replace("{method: lora, rank: 2}", "{method: tape, rank: 2}")
    )
    tapetune(*words(tmp_path / "whole"))
    killed = tmp_path / "killed"
    kills = n = 0
    # Each process gets a little further than the one before it; later ones find most of the work done.
    for n in range(1, 200):
        moment = ("commit", "committed", "file", "step")[n % 4]
        if kill_at(tapetune, f"{moment}:{1 + n // 12}", words(killed)):
            kills += 1
        if kills == 40:
            break
    assert kills == 40
    tapetune(*words(killed))

    def results(folder):
        found = json.loads((folder / "out" / "results.json").read_text())
        return {key: value for key, value in found.items() if key != "cost"}

    assert json.dumps(results(killed)).replace(str(killed), "") == json.dumps(results(tmp_path / "whole")).replace(
        str(tmp_path / "whole"), ""
    )
    for name in ("lora", "tape"):
        assert tree(killed / "runs" / name / "adapter") == tree(tmp_path / "whole" / "runs" / name / "adapter")
    for folder in (killed / "out", killed / "out" / "evaluations", killed / "runs" / "lora", killed / "runs" / "tape"):
        assert not partials(folder)
