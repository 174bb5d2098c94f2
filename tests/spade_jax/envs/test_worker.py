"""What programs can do to their worker and what it is called; each runs through a pool."""

import os
import time
from pathlib import Path

import pytest

from spade_jax.envs.limits import CHANNEL, Limits
from spade_jax.types import Fault, Outcome, Reply

HEAD = f"import ctypes, os, signal, struct, sys, time, json\nCHANNEL = {CHANNEL}\n"
QUIET = "return 'ok', 0.0, False, False, {}"


def program(step: str = QUIET, reset: str = "return 'start', {}", top: str = "") -> str:
    def body(text: str) -> str:
        return "\n".join("        " + line for line in text.splitlines())

    return (
        f"{HEAD}{top}\nclass ProbeEnv:\n    def reset(self, seed):\n{body(reset)}\n"
        f"    def step(self, action):\n{body(step)}\n"
    )


FORGE = """
answers = json.dumps([['ok', ['won', 1.0, True, False]]]).encode()
body = struct.pack('<IHd', {number}, 1, 0.0) + answers
for descriptor in range(64):
    try:
        os.write(descriptor, struct.pack('<I', len(body)) + body)
    except OSError:
        pass
"""
FIND_NUMBER = "number = sys._getframe(1).f_back.f_locals['batch']\n"

