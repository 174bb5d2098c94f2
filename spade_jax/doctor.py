"""`spade-jax doctor`: what contains generated programs on this host, layer by layer, and the proof.

The tier and the layers are what a probe child was refused when the pool started here, not what was
configured. With a folder of hostile programs each is run, and the outcome it got is set beside the
one its first line asks for. This reports and repairs nothing; a kernel's own flaw is not seen.
"""

import asyncio
import dataclasses
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spade_jax.envs import api, hostile, tier
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import SandboxError, SpadeError
from spade_jax.terminal import say, visible
from spade_jax.types import Fault, Outcome

DETAILS = """\
Tells kernel, tier, each layer of the sandbox with the reason and the remedy where it is missing,
the limits, and how long a new program and a step take here. Tiers: A contains programs; S does with
two walls more, should one fall; B does, but they can import only what is loaded before them; on C
they are refused. The tier is what a probe was refused when it tried, not what is configured.
--without LAYER, which may be repeated, shows what the others hold.

--hostile DIR: the first line of each program says what is right, as in `# Spins. RIGHT: timeout`;
alternatives are separated by |, remarks stand in brackets. `denied` means that each of its attempts
reports "blocked" and none "PWNED", `replay` that two workers went different ways, `harmless` that
it was played to the end. The host is looked at too: a canary file, a port, files, shared memory, a
sibling worker, the sandbox's own processes, and what is left when all is over. Such programs are in
tests/hostile_envs/ of the repository.

Exit codes: 0 programs are contained, all outcomes right, the host untouched; 1 not so; 2 bad input.
"""

MEANINGS = {
    "S": "filtered, walled off, apart from the host, and under limits as a whole",
    "A": "filtered and walled off",
    "B": "filtered; no file can be opened, so late imports fail",
    "C": "NOT contained; programs are refused",
}
LAYERS = ("landlock", "landlock>1", "seccomp", tier.NAMESPACES, tier.CGROUP)  # that can be left out
_WORKERS = 12  # started to time one
_STEPS = 300
_UNJUDGED = str(Outcome.INFRASTRUCTURE)
_NARROW = 100  # columns where the output is no terminal
_PROGRAM = """
# {}
class TimedEnv:
    def reset(self, seed):
        return "ready", {{}}

    def step(self, action):
        return action, 0.0, False, False, {{}}
"""


@dataclass
class Report:
    """All that was found out; `problem` says why the pool cannot run at all."""

    host: dict[str, str]
    limits: dict[str, Any]
    problem: str = ""
    sandbox: tier.Sandbox | None = None
    timings: dict[str, float] = field(default_factory=dict)  # milliseconds; absent if not measured
    results: list[hostile.Result] | None = None  # None when no folder was asked for

    @property
    def ok(self) -> bool:
        """Whether programs are contained here, and all that was tried went right."""
        contained = self.sandbox is not None and not self.sandbox.refusal()
        return contained and not self.problem and all(row.ok for row in self.results or ())


def doctor(
    *, folder: Path | None = None, without: Sequence[str] = (), as_json: bool = False
) -> int:
    """Print what contains programs here, and what became of the hostile programs of `folder`.

    Args:
        without: layers, of `LAYERS`, to do without: what the others are worth.
    Returns:
        The exit code: 0 all is well, 1 it is not.
    Raises:
        SpadeError: the folder cannot be used.
    """
    if folder is not None:
        if not os.path.isdir(folder):  # unlike the method, it bears names that cannot be
            raise SpadeError(
                f"--hostile {str(folder)!r} is not a folder; expected one with hostile programs"
            )
        hostile.read_folder(folder)  # what is wrong with it is told at once
    report = Report(_host(), dataclasses.asdict(Limits()))
    asyncio.run(_examine(report, folder, ",".join(without)))
    if as_json:
        say(json.dumps(_plain(report), indent=2))
    else:
        say(*_lines(report))
    return 0 if report.ok else 1


async def _examine(report: Report, folder: Path | None, weaken: str) -> None:
    try:
        # Accepted whatever the tier: until it is known, only programs of our own run.
        async with Pool(Limits(unsafe_sandbox=tier.ACCEPT), weaken=weaken) as pool:
            report.sandbox = pool.sandbox
            await _measure(pool, report)
    except SandboxError as error:
        report.problem = str(error)
        return
    if folder is not None and not report.sandbox.refusal():
        print(f"running the programs of {visible(str(folder))} ...", file=sys.stderr)
        at_once = min(4, _processors())
        report.results = await hostile.run_folder(folder, Limits(), at_once=at_once, weaken=weaken)


