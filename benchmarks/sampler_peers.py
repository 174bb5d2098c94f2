"""Contestants of the sampler benchmark that run in processes and environments of their own."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from sampler_workload import MARK, Timed

HERE = Path(__file__).resolve().parent


class Peer:
    """A process that runs the episodes each time it is told to."""

    def __init__(self, name: str, command: list[str | Path]) -> None:
        """Start it; it loads and compiles until `wait`."""
        self.name = name
        self.description: dict[str, Any] = {}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        # Threads of torch that wait sleep: spinning takes the processor from the other contestants.
        environment = os.environ | {"OMP_WAIT_POLICY": "passive", "JAX_PLATFORMS": "cpu"}
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=HERE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def wait(self) -> None:
        """Wait until it is warm."""
        self.description = self._answer()

    def run(self) -> Timed:
        """Let it play all episodes once."""
        assert self._process.stdin is not None
        print("run", file=self._process.stdin, flush=True)
        return Timed(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        code = self._process.wait()
        self._log.seek(0)
        sys.exit(f"{self.name} ended with code {code}:\n{self._log.read()[-3000:]}")


def transformers(python: Path, source: Path, episodes: Path, *options: str) -> Peer:
    """Start transformers on a Hugging Face folder or a GGUF file."""
    script = HERE / "sampler_transformers.py"
    return Peer("transformers", [python, script, source.resolve(), episodes, *options])


def tunix(python: Path, checkpoint: Path, episodes: Path, *options: str) -> Peer:
    """Start Tunix on a random Qwen3 with the sizes of a converted checkpoint."""
    script, shape = HERE / "sampler_tunix.py", checkpoint.resolve() / "config.json"
    return Peer("tunix", [python, script, shape, episodes, *options])
