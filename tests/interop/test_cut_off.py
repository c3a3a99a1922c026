"""Runs that are cut off at any moment: they go on, and end bit for bit as one that never was."""

import itertools
import json
import os
import random
import signal
import struct
import subprocess
import time

import numpy
import pytest
import tiny

METHODS = {
    "lora": "{method: lora, rank: 2, dropout: 0.1}\ntrain_also: [embeddings, norms]",
    "longlora": "{method: longlora, rank: 2}",
    "theta-scaling": "{method: theta-scaling, rank: 2}",
    "tape": "{method: tape, rank: 2, random_offset: true}",
    "full": "{method: full}",
}
STEPS, KEEP = 280, 2
# Where a kill hits, in turns; 50 in all: before the first step, between steps, among the files of a checkpoint, and while
# an old checkpoint is removed.
MOMENTS = ["start", "step", "write", "step", "write", "clear", "step", "write", "step", "write"] * 5
CLOCKS = ("time", "tokens_per_s", "peak_mb")  # all other metrics must be the same
TENSORS = {"adapter_model.safetensors", "optimizer.safetensors"}
CHECKPOINT = TENSORS | {"adapter_config.json", "tapetune.json", "state.json", "hashes.json"}
RUN = {"recipe.yaml", "inputs.json", "machines.json", "metrics.jsonl", "train.log", "events.out.tfevents.3.tapetune"}
RUN |= {"checkpoints", "adapter", "lock"}
PATIENCE = 60  # seconds until a run that shows nothing new counts as stuck


def listed(folder):
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


class Run:
    """One run folder, and the process that trains there."""

    def __init__(self, tapetune, recipe, folder):
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        self.command = [str(tapetune.path), "train", str(recipe), f"run={folder}", "--threads", "1"]
        self.process = None

    def start(self, moment=None):
        """Starts a process; one that stops itself at a moment (core/moment.h) waits there to be killed."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"TAPETUNE_STOP_AT": moment} if moment else {})
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )

    def stop(self, number):
        """Sends a signal; the exit code and what was said."""
        self.process.send_signal(number)
        said = self.process.communicate(timeout=PATIENCE)[1]
        return self.process.returncode, said

    def finish(self):
        self.start()
        said = self.process.communicate(timeout=300)[1]
        assert self.process.returncode == 0, f"exit {self.process.returncode}: {said[-2000:]}"

    def reached(self):
        """Waits until the process has stopped at its moment."""
        end = time.monotonic() + PATIENCE
        while True:
            found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found:
                assert found.si_code == os.CLD_STOPPED, f"it ended before its moment: {self.process.communicate()[1]}"
                return
            assert time.monotonic() < end, "the run shows nothing new"
            time.sleep(0.002)

    def steps(self):
        """The last step that is in the metrics."""
        lines = [line for line in (self.folder / "metrics.jsonl").read_text().split("\n")[:-1] if '"loss"' in line]
        return json.loads(lines[-1])["step"] if lines else 0

    def names(self):
        return listed(self.checkpoints)

    def visible(self):
        return sorted(name for name in self.names() if name.startswith("step-"))

    def partial(self):
        return [name for name in self.names() if name.startswith(".step-") and ".partial-" in name]

    def saved(self):
        """The step that a new process goes on from."""
        visible = self.visible()
        return int(visible[-1].removeprefix("step-")) if visible else 0

    def metrics(self):
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]

    def result(self):
        """The bytes of the adapter and of the last checkpoint, but for the size of the metrics, which has clocks in it."""
        files = {f"adapter/{file.name}": file.read_bytes() for file in (self.folder / "adapter").iterdir()}
        last = self.checkpoints / self.visible()[-1]
        files |= {file.name: file.read_bytes() for file in last.iterdir()}
        state, hashes = json.loads(files.pop("state.json")), json.loads(files.pop("hashes.json"))
        assert set(hashes) == CHECKPOINT - {"hashes.json"}
        return files | {"state": {key: value for key, value in state.items() if not key.endswith("_bytes")}}


def assert_whole(run):
    """Whatever a kill left, every checkpoint that can be seen is complete, and the metrics reach as far as it says."""
    for name in run.visible():
        folder = run.checkpoints / name
        assert set(os.listdir(folder)) == CHECKPOINT, f"{name} is not whole"
        for file in TENSORS:
            data = (folder / file).read_bytes()
            (length,) = struct.unpack("<Q", data[:8])
            header = json.loads(data[8 : 8 + length])
            end = max(entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__")
            assert len(data) == 8 + length + end, f"{name}/{file} is cut short"
        state = json.loads((folder / "state.json").read_text())
        assert f"step-{state['step']:08}" == name
        assert (run.folder / "metrics.jsonl").stat().st_size >= state["metrics_bytes"]


def start_until(run, moment, source):
    """Starts a process that stops at the moment at which a signal is to reach it."""
    times = {"start": 1, "step": source.randint(1, 4), "write": source.randint(1, 3), "clear": 1}
    names = {"start": "commit", "step": "step", "write": "saving", "clear": "remove"}
    run.start(f"{names[moment]}:{times[moment]}")
    run.reached()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model's folder, and a file of tokens."""
    scratch = tmp_path_factory.mktemp("base")
    numpy.array(tiny.tokens(4000, 7), dtype=numpy.uint16).tofile(scratch / "data.bin")
    return tiny.Case("llama", "gqa", False, "nobias", "default", 1).save(scratch / "model"), scratch / "data.bin"


