"""The tier is what a probe was refused: with all walls, without some, and with a hole in one."""

import asyncio
import dataclasses
import os
import re

import as_user
import pytest

from spade_jax.envs import limits as limits_module
from spade_jax.envs import tier
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import SandboxError
from spade_jax.types import Fault, Reply

HONEST = """
class HonestEnv:
    def reset(self, seed):
        import csv, datetime, numpy.fft
        return datetime.datetime.strptime("2001", "%Y").isoformat() + "x".encode("utf-16").hex()

    def step(self, action):
        return action, 0.0, False, False, {}
"""
SANDBOX = tier.Sandbox(
    "A",
    (
        tier.Layer("uid", False, "not root"),
        tier.Layer("landlock", True, "ABI 7"),
        tier.Layer("seccomp", True, "x86_64"),
    ),
    (tier.Attempt("fork", True, "EAGAIN"), tier.Attempt("mount", True, "SIGSYS")),
    "6.1",
    0.03,
)


def started(weaken: str = "", limits: Limits | None = None) -> tier.Sandbox:
    """What a pool says of its sandbox, in which an ordinary program runs."""

    async def play() -> tier.Sandbox:
        async with Pool(limits or Limits(), weaken=weaken) as pool:
            instance = await pool.open(HONEST, 1)
            assert not isinstance(instance, Fault), instance
            assert instance.observation == "2001-01-01T00:00:00fffe7800"
            assert await instance.step("a") == Reply("a", 0.0, False, False)
            return pool.sandbox

    return asyncio.run(play())


def layers(sandbox: tier.Sandbox) -> dict[str, bool]:
    return {layer.name: layer.present for layer in sandbox.layers}


def test_every_layer_is_proven_by_trying():
    sandbox = started()
    assert sandbox.tier in as_user.best_tiers()
    assert sandbox.allowed == ()
    assert len(sandbox.attempts) >= 40
    assert {attempt.answer for attempt in sandbox.attempts} >= {"EPERM", "EACCES", "SIGSYS"}
    assert layers(sandbox)["uid"] == (os.geteuid() == 0)
    assert layers(sandbox)["seccomp"]
    assert layers(sandbox)["landlock"]
    assert sandbox.label == sandbox.tier
    num_tried = len(sandbox.attempts) + len(sandbox.apart)
    assert f"sandbox={sandbox.tier}: {num_tried} of {num_tried} " in sandbox.line()
    assert sandbox.probe_s < 0.5


def test_an_older_landlock_will_do():
    sandbox = started("landlock>1")
    assert sandbox.tier in as_user.best_tiers()
    assert sandbox.allowed == ()
    assert "landlock ABI 1" in sandbox.line()


def test_without_landlock_no_file_is_opened():
    sandbox = started("landlock")
    assert sandbox.tier == "B"
    assert sandbox.allowed == ()
    assert not layers(sandbox)["landlock"]
    (landlock, imports) = sandbox.warnings()
    assert "CONFIG_SECURITY_LANDLOCK" in landlock
    assert "no file can be opened" in imports
    assert "sqlite3" in imports or "more" in imports


ORDINARY = (
    "import json; json.dumps(json.loads('[1, {}]'), indent=2)",
    "import random; random.Random(1).gauss(0, 1); random.SystemRandom().random()",
    "import math, cmath, bisect, array, operator, numbers; math.comb(5, 2); array.array('i', [1])",
    "import re; re.sub(r'(?i)ä(?P<x>.)', lambda found: found['x'], 'Äb')",
    "import collections, collections.abc; collections.namedtuple('P', 'x')(1)._asdict()",
    "import itertools, heapq; list(heapq.merge([1], [2])); heapq.nsmallest(1, [2], key=abs)",
    "import fractions, decimal; decimal.Decimal(2).sqrt(); fractions.Fraction(0.5)",
    "import statistics; statistics.NormalDist().inv_cdf(0.3); statistics.quantiles([1, 2, 3])",
    "import string, textwrap; string.Template('$a').substitute(a=1); textwrap.fill('a b', 3)",
    "import datetime as d; d.datetime.strptime('2020-01-02', '%Y-%m-%d').strftime('%A')",
    "import copy, dataclasses; copy.deepcopy(dataclasses.make_dataclass('P', ['x'])(1))",
    "import enum, typing; enum.Flag('F', 'A B').A; typing.get_type_hints(typing.NamedTuple('T'))",
    "import functools, abc, types; functools.singledispatch(len).register(int, abs)",
    "import contextlib, io; contextlib.redirect_stdout(io.StringIO()).__enter__()",
    "import difflib, hashlib, unicodedata; hashlib.scrypt(b'', salt=b'', n=2, r=1, p=1)",
    "import warnings, traceback; warnings.warn('x'); traceback.format_exception(KeyError('x'))",
    "import numpy as np; np.random.default_rng(1).choice(3); np.random.seed(1); np.random.rand(2)",
    "import numpy as np; np.linalg.svd(np.eye(2)); np.linalg.lstsq(np.eye(2), np.ones(2))",
    "import numpy as np; np.fft.rfft(np.ones(4)); np.polyfit([1, 2, 3], [1, 2, 3], 1); str(np.pi)",
    "import numpy as np; np.ma.array([1]); np.char.add('a', 'b'); np.typing.NDArray",
)
TRYING = """
class TryingEnv:
    def reset(self, seed):
        return "start"

    def step(self, action):
        exec(action, {})
        return "done", 0.0, False, False, {}
"""