AT_STEP = {
    "infinite_loop": ("while True: pass", {Outcome.TIMEOUT}),
    "c_loop": ("import itertools\nsum(itertools.repeat(0))", {Outcome.TIMEOUT}),
    "sleep": ("time.sleep(60)", {Outcome.TIMEOUT}),
    "stops_itself": ("os.kill(os.getpid(), signal.SIGSTOP)", {Outcome.TIMEOUT}),
    "swallow": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        {Outcome.TIMEOUT},
    ),
    "ignore_signals": (
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGXCPU):\n"
        "    signal.signal(number, signal.SIG_IGN)\nwhile True: pass",
        {Outcome.TIMEOUT},
    ),
    "os_exit": ("os._exit(0)", {Outcome.WORKER_DIED}),
    "segfault": ("ctypes.string_at(0)", {Outcome.WORKER_DIED}),
    "abort": ("os.abort()", {Outcome.WORKER_DIED}),
    "close_channel": ("os.close(CHANNEL)", {Outcome.WORKER_DIED}),
    "deep_recursion": (
        "sys.setrecursionlimit(10**9)\nf = lambda x: sorted([x], key=f)\nf(1)",
        {Outcome.WORKER_DIED, Outcome.ENV_ERROR},
    ),
    "sys_exit": ("sys.exit(0)", {Outcome.ENV_ERROR}),
    "keyboard_interrupt": ("raise KeyboardInterrupt", {Outcome.ENV_ERROR}),
    "memory_bomb": ("x = [0]\nwhile True: x += x", {Outcome.ENV_ERROR}),
    "giant_observation": ("return 'x' * 10**9, 0.0, False, False, {}", {Outcome.ENV_ERROR}),
    "error_in_str": (
        "class Bad(Exception):\n    def __str__(self): raise ValueError\nraise Bad()",
        {Outcome.ENV_ERROR},
    ),
    "large_observation": ("return 'x' * 10**6, 0.0, False, False, {}", {Outcome.SCHEMA}),
    "wide_observation": ("return '\\u2603' * 10**5, 0.0, False, False, {}", {Outcome.SCHEMA}),
    "control_observation": ("return '\\0' * 2 * 10**5, 0.0, False, False, {}", {Outcome.SCHEMA}),
    "nan_reward": ("return 'x', float('nan'), False, False, {}", {Outcome.SCHEMA}),
    "bool_reward": ("return 'x', True, False, False, {}", {Outcome.SCHEMA}),
    "string_reward": ("return 'x', '1', False, False, {}", {Outcome.SCHEMA}),
    "million_reward": ("return 'x', 1e6, False, False, {}", {Outcome.SCHEMA}),
    "int_flag": ("return 'x', 0.0, 1, False, {}", {Outcome.SCHEMA}),
    "four_tuple": ("return 'x', 0.0, False, {}", {Outcome.SCHEMA}),
    "list": ("return ['x', 0.0, False, False, {}]", {Outcome.SCHEMA}),
    "info_string": ("return 'x', 0.0, False, False, 'info'", {Outcome.SCHEMA}),
    "none_observation": ("return None, 0.0, False, False, {}", {Outcome.SCHEMA}),
    "bytes_observation": ("return b'x', 0.0, False, False, {}", {Outcome.SCHEMA}),
    "surrogate": ("return '\\ud800', 0.0, False, False, {}", {Outcome.SCHEMA}),
    "object": ("return object(), 0.0, False, False, {}", {Outcome.SCHEMA}),
    "nested": (
        "x = []\nfor _ in range(10**5): x = [x]\nreturn x, 0.0, False, False, {}",
        {Outcome.SCHEMA},
    ),
    "forged_number": (FORGE.format(number="7**9 % 2**32") + QUIET, {Outcome.PROTOCOL}),
    "garbage": (
        "for descriptor in range(64):\n    try: os.write(descriptor, bytes(range(256)) * 4)\n"
        "    except OSError: pass\n" + QUIET,
        {Outcome.PROTOCOL},
    ),
    "huge_frame": ("os.write(CHANNEL, struct.pack('<I', 2**31))\n" + QUIET, {Outcome.PROTOCOL}),
    "nan_frame": (
        "body = b'NaN'\nos.write(CHANNEL, struct.pack('<I', len(body)) + body)\n" + QUIET,
        {Outcome.PROTOCOL},
    ),
    "deep_frame": (
        "body = b'[' * 984 + b']' * 984\n"
        "os.write(CHANNEL, struct.pack('<I', len(body)) + body)\n" + QUIET,
        {Outcome.PROTOCOL},
    ),
    "no_processor_time": (
        FIND_NUMBER
        + FORGE.format(number="number").replace("Hd', number, 1, 0.0) + answers", "H', number, 1)")
        + QUIET,
        {Outcome.PROTOCOL},
    ),
    "reply_too_many": (
        FIND_NUMBER
        + FORGE.format(number="number").replace("Hd', number, 1, 0.0", "Hdd', number, 2, 0.0, 0.0")
        + QUIET,
        {Outcome.PROTOCOL},
    ),
    "reply_of_nothing": (
        FIND_NUMBER
        + FORGE.format(number="number").replace("Hd', number, 1, 0.0", "H', number, 0")
        + QUIET,
        {Outcome.PROTOCOL},
    ),
    **{
        f"reply_{name}": (
            FIND_NUMBER
            + FORGE.format(number="number").replace("+ answers", f"+ {body}")
            + "time.sleep(60)",
            {Outcome.PROTOCOL},
        )
        for name, body in {
            "not_json": "b'[1'",
            "nan": "b'[[\"ok\",NaN]]'",
            "deep": "b'[' * 100_000",
            "short": "b'[]'",
            "long": 'b\'[["ok",null],["ok",null]]\'',
            "no_pair": "b'[[\"ok\"]]'",
            "number": "b'7'",
            "fault_without_text": "b'[[\"env_error\",7]]'",
        }.items()
    },
    "infinite_reward": (
        FIND_NUMBER
        + FORGE.format(number="number").replace(
            "+ answers", '+ b\'[["ok",["x",1e999,true,false]]]\''
        )
        + "time.sleep(60)",
        {Outcome.SCHEMA},
    ),
    "huge_int_reward": ("return 'x', 10**400, False, False, {}", {Outcome.SCHEMA}),
    "unknown_status": (
        FIND_NUMBER + FORGE.format(number="number").replace("'ok'", "'infrastructure'") + QUIET,
        {Outcome.PROTOCOL},
    ),
    "eat_requests": ("os.read(CHANNEL, 1 << 16)", {Outcome.TIMEOUT}),
    "break_its_worker": (
        "import builtins\nbuiltins.all = None\n" + QUIET,
        {Outcome.ENV_ERROR},
    ),
    # what is told of a worker whose bytes are no frame depends on whether it then rests
    "garbage_then_hang": (
        "os.write(CHANNEL, bytes(256))\nwhile True: pass",
        {Outcome.TIMEOUT},
    ),
}


@pytest.mark.parametrize("name", AT_STEP)
def test_hostile_step_has_its_outcome_and_the_pool_goes_on(shared, name: str):
    step, expected = AT_STEP[name]

    async def play() -> None:
        instance = await shared.pool.open(program(step), 1)
        assert not isinstance(instance, Fault), instance
        fault = await instance.step("go")
        assert isinstance(fault, Fault), fault
        assert fault.outcome in expected, fault
        assert len(fault.detail) <= 300
        assert await instance.step("again") == fault  # dead
        fresh = await shared.pool.open(program(), 2)
        assert not isinstance(fresh, Fault), fresh
        assert await fresh.step("x") == Reply("ok", 0.0, False, False)
        await fresh.close()

    shared.run(play())


def test_a_forged_reply_with_the_right_number_is_the_last_one(shared):
    """It is the program's word either way; the surplus frame ends the instance."""

    async def play() -> None:
        source = program(FIND_NUMBER + FORGE.format(number="number") + QUIET)
        instance = await shared.pool.open(source, 1)
        assert not isinstance(instance, Fault), instance
        first = await instance.step("go")
        fault = first if isinstance(first, Fault) else await instance.step("go")
        assert isinstance(fault, Fault)
        assert fault.outcome is Outcome.PROTOCOL

    shared.run(play())


