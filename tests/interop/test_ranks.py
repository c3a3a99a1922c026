"""Ranks that are killed, stopped, slow, out of memory, or not of the same run: all end, and rank 0 says who it was."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import tiny
from ranks import PATIENCE, Ranks, free_port, metrics, steps, stopped, wait_until

STEPS = 1_000_000  # more than any test waits for
TIMEOUT = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("base")
    numpy.array(tiny.tokens(40000, 7), dtype=numpy.uint16).tofile(scratch / "data.bin")
    return tiny.Case("llama", "gqa", False, "nobias", "default", 1).save(scratch / "model"), scratch / "data.bin"


@pytest.fixture
def recipe(base, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {base[0]}\ndata: {base[1]}\nrun: {tmp_path / 'run'}\ncontext: 16\nadapter: {{method: tape, rank: 2}}\n"
        f"steps: {STEPS}\nbatch: 4\noptimizer: {{lr: 1.0e-3}}\ndtype: f32\nsave_every: 5\nkeep: 2\nseed: 3\n"
    )
    return path


def command(recipe, *words, timeout=TIMEOUT):
    return ["train", recipe, "--timeout", timeout, *words]


def assert_told(ended, *texts, code=1):
    """Rank 0 said it in one line; the others said nothing, and all ended."""
    for rank, (exit_code, said) in ended.items():
        assert exit_code == code, f"rank {rank}: exit {exit_code}: {said}"
        if rank != 0:
            assert said == "", f"rank {rank} said: {said}"
    lines = [
        line
        for line in ended[0][1].splitlines()
        if not line.startswith(("train ", "note: resuming ", "stopping, ")) and "but the disk has" not in line
    ]
    assert len(lines) == 1, ended[0][1]
    for text in texts:
        assert text in lines[0]


def assert_goes_on(tapetune, recipe, run):
    """The last checkpoint is whole: one process goes on from it."""
    last = max((run / "checkpoints").glob("step-*"))
    step = int(last.name.removeprefix("step-"))
    tapetune("train", recipe, f"run={run}", f"steps={step + 2}")
    assert steps(run) == step + 2


@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_rank(tapetune, recipe, tmp_path, victim):
    run = tmp_path / "run"
    with Ranks(tapetune.path, command(recipe, "shard=base"), 4) as ranks:
        wait_until(lambda: steps(run) > 6, "no step was done")
        ranks.signal(victim, signal.SIGKILL)
        pid = ranks.processes[victim].pid
        ended = ranks.end(but=[victim])
    assert_told(ended, f"[ranks] rank {victim} ({socket.gethostname()}, process {pid}) stopped responding (no heartbeat for 4 s)")
    assert_goes_on(tapetune, recipe, run)


def test_rank_0_is_killed(tapetune, recipe, tmp_path):
    run = tmp_path / "run"
    with Ranks(tapetune.path, command(recipe), 4) as ranks:
        wait_until(lambda: steps(run) > 6, "no step was done")
        ranks.signal(0, signal.SIGKILL)
        ended = ranks.end(but=[0])
    assert all(code == 1 for code, _ in ended.values())
    assert [rank for rank, (_, said) in ended.items() if said] == [1]
    assert "error: [ranks] rank 0 stopped responding" in ended[1][1]
    assert_goes_on(tapetune, recipe, run)


def test_a_stopped_rank(tapetune, recipe, tmp_path):
    run = tmp_path / "run"
    with Ranks(tapetune.path, command(recipe), 4) as ranks:
        wait_until(lambda: steps(run) > 6, "no step was done")
        ranks.signal(2, signal.SIGSTOP)
        begin = time.monotonic()
        ended = ranks.end(but=[2])
        took = time.monotonic() - begin
        assert_told(ended, "[ranks] rank 2", "stopped responding")
        assert took < 4 * TIMEOUT, "they waited much longer than asked to"
        # The others are gone; a rank that wakes up finds that out.
        ranks.signal(2, signal.SIGCONT)
        assert ranks.end()[2][0] == 1
    assert_goes_on(tapetune, recipe, run)


def test_a_rank_that_pauses_is_waited_for(tapetune, recipe, tmp_path):
    run = tmp_path / "run"
    tapetune("train", recipe, "steps=40", f"run={tmp_path / 'alone'}")
    with Ranks(tapetune.path, command(recipe, "steps=40", "save_every=0"), 2, stop_at={1: "step:3"}) as ranks:
        ranks.wait_stopped(1)
        time.sleep(TIMEOUT / 3)  # half of what the others allow
        ranks.signal(1, signal.SIGCONT)
        assert all(code == 0 for code, _ in ranks.end().values())
    losses = [(line["step"], line["loss"]) for line in metrics(run)]
    alone = [(line["step"], line["loss"]) for line in metrics(tmp_path / "alone")]
    assert [step for step, _ in losses] == list(range(1, 41))
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in alone], abs=1e-5)


def test_a_slow_rank(tapetune, recipe, tmp_path):
    """It lives, but is so slow that the others' time runs out."""
    run = tmp_path / "run"
    words = command(recipe, "context=4096", "batch=2", "checkpointing=off")
    with Ranks(tapetune.path, words, 2) as ranks:
        wait_until(lambda: steps(run) > 1, "no step was done")
        step = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
        # So little of its time is left to it that a step takes four times as long as the others wait.
        left = 2 * 4096 / step["tokens_per_s"] / (4 * TIMEOUT)
        end = time.monotonic() + PATIENCE
        while ranks.processes[0].poll() is None and time.monotonic() < end:
            ranks.signal(1, signal.SIGSTOP)
            time.sleep(1 - left)
            ranks.signal(1, signal.SIGCONT)
            time.sleep(left)
        ended = ranks.end()
    code, said = ended[0]
    assert code == 1
    assert "rank 1" in said and ("raise --timeout" in said or "stopped responding" in said), said


