"""Several processes of this machine as one run, with fake devices, and what becomes of them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 600


def start(arguments, port, index, devices=4, count=2, **more):
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join(path),
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def ended(started):
    """Exit status and output of each, in order."""
    try:
        found = [(each, each.communicate(timeout=DEADLINE_S)[0]) for each in started]
        return [(each.returncode, text) for each, text in found]
    finally:
        for each in started:
            if each.poll() is None:
                each.kill()
                each.wait()


def last_line(text):
    """The last that the program said: gloo, a library of jax, may say more when its buffer goes."""
    return [line for line in text.strip().splitlines() if not line.startswith("[Gloo]")][-1]