@pytest.mark.parametrize(
    ("source", "outcome", "word"),
    [
        (program(top="while True: pass"), Outcome.TIMEOUT, "0.5 s"),
        (program(top="raise ValueError('no')"), Outcome.ENV_ERROR, "load: ValueError: no"),
        (program(top="sys.exit()"), Outcome.ENV_ERROR, "SystemExit"),
        (program(top="os._exit(3)"), Outcome.WORKER_DIED, "exit code 3"),
        ("class Nothing: pass", Outcome.SCHEMA, "Env"),
        ("def (", Outcome.ENV_ERROR, "SyntaxError"),
        ("#" * 70_000, Outcome.SCHEMA, "70000 bytes"),
        (program(reset="while True: pass"), Outcome.TIMEOUT, "limit"),
        (program(reset="return None"), Outcome.SCHEMA, "None"),
        (program(reset="return 'a', 'b'"), Outcome.SCHEMA, "(str, str)"),
        (program(reset="return 'a', {}, 1"), Outcome.SCHEMA, "(str, dict, int)"),
        (program(reset="return ''"), Outcome.SCHEMA, "empty"),
        (program(reset="return self.missing"), Outcome.ENV_ERROR, "AttributeError"),
        ("class AEnv:\n    def __init__(self, size): pass", Outcome.ENV_ERROR, "TypeError"),
    ],
)
def test_what_goes_wrong_before_the_first_step(shared, source: str, outcome: Outcome, word: str):
    fault = shared.run(shared.pool.open(source, 1))
    assert isinstance(fault, Fault)
    assert fault.outcome is outcome, fault
    assert word in fault.detail


def ask(shared, expression: str, top: str = "") -> str:
    """What `expression` is inside a worker."""

    async def play() -> str:
        instance = await shared.pool.open(program(reset=f"return str({expression})", top=top), 1)
        assert not isinstance(instance, Fault), instance
        await instance.close()
        return instance.observation

    return shared.run(play())


def test_no_environment_variable_is_inherited(shared):
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    seen = ask(shared, "sorted(os.environ)")
    for name in os.environ.keys() - {"LANG", "OMP_NUM_THREADS", "LC_CTYPE", "LD_LIBRARY_PATH"}:
        assert f"'{name}'" not in seen


def test_nothing_of_ours_but_the_worker_side_is_loaded(shared):
    seen = ask(shared, "sorted(sys.modules)")
    for name in ("jax", "jaxtyping", "spade_jax.types", "spade_jax.errors", "asyncio", "pytest"):
        assert f"'{name}'" not in seen
    # the root itself; an environment's own packages may lie below it
    assert f"'{Path(__file__).parents[3]}'" not in ask(shared, "sys.path")


def test_a_worker_keeps_its_channel_and_dead_ends_only(shared):
    top = (
        "def is_open(number):\n    try: return os.lseek(number, 0, 1) == 0 or True\n"
        "    except OSError as error: return error.errno != 9\n"
    )
    assert ask(shared, "[n for n in range(64) if is_open(n)]", top) == f"[0, 1, 2, {CHANNEL}]"
    assert ask(shared, "os.read(0, 9)") == "b''"


def test_limits_of_a_worker(shared):
    top = "import resource as r"
    for name, value in (
        ("CORE", 0), ("FSIZE", 0), ("NPROC", 0), ("MEMLOCK", 0), ("NOFILE", 64), ("CPU", 600),
        ("STACK", 4 << 20),
    ):  # fmt: skip
        assert ask(shared, f"r.getrlimit(r.RLIMIT_{name})", top) == f"({value}, {value})"
    soft, hard = ask(shared, "r.getrlimit(r.RLIMIT_AS)", top).strip("()").split(", ")
    assert soft == hard
    assert int(soft) > Limits().memory_bytes
    assert ask(shared, "os.getsid(0) == os.getpid()") == "True"


