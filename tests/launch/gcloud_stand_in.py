"""Stands in for `gcloud` in tests of launch/tpu.sh: a queued resource that is a folder.

    gcloud_stand_in.py FOLDER ARGUMENTS...

FOLDER/scenario.json says what goes wrong (see `SCENARIO`); calls.jsonl records every call. What is
in FOLDER/happens (see `Cloud.happen`) happens at the next call, and while there is FOLDER/outage no
call gets through. Workers are folders that serve as HOME: `ssh` runs the command there with bash,
so launch/worker.sh is really run, with stand-ins for uv and for the command `spade-jax`.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

SCENARIO = {
    "workers": 2,
    "waiting_looks": 1,  # looks at a new resource before it is active
    "deleting_looks": 0,  # looks at one that was deleted before it is no more
    "create_errors": [],  # what successive requests are answered with, before they are granted
    "delete_errors": [],  # the same of requests to delete
    "failed_reasons": [],  # of successive resources that end as FAILED
    "describe_errors": 0,  # looks that gcloud cannot answer
    "storage_errors": [],  # parts of bucket URLs: each makes one command on such an URL fail
    # {"on": part of a command line, "do": see `Cloud.happen`, "times": 1}, taken in turn
    "events": [],
}
ALONE = ("--spot", "--async", "--force")  # flags without a value


def main() -> int:
    folder = Path(sys.argv[1])
    with (folder / "calls.jsonl").open("a") as file:
        file.write(json.dumps(sys.argv[2:]) + "\n")
    if (folder / "outage").exists():
        return refuse("ERROR: (gcloud) Failed to establish a connection: Network is unreachable")
    words = [word for word in sys.argv[2:] if word != "--quiet"]
    flags, plain = {}, []
    while words:
        word, _, value = words.pop(0).partition("=")
        if not word.startswith("--"):
            plain.append(word)
        else:
            flags[word] = True if word in ALONE else value or words.pop(0)
    cloud = Cloud(folder)
    with cloud.locked():
        cloud.event(" ".join(sys.argv[2:]))
        answer = cloud.answer(plain, flags)
    return answer() if callable(answer) else answer


class Cloud:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scenario = SCENARIO | json.loads((folder / "scenario.json").read_text())
        self.state: dict = {}
        self.failing = -1  # the worker on which this command fails

    @contextlib.contextmanager
    def locked(self):
        """Keep other calls out, and take over what they did before."""
        kept = self.folder / "cloud.json"
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.state = json.loads(kept.read_text()) if kept.exists() else {}
            yield
            kept.write_text(json.dumps(self.state))

    def answer(self, plain: list[str], flags: dict) -> int | Callable[[], int]:
        """The exit status; of a command that may take long and keeps nobody out, how to get it."""
        if plain[0] == "storage":
            part = self.next("storage_errors")
            if part and part in plain[-1]:
                self.take("storage_errors")
                return refuse("ERROR: (gcloud.storage) Connection reset by peer")
            return getattr(self, f"storage_{plain[1]}")(plain[2:])
        assert plain[:2] == ["compute", "tpus"], plain
        assert "--zone" in flags, flags
        kind, verb = plain[2:4]
        return getattr(self, f"{kind}_{verb}".replace("-", "_"))(plain[4:], flags)

    def event(self, text: str) -> None:
        """Let happen what this call brings about."""
        asked = self.folder / "happens"
        if asked.exists():
            self.happen(asked.read_text())
            asked.unlink()
        event = self.next("events")
        if event and event["on"] in text:
            self.state["times"] = self.state.get("times", 0) + 1
            if self.state["times"] == event.get("times", 1):
                self.take("events")
                self.state["times"] = 0
            self.happen(event["do"])

    def happen(self, what: str) -> None:
        """`preempt`: the resource is suspended, its machines are gone. `node STATE`: they are gone,
        the resource is still called active and its node STATE, or there is no node if that is GONE.
        `die N`: worker N is gone and nothing says so. `fail worker N`: this command fails on it.
        `mute N`: the next N connections to workers do not come about. `delete`: somebody deletes
        the resource. `ask WHAT`: somebody asks in the bucket for what --stop or --delete does.
        """
        word, _, rest = what.partition(" ")
        resource = self.state.get("resource", {})
        if word == "preempt":
            self.end_workers()
            resource["state"] = "SUSPENDED"
        elif word == "node":
            self.end_workers()
            resource["node"] = rest
        elif word == "die":
            self.end_workers(f"worker-{rest}")
        elif word == "mute":
            self.state["mute"] = int(rest)
        elif word == "delete":
            self.queued_resources_delete([], {"--force": True})
        elif word == "ask":
            request = self.place(f"gs://bucket/x/asked/games/20990101T000000Z-{rest}-1")
            request.parent.mkdir(parents=True, exist_ok=True)
            request.touch()
        elif word == "fail":
            self.failing = int(rest.removeprefix("worker "))
        else:
            assert word == "nothing", what

    def storage_ls(self, urls: list[str]) -> int:
        (url,) = urls
        if url.count("/") == 2:
            return 0 if url == "gs://bucket" else refuse(f"{url} not found: 404")
        there = self.place(url)
        if not there.exists():
            return refuse("ERROR: (gcloud.storage.ls) One or more URLs matched no objects.")
        for path in sorted(there.iterdir()) if there.is_dir() else [there]:
            print(f"gs://bucket/{path.relative_to(self.folder / 'bucket')}")
        return 0

    def storage_cp(self, urls: list[str]) -> int:
        source, target = urls
        assert source == "-"
        self.place(target).parent.mkdir(parents=True, exist_ok=True)
        self.place(target).write_text(sys.stdin.read())
        return 0

    def place(self, url: str) -> Path:
        return self.folder / "bucket" / url.removeprefix("gs://bucket/")

    def next(self, kind: str):
        """What is left of a list of things that go wrong begins with it."""
        return next(iter(self.scenario[kind][self.state.get(kind, 0) :]), None)

    def take(self, kind: str):
        """The next of a list of things that go wrong, once each."""
        found = self.next(kind)
        self.state[kind] = self.state.get(kind, 0) + 1
        return found

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
            "node": "GONE",
            "reason": reason,
            "looks": self.scenario["waiting_looks"],
        }
        return 0

    def queued_resources_describe(self, plain: list[str], flags: dict) -> int:
        looked = self.state["describe_errors"] = self.state.get("describe_errors", 0) + 1
        if looked <= self.scenario["describe_errors"]:
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
            resource["looks"] -= 1
            if resource["state"] == "WAITING_FOR_RESOURCES" and resource["looks"] < 0:
                resource |= {"state": "ACTIVE", "node": "READY"}
                for index in range(self.scenario["workers"]):
                    (self.folder / f"worker-{index}").mkdir()
            elif resource["state"] == "DELETING" and resource["looks"] < 0:
                del self.state["resource"]
            print(resource["state"])
        return 0

    def queued_resources_delete(self, plain: list[str], flags: dict) -> int:
        assert "--force" in flags
        if error := self.take("delete_errors"):
            return refuse(error)
        self.end_workers()
        looks = self.scenario["deleting_looks"]
        if looks and "resource" in self.state:
            self.state["resource"] |= {"state": "DELETING", "node": "GONE", "looks": looks}
        else:
            self.state.pop("resource", None)
        return 0

    def end_workers(self, names: str = "worker-*") -> None:
        for home in self.folder.glob(names):
            pid = home / ".spade_jax" / "pid"
            if pid.exists():
                kill(int(pid.read_text()))
            home.rename(gone := home.with_name(f"gone-{time.monotonic_ns()}"))
            shutil.rmtree(gone, ignore_errors=True)  # what still runs there may write

    def node(self) -> str:
        resource = self.state.get("resource", {})
        return resource["node"] if resource.get("state") == "ACTIVE" else "GONE"

    def tpu_vm_describe(self, plain: list[str], flags: dict) -> int:
        if self.node() == "GONE":
            return refuse("ERROR: NOT_FOUND: no such node")
        count = self.scenario["workers"]
        addresses = ";".join(f"10.0.0.{index}" for index in range(count))
        print(addresses if "ipAddress" in flags["--format"] else self.node())
        return 0

    def tpu_vm_scp(self, plain: list[str], flags: dict) -> int:
        source, target = plain
        assert target.endswith(":")
        assert flags["--worker"] == "all"
        homes = [self.folder / f"worker-{index}" for index in range(self.scenario["workers"])]
        for home in homes:
            if home.exists():
                shutil.copy(source, home / Path(source).name)
        return 0 if all(home.exists() for home in homes) else refuse("scp: Connection timed out")

    def tpu_vm_ssh(self, plain: list[str], flags: dict) -> int | Callable[[], int]:
        if self.node() != "READY":
            return refuse("ssh: connect to host 10.0.0.0 port 22: Connection timed out")
        if self.state.get("mute"):
            self.state["mute"] -= 1
            return refuse("ssh: connect to host 10.0.0.0 port 22: No route to host")
        which = flags["--worker"]
        indices = range(self.scenario["workers"]) if which == "all" else [int(which)]
        return lambda: self.run(indices, flags["--command"])

    def run(self, indices: Iterable[int], command: str) -> int:
        processes, codes = [], []
        for index in indices:
            home = self.folder / f"worker-{index}"
            if index == self.failing or not home.exists():
                codes.append(255)
                continue
            environment = os.environ | {
                "HOME": str(home),
                "HOSTNAME": f"t1v-n-0a1b2c3d-w-{index}",
                "STAND_IN": str(self.folder),
            }
            processes.append(subprocess.Popen(["bash", "-c", command], cwd=home, env=environment))
        return max(codes + [process.wait() for process in processes])


def refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
