"""A file of prompts is completed line by line, a person is answered, and every mistake is one line
before anything is loaded."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import TransformerConfig, read_config
from models.sharding import build_mesh
from models.tokenizer import load_tokenizer, train
from models.transformer import forward, init_params, logits
from models.weights import load_weights, save_weights
from spade_jax import cli
from spade_jax.config import Config, RunConfig, to_dict
from spade_jax.errors import SamplerError, SpadeError
from spade_jax.generate import Options, generate
from spade_jax.generate.conversation import _without_thinking
from spade_jax.generate.policy import Policy
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import Learner
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.engine import Engine
from spade_jax.telemetry.sinks import RunFolder
from spade_jax.terminal import visible_lines

ROOT = Path(__file__).resolve().parents[2]
MODEL = TransformerConfig(
    vocab_size=448, num_layers=1, embed=32, num_heads=2, num_kv_heads=2, head_dim=16, mlp=32,
    num_experts=1, experts_per_token=1, max_positions=1024,
)  # fmt: skip
GREEDY = {"temperature": 0.0, "max_tokens": 12, "slots": 2, "context": 128}
OTHER = {"tokens": [9, 9]}  # a second prompt, so that all files are completed in two slots


@pytest.fixture(autouse=True, scope="module")
def shared_engines():
    """An engine is compiled once for a checkpoint and a shape."""
    made: dict[tuple, Engine] = {}
    compiled = Policy.engine

    def engine(self: Policy, **shape: Any) -> Engine:
        key = (self._folder, self._options.tensor, *sorted(shape.items()))
        if key not in made:
            made[key] = compiled(self, **shape)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "engine", engine)
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A folder of random weights with a tokenizer."""
    folder = tmp_path_factory.mktemp("policy") / "weights"
    text = "once upon a time there was a robot who asked what this lever does"
    words = text.split()
    texts = [" ".join(words[i:] + words[:i]) for i in range(len(words))] * 20
    params = init_params(MODEL, jax.random.key(3))
    # Scores that differ: a random model is near to uniform, and greedy ids would be near ties.
    params = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, params)
    save_weights(folder, MODEL, params, dtype="float32")
    train(texts, folder / "tokenizer.model", vocab_size=400)
    return folder


