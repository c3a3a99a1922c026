"""Ranks of one run, started as a launcher would, each with a hand on it."""

import json
import os
import socket
import subprocess
import time
from pathlib import Path

# CPU builds warn about a GPU that they cannot use, unless none is visible.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

CLOCKS = ("time", "tokens_per_s", "peak_mb", "ranks", "sent_bytes")
PATIENCE = 120  # seconds until something that does not end counts as stuck


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def steps(run):
    """The last step that is in the metrics."""
    try:
        lines = [line for line in (run / "metrics.jsonl").read_text().split("\n")[:-1] if '"loss"' in line]
    except FileNotFoundError:
        return 0
    return json.loads(lines[-1])["step"] if lines else 0


def metrics(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def wait_until(reached, what):
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def stopped(pid):
    """Whether SIGSTOP has stopped a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class Ranks:
    """`words` is the command of every rank; `instead`, `prefix` and `stop_at` are per rank. A rank with a `stop_at`
    (core/moment.h) stops itself there, so that what a test does to it hits that moment on any machine."""

    def __init__(
        self, binary, words, size, port=None, address="127.0.0.1", missing=(), instead=None, prefix=None, stop_at=None
    ):
        self.processes = {}
        for rank in range(size):
            if rank in missing:
                continue
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port or free_port()),
                "OMP_NUM_THREADS": "1",
            }
            if rank in (stop_at or {}):
                environment["TAPETUNE_STOP_AT"] = stop_at[rank]
            port = port or int(environment["MASTER_PORT"])
            command = [*(prefix or {}).get(rank, []), str(binary), *map(str, (instead or {}).get(rank, words))]
            self.processes[rank] = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.communicate()

    def signal(self, rank, number):
        self.processes[rank].send_signal(number)

    def wait_stopped(self, rank):
        """Waits until a rank has stopped itself at its moment."""
        process = self.processes[rank]

        def reached():
            assert process.poll() is None, f"rank {rank} ended before its moment: {process.communicate()[1]}"
            return stopped(process.pid)

        wait_until(reached, f"rank {rank} did not reach its moment")

    def end(self, but=()):
        """Waits for all but these; {rank: (exit code, what it said on stderr)}."""
        ended = {}
        for rank, process in self.processes.items():
            if rank not in but:
                said = process.communicate(timeout=PATIENCE)[1]
                ended[rank] = (process.returncode, said)
        return ended