@pytest.fixture(scope="module", params=METHODS)
def whole(request, base, tapetune, tmp_path_factory):
    """The name of a method, a recipe of it, and a run that nothing disturbed."""
    scratch = tmp_path_factory.mktemp(request.param)
    recipe = scratch / "recipe.yaml"
    recipe.write_text(
        f"model: {base[0]}\ndata: {base[1]}\nrun: {scratch / 'whole'}\ncontext: 16\nadapter: {METHODS[request.param]}\n"
        f"steps: {STEPS}\nbatch: 2\noptimizer: {{lr: 3.0e-3}}\nschedule: {{kind: cosine, warmup: 10}}\ndtype: f32\n"
        f"save_every: 3\nkeep: {KEEP}\nheld_out: 0.1\neval_every: 4\neval_windows: 2\nseed: 3\n"
    )
    run = Run(tapetune, recipe, scratch / "whole")
    run.command.append("save_every=0")  # how often it is saved decides nothing
    run.finish()
    assert run.metrics()[-2]["step"] == STEPS
    return request.param, recipe, run


@pytest.mark.slow
def test_killed_at_fifty_moments(whole, tapetune, tmp_path):
    method, recipe, undisturbed = whole
    run = Run(tapetune, recipe, tmp_path / "run")
    source = random.Random(method)
    within_write = furthest = 0
    for moment in MOMENTS:
        start_until(run, moment, source)
        code, said = run.stop(signal.SIGKILL)
        assert code == -signal.SIGKILL, said[-2000:]
        within_write += moment == "write" and bool(run.partial())
        assert_whole(run)
        assert run.saved() >= furthest, "a checkpoint was lost"
        furthest = run.saved()
    assert len(MOMENTS) == 50 and within_write == MOMENTS.count("write"), "or the test would show nothing"
    run.finish()
    assert run.metrics() == undisturbed.metrics()
    assert run.result() == undisturbed.result()
    assert set(os.listdir(run.folder)) == RUN, "something is left of what was cut off"
    assert set(run.names()) == set(run.visible()) and len(run.visible()) == KEEP


def test_stopped_by_signals(whole, tapetune, tmp_path):
    """SIGTERM and Ctrl-C, also within the writing of a checkpoint: exit 3 with everything saved."""
    method, recipe, undisturbed = whole
    run = Run(tapetune, recipe, tmp_path / "run")
    source = random.Random(method)
    for number, moment in itertools.product((signal.SIGTERM, signal.SIGINT), ("step", "write")):
        before = run.saved()
        start_until(run, moment, source)
        run.process.send_signal(number)  # pending until it continues
        code, said = run.stop(signal.SIGCONT)
        assert code == 3, f"exit {code}: {said[-2000:]}"
        assert run.saved() == run.steps() > before, "a step was lost"
        assert said.splitlines()[-1] == (
            f"interrupted; saved at step {run.saved()} of {STEPS}; rerun the same command to resume"
        )
        assert not run.partial()
        assert_whole(run)
    run.finish()
    assert run.metrics() == undisturbed.metrics()
    assert run.result() == undisturbed.result()


@pytest.mark.parametrize("whole", ["lora"], indirect=True)
def test_tensorboard_reads_each_step_once(whole, tapetune, tmp_path):
    """Steps that are done again after a kill replace those that were lost, and a record that was cut off hides none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, recipe, undisturbed = whole
    run = Run(tapetune, recipe, tmp_path / "run")
    for step in (5, 7):  # the second process resumes from step 3
        run.start(f"step:{step}")
        run.reached()
        run.stop(signal.SIGKILL)
    (events,) = run.folder.glob("events.out.tfevents.*")
    with events.open("ab") as file:
        file.write(struct.pack("<Q", 40) + b"cut")
    run.finish()
    read = EventAccumulator(str(run.folder), size_guidance={"scalars": 0}).Reload()
    for tag, key in (("loss", "loss"), ("grad_norm", "grad_norm"), ("eval_loss", "eval_loss")):
        expected = [(line["step"], line[key]) for line in undisturbed.metrics() if key in line]
        found = [(event.step, event.value) for event in read.Scalars(tag)]
        assert [step for step, _ in found] == [step for step, _ in expected], tag
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6), tag