def test_what_programs_ordinarily_import_works_where_no_file_can_be_opened():
    """As in tier B, or under an interpreter in a folder that workers' users may not enter."""

    async def play() -> dict[str, Reply | Fault]:
        async with Pool(Limits(), weaken="landlock") as pool:
            assert pool.sandbox.tier == "B"
            answers = {}
            for statement in ORDINARY:
                instance = await pool.open(TRYING, 1)
                assert not isinstance(instance, Fault), instance
                answers[statement] = await instance.step(statement)
                await instance.close()
            return answers

    done = Reply("done", 0.0, False, False)
    assert {what: said for what, said in asyncio.run(play()).items() if said != done} == {}
    imported = {name for line in ORDINARY for name in re.findall(r"[\w.]+", line)}
    told_elsewhere = {"__future__", "tool_task"}
    assert imported >= set(limits_module.ALLOWED_IMPORTS) - told_elsewhere


def test_without_seccomp_programs_are_refused_unless_the_user_accepts_it():
    for said in ("", "yes", "i-accept"):
        with pytest.raises(SandboxError) as raised:
            started("seccomp", Limits(unsafe_sandbox=said))
        for text in ("open a TCP socket", "seccomp", "--envs.unsafe-sandbox=I-accept"):
            assert text in str(raised.value)
    sandbox = started("seccomp", Limits(unsafe_sandbox="I-accept"))
    assert (sandbox.tier, sandbox.label) == ("C", "unsafe")
    assert "make a file in memory" in sandbox.allowed
    assert sandbox.line().startswith("sandbox=unsafe")


def test_accepting_what_is_not_there_changes_nothing():
    assert started("", Limits(unsafe_sandbox="I-accept")).label in as_user.best_tiers()


def boot(statement: str) -> str:
    """A boot line that runs `statement` in the supervisor and in its zygotes."""
    before = f"from spade_jax.envs import landlock, limits, seccomp; {statement}; "
    again = f"limits._BOOT = limits._BOOT.replace('from', {before + 'from'!r}, 1); "
    return limits_module._BOOT.replace("from", before + again + "from", 1)


def test_a_hole_in_a_wall_is_found(monkeypatch):
    """Everything is configured, and the kernel says yes to all of it."""
    statement = (
        "seccomp._ALLOWED += ' mount '; seccomp._KILLED = seccomp._KILLED.replace(' mount', ' ')"
    )
    monkeypatch.setattr(limits_module, "_BOOT", boot(statement))
    with pytest.raises(SandboxError, match="they could mount"):
        started()


@pytest.mark.parametrize(("layer", "tier_left"), [("landlock", "B"), ("seccomp", "C")])
def test_a_wall_that_cannot_be_put_up_is_told(monkeypatch, layer: str, tier_left: str):
    """It could be prepared; only the worker is refused."""
    place = {"landlock": "landlock.restrict", "seccomp": "seccomp.Filter.install"}[layer]
    refuse = "lambda _: (_ for _ in ()).throw(OSError(1, 'Operation not permitted'))"
    monkeypatch.setattr(limits_module, "_BOOT", boot(f"{place} = {refuse}"))
    sandbox = started("", Limits(unsafe_sandbox=tier.ACCEPT))
    assert sandbox.tier == tier_left
    (text,) = (text for text in sandbox.missing() if text.startswith(layer))
    assert "Operation not permitted" in text


def test_a_host_where_no_child_can_be_confined_is_named(monkeypatch):
    statement = (
        "import os; os.setsid = lambda: (_ for _ in ()).throw(OSError(1, 'no session for you'))"
    )
    monkeypatch.setattr(limits_module, "_BOOT", boot(statement))
    with pytest.raises(SandboxError, match="no session for you"):
        started()


def test_a_sandbox_is_told_as_text():
    assert tier.loads(SANDBOX.dumps()) == SANDBOX
    best = dataclasses.replace(SANDBOX, tier="S", apart=(tier.Attempt("see", True, "ESRCH"),))
    assert tier.loads(best.dumps()) == best
    assert best.line().startswith("sandbox=S: 3 of 3 forbidden acts refused")
    assert SANDBOX.missing() == ["uid: not root"]
    assert SANDBOX.warnings() == []
    assert SANDBOX.shortfall("A") == SANDBOX.shortfall("B") == ""
    bare = dataclasses.replace(
        SANDBOX, layers=(*SANDBOX.layers, tier.Layer("cgroup", False, "none", "make one"))
    )
    assert bare.warnings() == []
    assert bare.shortfall("S") == (
        "workers are at tier A, less than the S of the pool: cgroup: none; make one"
    )
    assert SANDBOX.refusal() == ""
    assert SANDBOX.line() == (
        "sandbox=A: 2 of 2 forbidden acts refused (uid no, landlock ABI 7, seccomp x86_64; "
        "kernel 6.1)"
    )


def test_the_weakest_zygote_counts():
    weak = dataclasses.replace(SANDBOX, tier="C", attempts=(tier.Attempt("fork", False, "done"),))
    middle = dataclasses.replace(SANDBOX, tier="B")
    assert tier.worst([SANDBOX, weak, middle]) is weak
    assert tier.worst([SANDBOX, middle]) is middle
    assert "they could fork" in weak.refusal()