@pytest.fixture
def prompts(tmp_path: Path):
    """A function: write a file of prompts."""

    def write(*lines: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return path

    return write


def complete(weights: Path, prompts: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    given = GREEDY | {"checkpoint": weights, "prompts": prompts, "out": out} | options
    assert generate(Options(**given)) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def greedy(weights: Path, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy ids and their log-probabilities, by the forward that trains."""
    params, grown, logprobs = load_weights(weights, MODEL), list(tokens), []
    for _ in range(count):
        row = np.zeros((1, 64), np.int32)
        row[0, : len(grown)] = grown
        scores = _scores(params, row)[0, len(grown) - 1]
        grown.append(int(scores.argmax()))
        logprobs.append(float(jax.nn.log_softmax(scores)[grown[-1]]))
    return grown[len(tokens) :], logprobs


@jax.jit
def _scores(params: Any, row: Any) -> Any:
    positions = jnp.arange(64, dtype=jnp.int32)[None]
    return logits(MODEL, params, forward(MODEL, params, row, positions).hidden)


def test_each_kind_of_prompt_is_completed_in_its_place(weights, prompts, tmp_path):
    tokenizer = load_tokenizer(weights)
    chat = Chat(tokenizer)
    talk = [
        {"role": "user", "content": "what does this lever"},
        {"role": "assistant", "content": "a robot"},
        {"role": "user", "content": "there was"},
    ]
    path = prompts(
        {"text": "once upon a"}, {"tokens": [7, 40, 300]}, {"messages": talk}, {"text": "robot"}
    )
    path.write_text(path.read_text().replace('\n{"tokens"', '\n\n{"tokens"'))  # a blank line
    found = complete(weights, path, tmp_path / "out.jsonl", max_tokens=6)
    first = chat.open(talk[0]["content"])
    said = chat.finish(talk[1]["content"])
    begin = tokenizer.control("<|bos|>")
    starts = [
        [begin, *tokenizer.encode("once upon a")],
        [7, 40, 300],
        [*first, *said, *chat.reply(said, talk[2]["content"])],
        [begin, *tokenizer.encode("robot")],
    ]
    assert len(found) == len(starts)
    for line, start in zip(found, starts, strict=True):
        assert list(line) == ["text", "tokens", "logprobs", "stop"]
        tokens, logprobs = greedy(weights, [int(token) for token in start], 6)
        ended = [i for i, token in enumerate(tokens) if token in chat.stop_ids]
        kept = ended[0] + 1 if ended else 6
        assert line["tokens"] == tokens[:kept]
        assert line["stop"] == ("stop_id" if ended else "max_tokens")
        assert line["text"] == tokenizer.decode(line["tokens"])
        np.testing.assert_allclose(line["logprobs"], logprobs[:kept], atol=1e-4)


def test_a_line_does_not_depend_on_the_others(weights, prompts, tmp_path):
    lines = [{"text": f"{word} robot"} for word in ("a", "the", "what", "was", "who", "time")]
    options = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.001, "seed": 5}
    whole = complete(weights, prompts(*lines), tmp_path / "out", **options)
    assert len({tuple(line["tokens"]) for line in whole}) > 3
    changed = [line if index == 2 else {"tokens": [9]} for index, line in enumerate(lines)]
    part = complete(weights, prompts(*changed), tmp_path / "out", overwrite=True, **options)
    assert part[2] == whole[2]
    other = complete(
        weights, prompts(*lines), tmp_path / "out", overwrite=True, **(options | {"seed": 6})
    )
    assert other != whole


def test_chat_and_stop_strings(weights, prompts, tmp_path):
    free = complete(weights, prompts({"text": "what"}, OTHER), tmp_path / "out", chat=True)[0]
    messages = prompts({"messages": [{"role": "user", "content": "what"}]}, OTHER)
    asked = complete(weights, messages, tmp_path / "out", overwrite=True)[0]
    assert asked == free
    assert len(free["tokens"]) == 12
    tokenizer = load_tokenizer(weights)
    stop = tokenizer.decode(free["tokens"][:5])[-2:]
    cut = complete(weights, messages, tmp_path / "out", overwrite=True, stop=("zzz", stop))[0]
    assert cut["stop"] == "stop_string" and stop in cut["text"]
    assert cut["tokens"] == free["tokens"][: len(cut["tokens"])]
    assert stop not in tokenizer.decode(cut["tokens"][:-1])


def test_a_run_speaks_with_the_weights_of_its_newest_checkpoint(weights, prompts, tmp_path):
    path = tmp_path / "run"
    run_config = RunConfig(dir=str(path), init_from=str(weights))
    config = Config(run=run_config, model=MODEL)
    run = RunFolder(path)
    run.save_config(to_dict(config))
    load_tokenizer(weights).save(path)
    mesh = build_mesh(1, 1, 1, 1, jax.devices()[:1])
    learner = Learner(config.model, config.learner, mesh)
    start = load_weights(weights, MODEL, mesh)
    with Checkpoints(run.checkpoints, 2, {}) as checkpoints:
        for step, factor in enumerate((0.5, 1.0)):
            params = jax.tree.map(lambda leaf, by=factor: leaf * np.float32(by), start)
            checkpoints.save(step, learner.init(params), {})
    file = prompts({"text": "once"}, {"text": "a time"})
    expected = complete(weights, file, tmp_path / "out")
    assert complete(path, file, tmp_path / "out2") == expected


def test_two_devices_share_the_model(weights, prompts, tmp_path):
    file = prompts({"text": "once"}, {"text": "a time"})
    one = complete(weights, file, tmp_path / "one")
    two = complete(weights, file, tmp_path / "two", tensor=2)
    assert [line["tokens"] for line in two] == [line["tokens"] for line in one]


def test_a_prompt_that_fails_has_its_error_in_its_place(weights, prompts, tmp_path, monkeypatch):
    sample = Engine.generate

    async def fail(self: Engine, tokens: Any, params: Any, key: Any) -> Any:
        if len(tokens) == 2:
            raise SamplerError("the scores were not numbers")
        return await sample(self, tokens, params, key)

    monkeypatch.setattr(Engine, "generate", fail)
    file = prompts({"tokens": [5]}, {"tokens": [5, 6]}, {"tokens": [5, 6, 7]})
    out = tmp_path / "out"
    assert generate(Options(weights, prompts=file, out=out, **(GREEDY | {"max_tokens": 3}))) == 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["stop"] for line in lines] == ["max_tokens", "error", "max_tokens"]
    assert lines[1]["error"] == "the scores were not numbers" and lines[1]["tokens"] == []


LINES = {
    b"{": "line 1: is not JSON: ",
    b"[" * 100_000: "line 1: is not JSON: ",
    b'{"text": "a"}\n\xff': "line 2: is not UTF-8",
    b'{"text": "a"}\n3': "line 2: holds none of text, tokens, messages; expected an object",
    b'{"txt": "a"}': "line 1: holds none of text",
    b'{"text": "a", "tokens": [5]}': "line 1: holds text and tokens of text",
    b'{"text": "a", "max_tokens": 5, "id": 3}': (
        "line 1: holds 'max_tokens', 'id' beside text, which would have no effect; leave out"
    ),
    b'{"text": 3}': "line 1: text is 3; expected a string",
    b'{"text": "\\ud800"}': "line 1: text is ",
    b'{"text": ""}': "line 1: text is empty",
    b'{"tokens": []}': "line 1: tokens is empty",
    b'{"tokens": [1, true]}': "line 1: tokens is [1, True]; expected a list of whole",
    b'{"tokens": [1, 448]}': "line 1: token id 448 is not in the vocabulary, 0 to 447",
    b'{"tokens": [-1]}': "line 1: token id -1",
    b'{"text": "a"}\n\n{"tokens": [' + b"5, " * 1023 + b"5]}": "line 3: 1024 tokens leave no room",
    b'{"messages": []}': "line 1: the roles are []; expected user and assistant in turn",
    b'{"messages": [{"role": "assistant", "content": "a"}]}': "line 1: the roles are",
    b'{"messages": [{"role": "user"}]}': "line 1: message {'role': 'user'} is malformed",
    b'{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}': (
        "line 1: the chat template spade has no system message"
    ),
    b"": "holds no prompt",
    b"\n \n": "holds no prompt",
}


@pytest.fixture
def unloaded(monkeypatch):
    """Nothing is loaded or compiled."""

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights are read before all input is checked")

    monkeypatch.setattr(Policy, "engine", load)


@pytest.mark.parametrize("content", LINES, ids=[repr(line[:40]) for line in LINES])
def test_a_bad_line_is_named(content: bytes, weights, tmp_path, unloaded):
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(SpadeError) as caught:
        generate(Options(weights, prompts=path, out=out))
    assert LINES[content] in str(caught.value) and str(path) in str(caught.value)
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"temperature": -1.0}, "temperature=-1.0; expected 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0; expected more than 0"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"context": 1025}, "--context 1025: the model is meant for sequences of at most 1024"),
        ({"context": 2}, "line 1: 2 tokens leave no room to sample in a context of 2 (--context)"),
        ({"thinking": True}, "--thinking: the chat template spade of this checkpoint does not"),
        ({"system": "be brief"}, "--system: the chat template spade"),
        ({"template": "llama3"}, "llama3 needs <|begin_of_text|>"),
        ({"template": "latin"}, "--template='latin': expected auto or one of"),
        ({"stop": ("a", "")}, "--stop '' is in every text"),
        ({"prompts": None}, "--out needs --prompts"),
        ({"out": None}, "--prompts needs --out"),
        ({"prompts": Path("/nowhere/prompts")}, "'/nowhere/prompts' cannot be read: No such"),
        ({"prompts": Path("/")}, "prompts file '/' cannot be read"),
        ({"out": Path("/nowhere/out")}, "'/nowhere/out' cannot be written: No such file"),
        ({"out": Path("/"), "overwrite": True}, "'/' cannot be written: Is a directory"),
        ({"out": Path("/")}, "--out '/' exists; choose another file"),
        ({"checkpoint": Path("/nowhere")}, "'/nowhere' does not exist; expected a folder that"),
        ({"checkpoint": ROOT / "README.md"}, "README.md' is not a folder"),
        ({"checkpoint": ROOT / "docs"}, "docs' holds no weights; expected a folder that"),
        ({"checkpoint": ROOT / "tests/models/golden/qwen3"}, "is a public one; bring it in first"),
    ],
)
def test_bad_options_are_named(changes, part, weights, prompts, tmp_path, unloaded):
    options = {"checkpoint": weights, "prompts": prompts({"text": "a"}), "out": tmp_path / "out"}
    with pytest.raises(SpadeError) as caught:
        generate(Options(**(options | changes)))
    assert part in str(caught.value)


def test_an_empty_run_is_said(tmp_path, unloaded):
    run = RunFolder(tmp_path / "run")
    run.save_config(to_dict(Config()))
    run.checkpoints.mkdir()
    with pytest.raises(SpadeError, match="has no checkpoint yet"):
        generate(Options(run.path))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "the following arguments are required: CHECKPOINT"),
        (["x", "--top_k", "3"], "unknown option --top_k (did you mean --top-k?)"),
        (["x", "--max-tokens", "0"], "'0' is not a whole number from 1"),
        (["x", "--slots", "1e9"], "'1e9' is not a whole number"),
        (["x", "--temperature", "warm"], "'warm' is not a number"),
        (["x"], "checkpoint 'x' does not exist"),
        (["x\0y"], "does not exist"),
    ],
)
def test_the_command_line_is_one_line_of_error(arguments, part, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert cli.main(["generate", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line


def test_what_is_there_is_kept(weights, prompts, tmp_path, unloaded):
    file = prompts({"text": "a"})
    out = tmp_path / "out"
    out.write_text("precious\n")
    with pytest.raises(SpadeError, match="exists; choose another file, or replace it with --over"):
        generate(Options(weights, prompts=file, out=out))
    with pytest.raises(SpadeError, match="is what is read"):
        generate(Options(weights, prompts=file, out=file, overwrite=True))
    with pytest.raises(AssertionError):  # the weights fail to load
        generate(Options(weights, prompts=file, out=out, overwrite=True))
    assert out.read_text() == "precious\n"
    assert "text" in file.read_text()


def _environment(tmp_path: Path) -> dict[str, str]:
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    devices = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return os.environ | cache | devices


def _command(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "spade_jax.cli", "generate", *map(str, arguments)]


def test_an_interrupt_leaves_a_line_for_every_prompt(weights, prompts, tmp_path):
    count, out = 40, tmp_path / "out"
    file = prompts(*({"tokens": [5 + index]} for index in range(count)))
    options = ("--prompts", file, "--out", out, "--max-tokens", 400, "--slots", 2)
    command = _command(weights, *options)
    with subprocess.Popen(
        command, cwd=ROOT, env=_environment(tmp_path), stderr=subprocess.PIPE
    ) as process:
        give_up = time.monotonic() + 240
        while not out.exists() or out.stat().st_size == 0:
            assert process.poll() is None and time.monotonic() < give_up
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        errors = process.communicate()[1].decode()
        assert process.returncode == 130, errors
    assert "Traceback" not in errors and "interrupted" in errors
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == count
    stops = [line["stop"] for line in lines]
    assert stops[0] != "cancelled" and stops[-1] == "cancelled"
    assert lines[-1] == {"text": "", "tokens": [], "logprobs": [], "stop": "cancelled"}


def test_a_piped_conversation_equals_the_same_messages_of_a_file(
    weights, prompts, tmp_path, monkeypatch, capsys
):
    messages = [{"role": "user", "content": "what does"}]
    file = prompts({"messages": messages}, OTHER)
    said = complete(weights, file, tmp_path / "out", max_tokens=40)[0]
    text = "what does\n/new\n\nwhat does\nand the robot\n/quit\nnot read\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    capsys.readouterr()
    assert generate(Options(weights, temperature=0.0, max_tokens=40)) == 0
    shown = capsys.readouterr().out
    first, _, second = shown.partition("(a new conversation)")
    assert "> what does\n" in first and "> and the robot\n" in second and "not read" not in shown
    reply = first.partition("> what does\n")[2].partition("\n(ended")[0]
    assert reply and reply.split("\n> ")[0] in second
    assert said["text"] and "\n".join(visible_lines(said["text"])) in first


@pytest.mark.parametrize("count", [1, 2])
def test_interrupts_end_a_reply_and_the_conversation_goes_on(count, weights, monkeypatch, capsys):
    rounds, whole = 0, Engine._execute

    def interrupted(self: Engine, plan: Any) -> Any:
        nonlocal rounds
        rounds += 1
        results = whole(self, plan)
        for _ in range(count if rounds == 2 else 0):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)  # pending signals of one kind are one
        return results

    monkeypatch.setattr(Engine, "_execute", interrupted)
    lines = io.TextIOWrapper(io.BytesIO(b"what does\nand the robot\n"))
    monkeypatch.setattr(sys, "stdin", lines)
    capsys.readouterr()
    assert generate(Options(weights, max_tokens=200, stop=("zzz",))) == 0
    first, _, second = capsys.readouterr().out.partition("> and the robot\n")
    assert first.count("(interrupted)") == 1 and "(interrupted)" not in second
    assert second.strip()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("options", [{"context": None, "max_tokens": 20}, {"context": 20}])
def test_one_short_prompt_is_completed(options, weights, prompts, tmp_path):
    """Of which the cache holds less than two pages."""
    file = prompts({"tokens": [9]})
    [line] = complete(weights, file, tmp_path / "out", slots=None, **options)
    assert len(line["tokens"]) in (12, 20) or line["stop"] == "stop_id"


def test_a_conversation_in_a_small_context(weights, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"what\n")))
    assert generate(Options(weights, max_tokens=8, context=100)) == 0
    assert "100 tokens of context" in capsys.readouterr().out


def test_a_message_that_does_not_fit_is_said(weights, monkeypatch, capsys):
    text = f"{'robot ' * 1200}\nwhat\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert generate(Options(weights, max_tokens=1100, stop=("zzz",))) == 0
    shown = capsys.readouterr().out
    assert "and the context has 1024; shorten it" in shown
    assert "(ended by context)" in shown or "stop" in shown


def test_thinking_can_be_hidden():
    assert _without_thinking("plain") == "plain"
    assert _without_thinking("<think>\nhm") == ""
    assert _without_thinking("<think>\nhm\n</think>\n\nyes <think>") == "yes <think>"


def test_a_person_talks_and_leaves(weights, tmp_path):
    end, other = pty.openpty()
    command = _command(weights, "--max-tokens", 450, "--context", 480, "--stop", "zzzz")
    start = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", start, *command],
        cwd=ROOT,
        env=_environment(tmp_path),
        stdin=other,
        stdout=other,
        stderr=other,
    )
    os.close(other)
    text = ""

    def wait_for(part: str) -> None:
        nonlocal text
        give_up = time.monotonic() + 240
        while part not in text:
            assert time.monotonic() < give_up and process.poll() is None, text
            if select.select([end], [], [], 1)[0]:
                with contextlib.suppress(OSError):
                    text += os.read(end, 1 << 16).decode()

    try:
        wait_for("leaves)\r\n> ")
        text = ""
        os.write(end, b"what does this\n")
        wait_for("\r\n> ")
        text = ""
        os.write(end, b"/quit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(end)


def test_options_are_those_of_the_command_line():
    """Every field can be set by an option of its name."""
    names = {field.name for field in dataclasses.fields(Options)}
    done = subprocess.run(_command("--help"), cwd=ROOT, capture_output=True, text=True)
    shown = done.stdout
    missing = [name for name in names if f"--{name.replace('_', '-')}" not in shown]
    assert missing == ["checkpoint"] and "CHECKPOINT" in shown
    assert read_config(ROOT / "assets" / "tiny").vocab_size > 0
