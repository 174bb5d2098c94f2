"""launch/gpu.sh and launch/gpu_check.sh against stand-ins for nvidia-smi and the environment's own
commands: what is wrong with a driver is said, and no failure is missing from the line of JSON."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.launch.conftest import write_command

TWO = "0, NVIDIA H200, 570.86.15, 143771 MiB\n1, NVIDIA H200, 570.86.15, 143771 MiB\n"
OLD = "0, Tesla V100, 470.57.02, 16160 MiB\n"

PYTHON = """\
#!/usr/bin/env bash
# python of the environment; the stages do as STAND_IN/stages says.
case "$*" in
*"import spade_jax"*) exit 0 ;;
*launch/gpu_check.py*) exec {python} "$@" ;;
*local_device_count*) echo "$(cat "$STAND_IN/seen") NVIDIA H200"; exit 0 ;;
*device_kind*) stage=device ;;
*"-m pytest"*) stage=tests ;;
*spade_jax.cli*) stage=tiny_run ;;
*sampler.py*) stage=sampler ;;
*learner.py*) stage=learner ;;
esac
echo "$stage $CUDA_VISIBLE_DEVICES $JAX_PLATFORMS $*" >>"$STAND_IN/ran"
. "$STAND_IN/stages"
"$stage"
"""

STAGES = """\
device() { echo "gpu | NVIDIA H200 | 0.10.2 | 512.0"; }
tests() { echo "====== 7 passed, 2 skipped, 90 deselected in 3.21s ======"; }
tiny_run() {
    run=runs/gpu_check/tiny
    mkdir -p "$run"
    echo '{"progress/step": 3, "time/step_s": 1.5, "loss/agent": 0.1}' >"$run/metrics.jsonl"
    touch "$run/summary.md"
}
sampler() { echo "some words"; echo '{"tokens_per_s": 9000}'; }
learner() { echo '{"tokens_per_s": 7000}'; }
"""


class Gpus:
    """A machine with GPUs: the repository, the environment in it, and nvidia-smi."""

    def __init__(self, stand_in: Any, answer: str = TWO, code: int = 0) -> None:
        self.stand_in = stand_in
        (stand_in.folder / "answer").write_text(answer)
        cat = f"cat {stand_in.folder}/answer"
        write_command(stand_in.bin / "nvidia-smi", f"#!/bin/sh\n{cat}\nexit {code}\n")
        self.stages("")
        self.seen(2)
        python = PYTHON.replace("{python}", sys.executable)
        write_command(stand_in.folder / "python", python)
        uv = (stand_in.bin / "uv").read_text()
        uv = uv.replace(
            'cp "$STAND_IN/spade-jax"', 'cp "$STAND_IN/python" "$python"; cp "$STAND_IN/spade-jax"'
        )
        write_command(stand_in.bin / "uv", uv)
        spade_jax = '#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $JAX_PLATFORMS $*"\n'
        write_command(stand_in.folder / "spade-jax", spade_jax)
        for name in ("sampler", "learner"):
            (stand_in.root / "benchmarks" / f"{name}.py").write_text("")

    def stages(self, changes: str) -> None:
        (self.stand_in.folder / "stages").write_text(STAGES + changes)

    def seen(self, count: int) -> None:
        (self.stand_in.folder / "seen").write_text(str(count))

    def check(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        code, output = self.stand_in.run("gpu_check.sh", *arguments)
        (line,) = [line for line in output.splitlines() if line.startswith('{"ok"')]
        return code, json.loads(line)


def test_runs_on_all_gpus_with_the_extra(stand_in: Any):
    Gpus(stand_in)
    code, output = stand_in.run("gpu.sh", "--config", "configs/micro.py", "--run.steps", "2")
    assert code == 0, output
    assert "GPU 1, NVIDIA H200, 570.86.15" in output
    assert "0,1 cuda train configs/micro.py --run.dir runs/micro --run.steps 2" in output
    assert (stand_in.root / ".venv" / "spade-jax-installed-cuda").exists()


SLURM_RUN = """\
#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES $JAX_PLATFORMS $*"
while [ $# -gt 0 ]; do
    [ "$1" != --run.dir ] || folder=$2
    shift
done
. "$STAND_IN/run"
"""


def slurm(
    stand_in: Any, run: str, *arguments: str, restarts: int = 0, state: str = "RUNNING"
) -> tuple[int, str, str]:
    """Do as Slurm does: call a copy of the script elsewhere, whose job has one GPU. `run` is what
    the run does in its `$folder`. The exit code, what was printed, and how scontrol was called.
    """
    Gpus(stand_in).seen(1)
    write_command(stand_in.folder / "spade-jax", SLURM_RUN)
    (stand_in.folder / "run").write_text(run)
    script = (stand_in.root / "launch" / "slurm.sbatch").read_text()
    (stand_in.folder / "slurm_script").write_text(script)
    asked = stand_in.folder / "scontrol"
    asked.write_text("")
    write_command(stand_in.bin / "srun", '#!/bin/sh\nexec "$@"\n')
    answer = (
        f'if [ "$1" = show ]; then echo "JobId=7 JobState={state}"; else echo "$*" >>{asked}; fi'
    )
    write_command(stand_in.bin / "scontrol", f"#!/bin/sh\n{answer}\n")
    given = {"SLURM_SUBMIT_DIR": str(stand_in.root), "SLURM_JOB_ID": "7"}
    given |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    done = subprocess.run(
        ["bash", "slurm_script", "configs/micro.py", *arguments],
        cwd=stand_in.folder,
        env=stand_in.environment() | given | {"CUDA_VISIBLE_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr, asked.read_text()


FINISH = 'mkdir -p "$folder" && touch "$folder/summary.md"'


def test_the_example_for_slurm_ends_with_the_run(stand_in: Any):
    code, output, asked = slurm(stand_in, FINISH, "--run.steps", "2")
    assert (code, asked) == (0, ""), output
    expected = "1 cuda train configs/micro.py --run.steps 2 --run.dir runs/slurm-7 --resume-if-any"
    assert expected in output


@pytest.mark.parametrize(
    ("run", "restarts", "code", "requeued"),
    [
        ("exit 0", 0, 0, True),  # told to stop, since its time is up
        ("exit 0", 99, 0, True),
        ("exit 143", 0, 0, True),  # before it could listen
        ("exit 75", 0, 0, True),
        ("exit 75", 20, 75, False),
        ("exit 2", 0, 2, False),
        ("exit 3", 0, 3, False),
        ("exit 1", 0, 1, False),
        ("exit 137", 0, 137, False),
    ],
)
def test_the_example_for_slurm_is_requeued_until_the_run_is_done(
    stand_in: Any, run: str, restarts: int, code: int, requeued: bool
):
    found, output, asked = slurm(stand_in, run, restarts=restarts)
    assert found == code, output
    assert asked == ("requeue 7\n" if requeued else "")
    assert ("requeued, and then resumed" in output) == requeued


def test_the_example_for_slurm_stays_cancelled(stand_in: Any):
    code, output, asked = slurm(stand_in, "exit 0", state="CANCELLED")
    assert (code, asked) == (0, ""), output


@pytest.mark.parametrize("option", [("--run.dir", "runs/mine"), ("--run.dir=runs/mine",)])
def test_the_example_for_slurm_looks_into_the_folder_it_is_given(
    stand_in: Any, option: tuple[str, ...]
):
    code, output, asked = slurm(stand_in, FINISH, *option)
    assert (code, asked) == (0, ""), output
    assert "--run.dir runs/mine --resume-if-any" in output
    code, output, asked = slurm(stand_in, FINISH, "--run.dir", "gs://bucket/x")
    assert (code, asked) == (1, "")
    assert "needs a folder that it can look into" in output


@pytest.mark.parametrize(
    ("given", "seen", "said"),
    [
        (("--gpus", "1"), 1, "0 cuda train configs/tiny.py --run.dir runs/tiny"),
        (("--gpus", "1,0", "--run.dir", "x"), 2, "1,0 cuda train configs/tiny.py --run.dir x"),
        (("--gpus", "all"), 1, "jax sees 1 GPU(s) of the 2 chosen (0,1)"),
        (("--gpus", "3"), 2, "--gpus 3: this machine has 2"),
        (("--gpus", "0,4"), 2, "there is no GPU 4"),
        (("--gpus", "some"), 2, "expected all, a number of GPUs"),
        (("--config", "configs/none.py"), 2, "there is no such file"),
    ],
)
def test_chooses_gpus(stand_in: Any, given: tuple[str, ...], seen: int, said: str):
    Gpus(stand_in).seen(seen)
    code, output = stand_in.run("gpu.sh", *given)
    assert said in output
    assert code == (0 if " train " in said else 1)


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (OLD, 0, "the NVIDIA driver is 470.57.02, and CUDA 12 needs 525 or newer: update"),
        ("No devices were found", 6, "finds no GPU"),
        ("", 0, "finds no GPU"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            9,
            "installed but not loaded",
        ),
        ("Failed to initialize NVML: Driver/library version mismatch", 18, "reboot"),
        ('Segmentation "fault"\n\\x', 139, "nvidia-smi fails: Segmentation"),
    ],
)
def test_says_what_is_wrong_with_the_driver(stand_in: Any, answer: str, code: int, said: str):
    gpus = Gpus(stand_in, answer, code)
    failed, output = stand_in.run("gpu.sh")
    assert failed == 1
    assert said in output
    assert not (stand_in.root / ".venv").exists()
    failed, line = gpus.check()
    assert failed == 1
    assert said in line["stages"]["driver"]["reason"]
    assert line["ok"] is False


def test_no_driver_at_all(stand_in: Any):
    if (stand_in.bin / "nvidia-smi").exists():
        pytest.fail("the stand-in must not be there yet")
    path = stand_in.environment()["PATH"].split(":")
    found = [folder for folder in path if (stand_in.folder / folder / "nvidia-smi").exists()]
    if found:  # a machine with a driver: hide it
        write_command(stand_in.bin / "nvidia-smi", "#!/bin/sh\necho couldnt communicate\nexit 9\n")
    code, output = stand_in.run("gpu.sh")
    assert code == 1
    assert "driver" in output
    code, output = stand_in.run("gpu_check.sh")
    assert code == 1
    assert json.loads(output)["stages"]["driver"]["status"] == "failed"


def test_check_prints_one_line_with_every_stage(stand_in: Any):
    gpus = Gpus(stand_in)
    code, line = gpus.check("--gpu", "1")
    assert code == 0, line
    assert line["ok"] is True
    assert line["gpu"].startswith("1, NVIDIA H200")
    stages = line["stages"]
    assert list(stages) == [
        "driver",
        "install",
        "device",
        "tests",
        "tiny_run",
        "sampler",
        "learner",
    ]
    assert stages["device"]["figures"] == {"kind": "NVIDIA H200", "jax": "0.10.2"}
    assert stages["tests"]["figures"] == {"passed": 7, "skipped": 2}
    assert stages["tiny_run"]["figures"] == {"steps": 1, "time/step_s": 1.5}
    assert stages["sampler"]["figures"] == {"tokens_per_s": 9000}
    ran = (stand_in.folder / "ran").read_text().splitlines()
    assert all(words.split()[1:3] == ["1", "cuda"] for words in ran)
    assert "-m gpu" in ran[1]


@pytest.mark.parametrize(
    ("stage", "does", "status", "reason"),
    [
        ("tests", "echo '1 failed, 6 passed'; exit 1", "failed", "exit code 1"),
        ("tests", "echo '99 deselected'; exit 5", "failed", "exit code 5"),
        ("tests", "echo '4 skipped, 99 deselected'", "failed", "no test passed"),
        ("tiny_run", "kill -9 $$", "failed", "exit code -9"),
        ("tiny_run", "echo done", "failed", "without its summary"),
        ("sampler", "echo no json", "failed", "no line of JSON"),
        ("learner", "sleep 60", "cut short", "were up"),
    ],
)
def test_a_stage_that_fails_is_in_the_line(
    stand_in: Any, stage: str, does: str, status: str, reason: str
):
    gpus = Gpus(stand_in)
    gpus.stages(f"{stage}() {{ {does}; }}\n")
    code, line = gpus.check("--limit-s", "8")
    assert code == 3
    assert line["ok"] is False
    assert line["stages"][stage]["status"] == status
    assert reason in line["stages"][stage]["reason"]
    others = [name for name in line["stages"] if name != stage]
    assert all(line["stages"][name]["status"] == "passed" for name in others)


def test_nothing_runs_where_jax_sees_no_gpu(stand_in: Any):
    gpus = Gpus(stand_in)
    gpus.stages("device() { echo 'cpu | cpu | 0.10.2 | 512.0'; }\n")
    code, line = gpus.check()
    assert code == 3
    assert line["stages"]["device"]["reason"] == "jax does not compute on a GPU"
    left = [line["stages"][name]["status"] for name in ("tests", "tiny_run", "sampler", "learner")]
    assert left == ["not run"] * 4


def test_a_missing_benchmark_and_a_time_that_is_up_are_in_the_line(stand_in: Any):
    gpus = Gpus(stand_in)
    (stand_in.root / "benchmarks" / "sampler.py").unlink()
    gpus.stages("tests() { sleep 4; echo 1 passed; }\n")
    code, line = gpus.check("--limit-s", "7")
    assert code == 3
    assert line["stages"]["tests"]["status"] == "passed"
    assert line["stages"]["tiny_run"] == {"status": "not run", "reason": "the time was up"}
    assert line["stages"]["sampler"]["reason"] == "benchmarks/sampler.py does not exist"


def test_the_shares_of_the_stages_fit_ten_minutes():
    from launch import gpu_check

    assert sum(s.seconds for s in gpu_check.stages("python", gpu_check.LOGS)) <= 590


def test_stages_that_cannot_even_start_are_in_the_line(stand_in: Any):
    gpus = Gpus(stand_in)
    (stand_in.root / "launch" / "gpu_check.py").write_text("1 +")
    code, line = gpus.check()
    assert code == 1
    assert "ended with exit code" in line["stages"]["stages"]["reason"]


def test_a_failed_install_is_in_the_line(stand_in: Any):
    gpus = Gpus(stand_in)
    write_command(stand_in.bin / "uv", "#!/bin/sh\necho 'no \"index\"'\nexit 1\n")
    code, line = gpus.check()
    assert code == 1
    assert line["stages"]["install"]["status"] == "failed"
    assert "could not make" in line["stages"]["install"]["reason"]
