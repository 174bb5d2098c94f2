"""A copy of the launchers in a small repository, and stand-ins for the commands they call."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

OPTIONS = (
    *("--name", "games", "--zone", "us-east5-a", "--type", "v5p-16"),
    *("--bucket", "gs://bucket/x"),
)
QUICK = (*OPTIONS, "--poll-s", "0.2")

UV = """\
#!/bin/sh
# uv: an environment is a folder with two commands.
for last; do :; done
case $1 in
venv) mkdir -p "$last/bin" && printf '#!/bin/sh\\nexit 0\\n' >"$last/bin/python" ;;
pip)
    python=$(printf '%s\\n' "$@" | grep '/bin/python$')
    cp "$STAND_IN/spade-jax" "$(dirname "$python")/spade-jax" ;;
esac
chmod -R u+x "$PWD/.venv/bin" "$HOME/spade_jax/.venv/bin" 2>/dev/null
exit 0
"""

SPADE_JAX = """\
#!/usr/bin/env bash
# spade-jax: does what the next line of STAND_IN/runs-INDEX says, and `finish` when there is none.
index=${HOSTNAME##*-w-}
set -- "$JAX_PLATFORMS" "$JAX_COMPILATION_CACHE_DIR" "$@"
printf '%s\\t' "$index" "$@" >>"$STAND_IN/trains-$index"
echo >>"$STAND_IN/trains-$index"
runs="$STAND_IN/runs-$index"
what=$(head -n 1 "$runs" 2>/dev/null)
sed -i 1d "$runs" 2>/dev/null
echo "step 1/2 of worker $index: ${what:-finish}"
trap 'echo "saved on SIGTERM"; exit 0' TERM
case ${what:-finish} in
hang) while :; do sleep 0.1; done ;;
fail*) exit "${what#fail }" ;;
early) exit 0 ;;
esac
sleep 0.4
while [ $# -gt 0 ] && [ "$1" != --run.dir ]; do shift; done
mkdir -p "$STAND_IN/bucket/${2#gs://bucket/}" && touch "$STAND_IN/bucket/${2#gs://bucket/}/summary.md"
echo "step 2/2 of worker $index"
"""


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def write_command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class StandIn:
    """The repository, the commands on the PATH, and what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cloud"
        self.root = folder / "repository"
        self.bin = folder / "bin"
        self.folder.mkdir()
        self.scenario()
        write_command(self.bin / "uv", UV)
        write_command(self.folder / "spade-jax", SPADE_JAX)
        call = f'exec {sys.executable} -SE {HERE / "gcloud_stand_in.py"} {self.folder} "$@"\n'
        write_command(self.bin / "gcloud", f"#!/bin/sh\n{call}")
        for part in ("launch", "configs"):
            shutil.copytree(ROOT / part, self.root / part)
        for part in ("pyproject.toml", "requirements.txt"):
            shutil.copy(ROOT / part, self.root)
        (self.root / "benchmarks").mkdir()
        (self.root / "kept out").write_text("not in git")
        (self.root / ".gitignore").write_text("kept out\n")
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
            identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
            subprocess.run(["git", *identity, *command], cwd=self.root, check=True)

    def scenario(self, **changes: object) -> None:
        """What goes wrong; see the stand-in."""
        (self.folder / "scenario.json").write_text(json.dumps(changes))

    def happens(self, what: str) -> None:
        """Let something happen at the next call of gcloud; see the stand-in."""
        (self.folder / "happens.new").write_text(what)
        (self.folder / "happens.new").rename(self.folder / "happens")

    def runs(self, index: int, *what: str) -> None:
        """What the successive runs on a worker do."""
        (self.folder / f"runs-{index}").write_text("".join(f"{line}\n" for line in what))

    def trains(self, index: int) -> list[list[str]]:
        """The platform, cache and arguments of each run that was started on a worker."""
        path = self.folder / f"trains-{index}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split("\t")[1:-1] for line in lines]

    def calls(self, *words: str) -> list[list[str]]:
        """The calls of gcloud whose arguments have all these words."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        calls = [json.loads(line) for line in lines]
        return [call for call in calls if all(word in " ".join(call) for word in words)]

    def followed(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start launch/tpu.sh with runs that do not end, and come back when it looks on."""
        for index in range(2):
            self.runs(index, "hang")
        process = self.start("tpu.sh", *(arguments or QUICK))
        wait_for(lambda: len(self.calls("worker.sh status")) >= 3, "the launcher to look on")
        return process

    def environment(self) -> dict[str, str]:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        path = f"{self.bin}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(home), "LC_ALL": "C", "STAND_IN": str(self.folder)}

    def start(self, script: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start a launcher in a session of its own, as a terminal would."""
        return subprocess.Popen(
            ["bash", f"launch/{script}", *arguments],
            cwd=self.root,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *arguments: str) -> tuple[int, str]:
        """Run a launcher to its end; its exit code and what it printed."""
        process = self.start(script, *arguments)
        try:
            output, _ = process.communicate(timeout=100)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output

    def end(self) -> None:
        """End the runs that are still there."""
        for pid in self.folder.glob("worker-*/.spade_jax/pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[StandIn]:
    made = StandIn(tmp_path)
    yield made
    made.end()