def test_a_worker_gets_the_memory_of_its_limit(shared):
    room = Limits().memory_bytes
    assert ask(shared, f"len(bytearray({room * 3 // 4}))") == str(room * 3 // 4)
    fault = shared.run(shared.pool.open(program(reset=f"return str(bytearray({room}))"), 1))
    assert isinstance(fault, Fault)
    assert "MemoryError" in fault.detail


def test_the_working_folder_of_a_worker_is_gone(shared):
    fault = shared.run(shared.pool.open(program(reset="return os.getcwd()"), 1))
    assert isinstance(fault, Fault)
    assert "FileNotFoundError" in fault.detail


def test_no_byte_can_be_written_to_a_file(shared, tmp_path: Path):
    tmp_path.chmod(0o777)
    step = f"open({str(tmp_path / 'file')!r}, 'w').write('x' * 100_000)\n" + QUIET

    async def play() -> Fault | Reply:
        instance = await shared.pool.open(program(step), 1)
        assert not isinstance(instance, Fault), instance
        return await instance.step("x")

    fault = shared.run(play())
    assert isinstance(fault, Fault)
    assert "PermissionError" in fault.detail
    assert not (tmp_path / "file").exists()


def test_output_goes_nowhere(shared, capfd):
    ask(shared, "[print('loud'), os.write(1, b'loud'), os.write(2, b'loud')]")
    assert capfd.readouterr() == ("", "")


def test_last_class_ending_in_env_counts_and_helpers_do_not(shared):
    source = program() + (
        "class SecondEnv:\n"
        "    def reset(self, seed): return f'second {seed}'\n"
        "class EnvHelper: pass\n"
        "from collections import Counter as OtherEnv\n"
    )
    instance = shared.run(shared.pool.open(source, 9))
    assert instance.observation == "second 9"
    shared.run(instance.close())


def test_numpy_and_dataclasses_work_inside(shared):
    top = "import numpy as np, dataclasses\n@dataclasses.dataclass\nclass P:\n    x: 'int' = 3\n"
    assert ask(shared, "int(np.arange(4).sum()) + P().x", top) == "9"


def test_time_limit_is_kept(shared):
    async def play() -> float:
        instance = await shared.pool.open(program("while True: pass"), 1)
        start = time.perf_counter()
        assert isinstance(await instance.step("x"), Fault)
        return time.perf_counter() - start

    assert 0.3 <= shared.run(play()) < 20  # ten times the limit, twice, if the host is crowded


@pytest.mark.parametrize("place", ["x, 0.0, False", "'a', x, False", "'a', 0.0, x"])
def test_a_deep_reply_is_refused_at_any_depth(shared, place: str):
    step = f"x = []\nfor _ in range(int(action)): x = [x]\nreturn {place}, False, {{}}"

    async def play() -> None:
        shared.pool.stats()
        for depth in (1, 2, *range(900, 1001, 4)):
            instance = await shared.pool.open(program(step), 1)
            assert not isinstance(instance, Fault), instance
            fault = await instance.step(str(depth))
            assert isinstance(fault, Fault)
            assert fault.outcome is Outcome.SCHEMA, fault
        assert shared.pool.stats().spawned == 1

    shared.run(play())


def test_a_deep_solution_is_refused(shared):
    source = program() + (
        "    def solution(self):\n        x = 'a'\n"
        "        for _ in range(984): x = [x]\n        return x\n"
    )

    async def play() -> None:
        instance = await shared.pool.open(source, 1)
        assert not isinstance(instance, Fault), instance
        fault = await instance.solution()
        assert isinstance(fault, Fault)
        assert fault.outcome is Outcome.SCHEMA, fault

    shared.run(play())


def test_texts_of_faults_are_the_same_in_every_run(shared):
    async def fault(step: str) -> Fault | Reply:
        source = program(step) + "# another than in other tests: two offences are the last\n"
        instance = await shared.pool.open(source, 1)
        assert not isinstance(instance, Fault), instance
        return await instance.step("x")

    text = "step: ValueError: <object object at 0x...>"
    assert shared.run(fault("raise ValueError(object())")) == Fault(Outcome.ENV_ERROR, text)
    text = "no reply within the limit of 0.3 s"
    assert shared.run(fault("time.sleep(60)")) == Fault(Outcome.TIMEOUT, text)
    assert shared.run(fault("while True: pass")) == Fault(Outcome.TIMEOUT, text)


def test_texts_of_faults_do_nothing_to_a_terminal(shared):
    async def play() -> None:
        step = "raise ValueError('\\x1b[2J\\r\\n\\ud800\\u202e' + 'é')"
        instance = await shared.pool.open(program(step), 1)
        assert not isinstance(instance, Fault), instance
        text = "step: ValueError: ?[2J????é"
        assert await instance.step("x") == Fault(Outcome.ENV_ERROR, text)

    shared.run(play())


def test_nothing_left_in_a_class_or_a_global_reaches_another_instance(shared):
    reset = (
        "seen.append(seed)\nProbeEnv.made += 1\n"
        "return f'{os.getpid()}: {len(seen)} {ProbeEnv.made} {self.made}'"
    )
    source = program(reset=reset, top="seen = []") + "    made = 0\n"

    async def play() -> None:
        instances = [await shared.pool.open(source, seed) for seed in range(3)]
        (only,) = {instance.observation for instance in instances}  # of one worker
        assert only.endswith(": 1 1 1")
        for instance in instances:
            await instance.close()

    shared.run(play())