async def _measure(pool: Pool, report: Report) -> None:
    """Wall times as they are now: of new programs, and of single steps."""
    starts, steps = [], []
    for number in range(_WORKERS):
        started = time.perf_counter()
        instance = await pool.open(_PROGRAM.format(number), 0)
        starts.append(time.perf_counter() - started)
        if isinstance(instance, Fault):
            report.problem = f"an ordinary program does not run: {instance.detail}"
            return
        for _ in range(_STEPS // _WORKERS):
            started = time.perf_counter()
            reply = await instance.step("x")
            steps.append(time.perf_counter() - started)
            if isinstance(reply, Fault):
                report.problem = f"an ordinary program does not run: {reply.detail}"
                return
        await instance.close()
    for name, values in (("start", starts), ("step", steps)):
        report.timings[f"{name}_p50_ms"] = 1000 * statistics.median(values)
        report.timings[f"{name}_p95_ms"] = 1000 * statistics.quantiles(values, n=20)[-1]


def _host() -> dict[str, str]:
    name = os.uname()
    return {
        "kernel": f"{name.sysname} {name.release} {name.machine}",
        "python": f"{platform.python_version()} at {sys.executable}",
        "user": "root" if os.geteuid() == 0 else f"user id {os.geteuid()}",
        "processors": f"{_processors()}, load average {os.getloadavg()[0]:.1f}",
    }


def _processors() -> int:
    if sys.platform != "linux":  # the report then says that nothing runs there
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def _plain(report: Report) -> dict[str, Any]:
    """The report as JSON; what was not tried is null."""
    sandbox = report.sandbox
    return {
        "ok": report.ok,
        "problem": report.problem or None,
        "host": report.host,
        "tier": None if sandbox is None else sandbox.tier,
        "layers": None if sandbox is None else [dataclasses.asdict(row) for row in sandbox.layers],
        "attempts": None
        if sandbox is None
        else [dataclasses.asdict(row) for row in (*sandbox.attempts, *sandbox.apart)],
        "limits": report.limits,
        "timings": report.timings,
        "hostile": None
        if report.results is None
        else [{**dataclasses.asdict(row), "ok": row.ok} for row in report.results],
    }


def _lines(report: Report) -> Iterator[str]:
    rows = list(report.host.items())
    if report.sandbox is not None:
        rows += _tier_rows(report.sandbox)
    rows += [("limits", text) for text in _limit_lines(report.limits)]
    if report.timings:
        rows += [
            ("new program", f"ready in {_times(report.timings, 'start')}"),
            ("step", f"answered in {_times(report.timings, 'step')}"),
        ]
    if report.problem:
        rows.append(("problem", visible(report.problem)))
    yield from _columns(rows)
    if report.sandbox is not None:
        yield ""
        yield from _layer_lines(report.sandbox)
    if report.results is not None:
        yield ""
        yield from _result_lines(report.results)
    yield ""
    yield _conclusion(report)


def _tier_rows(sandbox: tier.Sandbox) -> list[tuple[str, str]]:
    rows = [
        ("tier", f"{sandbox.tier}: {MEANINGS[sandbox.tier]}"),
        ("probe", f"{sandbox.score} forbidden acts refused"),
    ]
    return rows + [("", f"a program could {name}") for name in sandbox.allowed]


def _limit_lines(limits: dict[str, Any]) -> list[str]:
    """The defaults of a run; its config may change them."""
    shown = []
    for name, value in limits.items():
        if name.endswith("_bytes"):
            shown.append(f"{name.removesuffix('_bytes')} {value / 2**20:g} MiB")
        elif name.endswith("_s"):
            shown.append(f"{name.removesuffix('_s')} {value:g} s")
        elif type(value) is int:
            shown.append(f"{name} {value}")
    shown.append(f"observation {api.MAX_OBSERVATION_BYTES // 2**10} KiB")
    half = (len(shown) + 1) // 2
    return [", ".join(shown[:half]), ", ".join(shown[half:])]


def _times(timings: dict[str, float], name: str) -> str:
    p50, p95 = timings[f"{name}_p50_ms"], timings[f"{name}_p95_ms"]
    return f"{p50:.2f} ms wall time (median; p95 {p95:.2f} ms)"


def _layer_lines(sandbox: tier.Sandbox) -> Iterator[str]:
    width = max(len(layer.name) for layer in sandbox.layers)
    for layer in sandbox.layers:
        stands = "yes" if layer.present else "no"
        yield f"{layer.name:<{width}}  {stands:<3}  {visible(layer.detail)}"
        if layer.fix and not layer.present:
            yield f"{'':<{width}}       to change that: {visible(layer.fix)}"


def _result_lines(results: Sequence[hostile.Result]) -> Iterator[str]:
    """The table; what went wrong is told in full under its row."""
    columns = 0
    if sys.stdout is not None and sys.stdout.isatty():
        columns = shutil.get_terminal_size((_NARROW, 24)).columns
    names = max(len(visible(row.name)) for row in results)
    words = max(len("|".join(row.right)) for row in results)
    got = max(len(row.got) for row in results)
    yield f"{'':<5}  {'':<{names}}  {'right is':<{words}}  {'got':<{got}}"
    for row in results:
        verdict = "right" if row.ok else "void " if row.got == _UNJUDGED else "WRONG"
        right = visible("|".join(row.right))
        line = f"{verdict}  {visible(row.name):<{names}}  {right:<{words}}  {row.got:<{got}}"
        detail = visible(row.detail)
        if row.ok:
            line = f"{line}  {detail}"
            yield line[: columns or max(_NARROW, len(line) - len(detail) + 40)].rstrip()
        else:
            yield line.rstrip()
            if detail:
                yield f"       {detail}"


def _conclusion(report: Report) -> str:
    if report.sandbox is None or report.problem:
        return "Programs cannot run here."
    if report.sandbox.refusal():
        return (
            "Programs are refused here. Make the missing layers stand, or accept the danger with "
            f"--envs.unsafe-sandbox={tier.ACCEPT}"
        )
    if report.results is None:
        return "Programs are contained here."
    programs = [row for row in report.results if row.kind == "program"]
    num_right = sum(row.ok for row in programs)
    touched = [row.name for row in report.results if row.kind == "host" and not row.ok]
    text = f"{num_right} of {len(programs)} programs had a right outcome; "
    text += f"the host was touched: {', '.join(touched)}" if touched else "the host is untouched"
    if num_void := sum(row.got == _UNJUDGED for row in programs):
        text += f"; {num_void} could not be judged: try again when this host is less busy"
    return f"{text}."


def _columns(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _ in rows)
    last = ""
    for name, text in rows:
        yield f"{'' if name == last else name:<{width}}  {text}"
        last = name
