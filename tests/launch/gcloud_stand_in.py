"""Stands in for `gcloud` in tests of launch/tpu.sh: a queued resource that is a folder.

    gcloud_stand_in.py FOLDER ARGUMENTS...

FOLDER/scenario.json says what goes wrong (see `SCENARIO`); calls.jsonl records every call. Workers
are folders that serve as HOME: `ssh` runs the command there with bash, so launch/worker.sh is
really run, with stand-ins for uv and for the command `spade-jax`.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

SCENARIO = {
    "workers": 2,
    "waiting_looks": 1,  # looks at a new resource before it is active
    "create_errors": [],  # what successive requests are answered with, before they are granted
    "failed_reasons": [],  # of successive resources that end as FAILED
    "describe_errors": 0,  # looks that gcloud cannot answer
    # {"on": part of a command line, "do": "preempt" | "fail worker 1", "times": 1}, taken in turn
    "events": [],
}


def main() -> int:
    folder = Path(sys.argv[1])
    words = [word for word in sys.argv[2:] if word != "--quiet"]
    with (folder / "calls.jsonl").open("a") as file:
        file.write(json.dumps(sys.argv[2:]) + "\n")
    flags, plain = {}, []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            plain.append(word)
        elif word in ("--spot", "--async", "--force"):
            flags[word] = True
        else:
            flags[word] = words.pop(0)
    cloud = Cloud(folder)
    code = cloud.answer(plain, flags)
    cloud.save()
    return code


class Cloud:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scenario = SCENARIO | json.loads((folder / "scenario.json").read_text())
        kept = folder / "cloud.json"
        self.state = json.loads(kept.read_text()) if kept.exists() else {"events": []}

    def save(self) -> None:
        kept = self.folder / f"cloud.json.{os.getpid()}"
        kept.write_text(json.dumps(self.state))
        kept.replace(self.folder / "cloud.json")

    def answer(self, plain: list[str], flags: dict) -> int:
        if plain[0] == "storage":
            return self.storage(plain, flags)
        assert plain[:2] == ["compute", "tpus"], plain
        assert "--zone" in flags, flags
        kind, verb = plain[2:4]
        return getattr(self, f"{kind}_{verb}".replace("-", "_"))(plain[4:], flags)

    def storage(self, plain: list[str], flags: dict) -> int:
        assert plain[1] == "ls", plain
        if plain[2].count("/") == 2:
            return 0 if plain[2] == "gs://bucket" else refuse(f"{plain[2]} not found: 404")
        there = self.folder / "bucket" / plain[2].removeprefix("gs://bucket/")
        return 0 if there.exists() else refuse("One or more URLs matched no objects.")

    def take(self, kind: str):
        """The next of a list of things that go wrong, once each."""
        left = self.state.setdefault(kind, list(self.scenario[kind]))
        return left.pop(0) if left else None

    def queued_resources_create(self, plain: list[str], flags: dict) -> int:
        if error := self.take("create_errors"):
            return refuse(error)
        if "resource" in self.state:
            return refuse("ALREADY_EXISTS: the resource already exists")
        assert flags["--node-id"] == plain[0]
        reason = self.take("failed_reasons")
        self.state["resource"] = {
            "type": flags["--accelerator-type"],
            "state": "FAILED" if reason else "WAITING_FOR_RESOURCES",
            "reason": reason,
            "looks": self.scenario["waiting_looks"],
        }
        return 0

    def queued_resources_describe(self, plain: list[str], flags: dict) -> int:
        errors = self.state.setdefault("describe_errors", self.scenario["describe_errors"])
        if errors:
            self.state["describe_errors"] -= 1
            return refuse("ERROR: (gcloud) There was a problem refreshing your current auth tokens")
        resource = self.state.get("resource")
        if resource is None:
            return refuse(f"ERROR: NOT_FOUND: Resource {plain[0]} was not found")
        form = flags["--format"]
        if "failedData" in form:
            print(resource["reason"])
        elif "acceleratorType" in form:
            print(f"projects/p/locations/z/acceleratorTypes/{resource['type']}")
        else:
            if resource["state"] == "WAITING_FOR_RESOURCES":
                resource["looks"] -= 1
                if resource["looks"] < 0:
                    resource["state"] = "ACTIVE"
                    for index in range(self.scenario["workers"]):
                        (self.folder / f"worker-{index}").mkdir()
            print(resource["state"])
        return 0

    def queued_resources_delete(self, plain: list[str], flags: dict) -> int:
        assert "--force" in flags
        self.end_workers()
        self.state.pop("resource", None)
        return 0

    def end_workers(self) -> None:
        for home in self.folder.glob("worker-*"):
            pid = home / ".spade_jax" / "pid"
            if pid.exists():
                kill(int(pid.read_text()))
            shutil.rmtree(home)

    def tpu_vm_describe(self, plain: list[str], flags: dict) -> int:
        active = self.state.get("resource", {}).get("state") == "ACTIVE"
        if not active:
            return refuse("ERROR: NOT_FOUND: no such node")
        count = self.scenario["workers"]
        addresses = ";".join(f"10.0.0.{index}" for index in range(count))
        print(addresses if "ipAddress" in flags["--format"] else "READY")
        return 0

    def event(self, text: str) -> str | None:
        left = self.state.setdefault("event_list", list(self.scenario["events"]))
        if left and left[0]["on"] in text:
            first = left[0]
            first["times"] = first.get("times", 1) - 1
            if first["times"] <= 0:
                left.pop(0)
            return first["do"]
        return None

    def tpu_vm_scp(self, plain: list[str], flags: dict) -> int:
        source, target = plain
        assert target.endswith(":")
        assert flags["--worker"] == "all"
        for home in self.folder.glob("worker-*"):
            shutil.copy(source, home / Path(source).name)
        return 0

    def tpu_vm_ssh(self, plain: list[str], flags: dict) -> int:
        event = self.event(flags["--command"])
        if event == "preempt":
            self.end_workers()
            self.state["resource"]["state"] = "SUSPENDED"
        if self.state.get("resource", {}).get("state") != "ACTIVE":
            return refuse("ssh: connect to host 10.0.0.0 port 22: Connection timed out")
        self.save()  # what a long command sees of the others' changes it reads itself
        which = flags["--worker"]
        indices = range(self.scenario["workers"]) if which == "all" else [int(which)]
        processes = []
        for index in indices:
            command = "exit 255" if event == f"fail worker {index}" else flags["--command"]
            home = self.folder / f"worker-{index}"
            environment = os.environ | {
                "HOME": str(home),
                "HOSTNAME": f"t1v-n-0a1b2c3d-w-{index}",
                "STAND_IN": str(self.folder),
            }
            processes.append(subprocess.Popen(["bash", "-c", command], cwd=home, env=environment))
        codes = [process.wait() for process in processes]
        self.state = json.loads((self.folder / "cloud.json").read_text())
        return max(codes)


def refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
