"""Two hosts, as network namespaces with a cable between them: training, its traffic, and a cable that is pulled."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy
import pytest
import tiny
from ranks import PATIENCE, metrics, steps, stopped, wait_until

TIMEOUT = 8
ADDRESS = "10.77.0.1"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    def __init__(self, name):
        self.names = [f"{name}{i}" for i in range(2)]
        self.links = [f"veth-{name}" for name in self.names]

    def __enter__(self):
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for i, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            ip("netns", "add", name)
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        self.processes = []
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, binary, words, stop_at=None):
        """`stop_at` is a moment (core/moment.h) at which rank 1 stops itself."""
        self.processes = []
        for rank, name in enumerate(self.names):
            environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
            environment |= {"MASTER_ADDR": ADDRESS, "MASTER_PORT": "29511"}
            if stop_at and rank == 1:
                environment["TAPETUNE_STOP_AT"] = stop_at
            command = ["ip", "netns", "exec", name, str(binary), *map(str, words)]
            self.processes.append(
                subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )

    def end(self):
        said = [process.communicate(timeout=PATIENCE)[1] for process in self.processes]
        return [(process.returncode, text) for process, text in zip(self.processes, said, strict=True)]

    def cable(self, state):
        ip("-n", self.names[1], "link", "set", self.links[1], state)

    def sent(self):
        """Bytes that have left the first host."""
        shown = ["ip", "-n", self.names[0], "-j", "-s", "link", "show", self.links[0]]
        text = subprocess.run(shown, check=True, capture_output=True, text=True).stdout
        return json.loads(text)[0]["stats64"]["tx"]["bytes"]


@pytest.fixture
def hosts(tmp_path):
    with Hosts(f"tt{os.getpid() % 10000}") as both:
        yield both


@pytest.fixture
def recipe(tmp_path):
    numpy.array(tiny.tokens(40000, 7), dtype=numpy.uint16).tofile(tmp_path / "data.bin")
    model = tiny.Case("llama", "gqa", False, "nobias", "default", 1).save(tmp_path / "model")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {model}\ndata: {tmp_path / 'data.bin'}\nrun: {tmp_path / 'run'}\ncontext: 16\nadapter: {{method: full}}\n"
        "steps: 1000000\nbatch: 4\noptimizer: {lr: 1.0e-3}\ndtype: f32\nsave_every: 10\nseed: 3\n"
    )
    return path


def test_traffic(hosts, tapetune, recipe, tmp_path):
    """What the cable carries is what the formulas say, and what packets and buckets' bookkeeping add to it."""
    tapetune("train", recipe, "steps=60", "save_every=0", f"run={tmp_path / 'alone'}")
    hosts.start(tapetune.path, ["train", recipe, "steps=60", "save_every=0", "--timeout", TIMEOUT])
    assert [code for code, _ in hosts.end()] == [0, 0]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert losses == pytest.approx([line["loss"] for line in metrics(tmp_path / "alone")], abs=1e-5)
    counted, carried = sum(line["sent_bytes"] for line in lines), hosts.sent()
    assert counted <= carried < 1.15 * counted + 100_000, f"{counted} counted, {carried} carried"


def test_rank_0_listens_on_the_interface_of_master_addr(hosts, tapetune, recipe):
    hosts.start(tapetune.path, ["train", recipe, "--timeout", TIMEOUT], "step:2")
    wait_until(lambda: stopped(hosts.processes[1].pid), "no step was done")
    lines = Path(f"/proc/{hosts.processes[0].pid}/net/tcp").read_text().splitlines()[1:]
    lines6 = Path(f"/proc/{hosts.processes[0].pid}/net/tcp6").read_text().splitlines()[1:]
    listening = [line.split()[1] for line in lines + lines6 if line.split()[3] == "0A"]
    address = "".join(f"{int(part):02X}" for part in reversed(ADDRESS.split(".")))
    assert f"{address}:{29511:04X}" in listening
    assert {each.split(":")[0] for each in listening} == {address}, listening  # Gloo's own ports too


def test_a_short_cut_is_survived(hosts, tapetune, recipe, tmp_path):
    run = tmp_path / "run"
    hosts.start(tapetune.path, ["train", recipe, "steps=300", "save_every=0", "--timeout", TIMEOUT], "step:6")
    rank = hosts.processes[1]  # `ip netns exec` becomes the program
    wait_until(lambda: stopped(rank.pid), "no step was done")
    hosts.cable("down")
    rank.send_signal(signal.SIGCONT)
    time.sleep(TIMEOUT / 4)
    assert steps(run) in (5, 6, 7), "rank 0 continued without rank 1"
    hosts.cable("up")
    assert [code for code, _ in hosts.end()] == [0, 0]
    assert steps(run) == 300


def test_a_long_cut_ends_both(hosts, tapetune, recipe, tmp_path):
    run = tmp_path / "run"
    hosts.start(tapetune.path, ["train", recipe, "--timeout", TIMEOUT])
    wait_until(lambda: steps(run) > 12, "no step was done")
    hosts.cable("down")
    (first, said), (second, other) = hosts.end()
    assert first == second == 1
    last = [line for line in said.splitlines() if not line.startswith("train ")]
    assert len(last) == 1 and last[0].startswith("error: [ranks] rank 1") and "stopped responding" in last[0], said
    assert "error: [ranks] rank 1: rank 0 does not answer: the network is down" in other
    assert list((run / "checkpoints").glob("step-*"))