def test_out_of_memory(tapetune, recipe, tmp_path):
    """One rank gets little more memory than it has when the first step begins."""
    long = ("context=8000", "positions.scaling=linear", "positions.factor=250")
    words = command(recipe, *long, "batch=8", "micro_batch=4", "checkpointing=off", timeout=60)
    # Rank 1 waits for rank 0, which stops when it has written recipe.yaml.
    with Ranks(tapetune.path, words, 2, stop_at={0: "committed:1"}) as ranks:
        ranks.wait_stopped(0)
        pid = ranks.processes[1].pid
        size = int(next(s for s in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmSize" in s).split()[1])
        room = (size + 20_000) * 1024
        resource.prlimit(pid, resource.RLIMIT_AS, (room, room))
        ranks.signal(0, signal.SIGCONT)
        ended = ranks.end()
    assert_told(ended, "[ranks] rank 1", "failed: [", "memory")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(tapetune, recipe, tmp_path):
    """A checkpoint that does not fit is no reason to stop, but the result must be written: rank 0 says so, all end."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=60k none {small} && exec "$0" "$@"']
    words = command(recipe, f"run={small / 'run'}", "steps=30", "save_every=0")
    with Ranks(tapetune.path, words, 2, prefix={0: mounted}) as ranks:
        ended = ranks.end()
    assert_told(ended, "No space left on device")


def test_other_recipes_data_and_versions(tapetune, recipe, base, tmp_path):
    def ended(**kinds):
        with Ranks(kinds.pop("binary", tapetune.path), command(recipe), 2, **kinds) as ranks:
            return ranks.end()

    assert_told(
        ended(instead={1: command(recipe, "optimizer.lr=0.5")}),
        "[launch] rank 1",
        "a recipe different from rank 0's",
        "lr: 0.5",
        "start all ranks with the same command",
    )
    # The same path, but another file there: of another length, and of the same length.
    other = numpy.fromfile(base[1], dtype=numpy.uint16)
    for change in (other[:-100], other[::-1]):
        file = tmp_path / "other.bin"
        change.tofile(file)
        hidden = ["unshare", "-m", "sh", "-c", f'mount --bind {file} {base[1]} && exec "$0" "$@"']
        if os.geteuid() == 0:
            assert_told(ended(prefix={1: hidden}), "[launch] rank 1", "data different from rank 0's", "copy the same token files")
    # A binary that differs in nothing but its version.
    version = subprocess.run([tapetune.path, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    altered = tmp_path / "altered"
    old, new = version.encode(), (version[:-1] + "7").encode()
    altered.write_bytes(Path(tapetune.path).read_bytes().replace(old + b"\0", new + b"\0"))
    altered.chmod(0o755)
    assert_told(
        ended(prefix={1: ["sh", "-c", f'shift; exec {altered} "$@"', "x"]}),
        "[launch] rank 1",
        "a version of tapetune different from rank 0's",
        new.decode(),
        "install the same everywhere",
    )


def test_an_evaluation_of_something_else(tapetune, base, tmp_path):
    def ended(words, instead):
        with Ranks(tapetune.path, words, 2, instead={1: instead}) as ranks:
            return ranks.end()

    words = ["eval", "perplexity", base[0], "--data", base[1], "--context", 16, "--timeout", TIMEOUT]
    other = tmp_path / "other.bin"
    numpy.fromfile(base[1], dtype=numpy.uint16)[::-1].tofile(other)
    refusal = ["[launch] rank 1", "different from rank 0's", "start all ranks with the same command, on the same files"]
    assert_told(ended(words, [str(other) if word is base[1] else word for word in words]), *refusal)
    assert_told(ended(words, [*words, "--protocol", "blocks"]), "an evaluation", *refusal)
    assert_told(ended(words, [*words, "--method", "lora", "theta=77"]), "a model", *refusal)


def test_an_evaluation_that_loses_a_rank_or_is_stopped(tapetune, base, tmp_path):
    kept = tmp_path / "kept.json"
    words = ["eval", "perplexity", base[0], "--data", base[1], "--context", "64,4096", "--stride", 1, "--protocol", "longlora"]
    words += ["--limit", 5200, "--resume", kept, "--timeout", TIMEOUT]

    def computed(process):
        """Seconds; the start takes half of one."""
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def under_way(number, victim, but=()):
        with Ranks(tapetune.path, words, 3) as ranks:
            wait_until(lambda: all(computed(p) > 2 for p in ranks.processes.values()), "nothing was computed")
            ranks.signal(victim, number)
            return ranks.end(but)

    ended = under_way(signal.SIGTERM, 2)
    assert [code for code, _ in ended.values()] == [3, 3, 3], ended
    assert f"tokens are saved in {kept}" in ended[0][1] and ended[1][1] == ended[2][1] == ""
    first = json.loads(kept.read_text())["perplexity"]["contexts"][0]["windows"]
    assert first > 0
    ended = under_way(signal.SIGKILL, 1, but=[1])
    assert [code for code, _ in ended.values()] == [1, 1], ended
    assert "[ranks] rank 1" in ended[0][1] and "stopped responding" in ended[0][1]
    assert json.loads(kept.read_text())["perplexity"]["contexts"][0]["windows"] >= first


def test_no_rendezvous(tapetune, recipe):
    words = command(recipe, timeout=3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Ranks(tapetune.path, words, 2, port=taken.getsockname()[1], missing=[1]) as ranks:
            code, said = ranks.end()[0]
    assert code == 1 and said.startswith("error: [launch] port ") and "set MASTER_PORT" in said

    with Ranks(tapetune.path, words, 4, missing=[1, 3]) as ranks:
        ended = ranks.end()
    assert "[launch] timed out after 3 s waiting for ranks 1, 3 of 4 at 127.0.0.1:" in ended[0][1]
    assert ended[0][0] == ended[2][0] == 1

    for address in ("no-such-host.invalid", "127.0.0.1"):
        with Ranks(tapetune.path, words, 2, address=address, missing=[0]) as ranks:
            code, said = ranks.end()[1]
        assert code == 1 and f"[launch] rank 1 could not connect to {address}:" in said and "check MASTER_ADDR" in said
        assert len(said.splitlines()) == 1, said


def test_missing_ranks_are_named_while_the_others_wait(tapetune, recipe):
    words = command(recipe, timeout=12)
    with Ranks(tapetune.path, words, 4, missing=[1, 3]) as ranks:
        ended = ranks.end()
    waiting, failed = ended[0][1].splitlines()
    assert waiting.startswith("warning: still waiting for ranks 1, 3 of 4 at 127.0.0.1:"), waiting
    assert "after 10 s" in waiting and "one process for each RANK" in waiting
    assert failed.startswith("error: [launch] timed out after 12 s")

    with Ranks(tapetune.path, words, 3, missing=[0]) as ranks:
        ended = ranks.end()
    waiting, failed = ended[1][1].splitlines()
    assert waiting.startswith("warning: rank 1 of 3 has been waiting for rank 0 at 127.0.0.1:"), waiting
    assert len(ended[2][1].splitlines()) == 1, "one rank says it"

    # What a batch script of Slurm gives to a command without srun: the first task's variables, and no other task.
    slurm = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    slurm |= {"SLURM_JOB_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        list(map(str, [tapetune.path, *words])), env=os.environ | slurm, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    waiting, failed = done.stderr.splitlines()
    assert waiting.startswith("warning: still waiting for rank 1 of 2") and "put srun before tapetune" in waiting, waiting
    assert "put srun before tapetune" in failed


def test_a_signal_stops_all_at_one_step(tapetune, recipe, tmp_path):
    run = tmp_path / "run"
    words = command(recipe, "steps=60", "save_every=0", timeout=60)
    for victim in (0, 1):
        with Ranks(tapetune.path, words, 2, stop_at={victim: "step:5"}) as ranks:
            ranks.wait_stopped(victim)
            ranks.signal(victim, signal.SIGTERM)  # pending until it continues
            ranks.signal(victim, signal.SIGCONT)
            ended = ranks.end()
        assert_told(ended, "interrupted; saved at step", "rerun the same command to resume", code=3)
    with Ranks(tapetune.path, words, 2) as ranks:
        assert all(code == 0 for code, _ in ranks.end().values())
    with Ranks(tapetune.path, [*words, f"run={tmp_path / 'whole'}"], 2) as ranks:
        assert all(code == 0 for code, _ in ranks.end().values())
    assert metrics(run) == metrics(tmp_path / "whole")


def test_forged_words_end_in_one_line(tapetune, recipe, tmp_path):
    """Somebody who reaches the store ends the run, but the terminal gets one line without control characters."""
    from torch.distributed import TCPStore

    port = free_port()
    with Ranks(tapetune.path, command(recipe), 2, port=port, stop_at={1: "step:3"}) as ranks:
        ranks.wait_stopped(1)
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set("tapetune/0/beat/1", "\033]0;owned\007 x")
        ended = ranks.end(but=[1])
    assert_told({0: ended[0]}, "[ranks] rank 1", "sent a heartbeat that is not a number: \\u001b]0;owned\\u0007")


def test_interrupted_while_rank_0_saves(tapetune, recipe, tmp_path):
    """A launcher that sees one rank end may end the others, so that none does before the checkpoint is there."""
    run = tmp_path / "run"
    with Ranks(tapetune.path, command(recipe, "save_every=0"), 2, stop_at={0: "saving:1"}) as ranks:
        wait_until(lambda: steps(run) > 2, "no step was done")
        ranks.signal(0, signal.SIGTERM)
        ranks.wait_stopped(0)
        time.sleep(2)
        assert ranks.processes[1].poll() is None, "rank 1 ended before rank 0 had saved"
        ranks.signal(0, signal.SIGTERM)  # as mpirun and torchrun do where a rank has ended
        ranks.signal(0, signal.SIGCONT)
        ended = ranks.end()
    assert_told(ended, "interrupted; saved at step", code=3)
    assert_goes_on(tapetune, recipe, run)


@pytest.mark.slow
def test_launch_waits_for_a_save_that_takes_long(tapetune, recipe, tmp_path):
    """Rank 0 saves for longer than launch waits for ranks after a failure; an interruption is none."""
    run = tmp_path / "run"
    words = [tapetune.path, "launch", "--nproc", "2", "--", *command(recipe, "save_every=0")]
    environment = os.environ | {"TAPETUNE_STOP_AT": "saving:1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(list(map(str, words)), env=environment, stderr=subprocess.PIPE, text=True) as launcher:
        wait_until(lambda: steps(run) > 2, "no step was done")
        ranks = [int(rank) for rank in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
        launcher.send_signal(signal.SIGTERM)
        wait_until(lambda: any(stopped(rank) for rank in ranks), "nothing was saved")
        saving = next(rank for rank in ranks if stopped(rank))
        time.sleep(17)
        os.kill(saving, signal.SIGCONT)
        said = launcher.communicate(timeout=PATIENCE)[1]
    assert launcher.returncode == 3 and "interrupted; saved at step" in said, said
    assert_goes_on(tapetune, recipe, run)


def test_torchrun_brings_a_run_back(tapetune, recipe, tmp_path):
    """A rank is killed; torchrun restarts all, and the losses continue bit for bit, with four ranks and sharding."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "4"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", "2"]
    torchrun += ["--monitor-interval", "0.2"]
    words = list(map(str, [tapetune.path, *command(recipe, "shard=base", "steps=60", "save_every=7", timeout=20)]))
    whole = subprocess.run([*torchrun, *words, f"run={tmp_path / 'whole'}"], capture_output=True, text=True, timeout=120)
    assert whole.returncode == 0, whole.stderr[-2000:]
    # Rank 2 stops itself in the 12th step of its first two starts, and says which process it is.
    script = tmp_path / "rank"
    script.write_text(
        f"""#!/bin/sh
if [ "$RANK" = 2 ] && [ "$TORCHELASTIC_RESTART_COUNT" -lt 2 ]; then
  echo $$ >"{tmp_path}/pid.part" && mv "{tmp_path}/pid.part" "{tmp_path}/pid-$TORCHELASTIC_RESTART_COUNT"
  export TAPETUNE_STOP_AT=step:12
fi
exec "$@"
"""
    )
    script.chmod(0o755)
    run = tmp_path / "run"
    process = subprocess.Popen([*torchrun, script, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        resumed_at = 0
        for start in range(2):
            file = tmp_path / f"pid-{start}"
            wait_until(file.exists, f"torchrun did not start the ranks, start {start}")
            pid = int(file.read_text())
            wait_until(lambda pid=pid: stopped(pid), f"step {resumed_at + 12} was not reached")
            assert steps(run) >= resumed_at + 11
            os.kill(pid, signal.SIGKILL)
            resumed_at += 7  # the last checkpoint before
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 0, said[-2000:]
    assert metrics(run) == metrics(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["mpirun", "slurm"])
def test_launchers(tapetune, recipe, tmp_path, kind):
    words = list(map(str, [tapetune.path, *command(recipe, "steps=5", "save_every=0")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    if kind == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.fail("mpirun is not there; run tools/setup --full", pytrace=False)
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
        done = subprocess.run([*mpirun, *words], capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        environment |= {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "5", "SLURM_STEP_NODELIST": "127.0.0.1"}
        ranks = [
            subprocess.Popen(
                words, env=environment | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}, stderr=subprocess.PIPE
            )
            for i in range(2)
        ]
        for process in ranks:
            said = process.communicate(timeout=120)[1]
            assert process.returncode == 0, said
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and all(line["ranks"] == 2 for line in lines)


def test_trace_shows_exchange_beside_the_backward(tapetune, recipe, tmp_path):
    trace = tmp_path / "trace.json"
    words = ["context=512", "batch=4", "adapter={method: full}", "steps=4", "save_every=0", "--trace", trace]
    tapetune("launch", "--nproc", "2", "--", *command(recipe, *words))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}
    for event in events:
        assert event["dur"] >= 0 and event["tid"] in ("compute", "exchange")
    own = [event for event in events if event["pid"] == 0]

    def spans(name):
        return [(e["ts"], e["ts"] + e["dur"]) for e in own if e["name"].startswith(name)]

    backward, again, gradients = spans("backward"), spans("layer again"), spans("gradients")
    assert len(backward) == 8 and len(gradients) >= 4 * 3
    # Two micro-batches a step: the first exchanges nothing.
    for begin, end in backward[0::2]:
        assert not any(begin <= at < end for at, _ in gradients)
    for begin, end in backward[1::2]:
        inside = [span for span in gradients if begin <= span[0] < end]
        assert inside
        # The last layer's gradients leave before the first layer is computed again.
        first_layer = max(at for at, _ in again if begin <= at < end)
        assert min(at for at, _ in inside) < first_layer
