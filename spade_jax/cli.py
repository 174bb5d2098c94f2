"""`spade-jax train|warmstart CONFIG [--section.field value ...]`, and `spade-jax
play|plan|generate|convert|checkpoints|doctor` with options: the only module that reads the command
line.

Bad input of any kind ends in one line on stderr and exit code 2, what may pass in exit code 75;
bugs keep their traceback.
"""

import argparse
import contextlib
import dataclasses
import difflib
import importlib.util
import io
import logging
import operator
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import tyro

from models.errors import ModelError
from spade_jax.config import Config, RunConfig
from spade_jax.details import CONVERT_DETAILS, GENERATE_DETAILS
from spade_jax.errors import ConfigError, SpadeError
from spade_jax.terminal import mute, visible

COMMANDS = {
    "train": "run the self-play loop of a config (--resume continues its run folder,\n"
    "              --resume-if-any continues it or starts it, --profile traces three steps)",
    "warmstart": "teach a small policy both roles on the environment library",
    "play": "play an environment yourself, in the terminal",
    "generate": "talk with a policy, or complete a file of prompts",
    "plan": "compile a run for devices that may not be here: does it fit, how long is a step",
    "convert": "bring a public checkpoint in (Hugging Face, GGUF), or weights out",
    "checkpoints": "list the checkpoints of a run and verify them",
    "doctor": "say what the sandbox can contain on this host, and prove it",
}
USAGE = (
    "usage: spade-jax train|warmstart CONFIG [--section.field value ...]\n"
    "       spade-jax plan CONFIG --topology NAME [options] [--section.field value ...]\n"
    "       spade-jax play FILE|PACKAGE:ID [options]\n"
    "       spade-jax generate CHECKPOINT [--prompts FILE --out FILE] [options]\n"
    "       spade-jax convert SOURCE DESTINATION [--to hf] [options]\n"
    "       spade-jax checkpoints RUN\n"
    "       spade-jax doctor [options]\n"
    "(spade-jax COMMAND --help lists every field or option)"
)

_TRAIN_FLAGS = ("--resume", "--resume-if-any", "--profile")
_PROFILE_STEPS = 3
MESSAGE_LETTERS = 2000  # of an error, at most
# A section that may be absent, such as model.rope_scaling, is what the preset says it is.
_TYRO = (tyro.conf.AvoidSubcommands,)


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever `sys.stderr` is at the time: a live table replaces it while it is up."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 what was tried is not well, 2 bad input,
    3 another process of the run ended it, 75 what failed may pass, 130 interrupted.
    """
    arguments = tuple(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_StderrHandler()])
    for noisy in ("absl", "jax", "orbax", "etils", "httpx2", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        return _run(list(arguments))
    except (SpadeError, ModelError) as error:
        print(f"spade-jax: {visible(_one_line(str(error)))}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except KeyboardInterrupt:
        resume = "; train --resume continues from the last checkpoint"
        print(f"spade-jax: interrupted{resume * (arguments[:1] == ('train',))}", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, *(f"  {name:<11} {text}" for name, text in COMMANDS.items()), sep="\n")
        return 0 if arguments else 2
    command = arguments.pop(0)
    if command not in COMMANDS:
        raise ConfigError(
            f"unknown command {command!r}{_closest(command, COMMANDS)}; expected one of "
            f"{', '.join(COMMANDS)}"
        )
    if command in _IN_TERMINAL:
        return _in_terminal(command, arguments)
    if arguments and arguments[0] in ("-h", "--help"):
        parse_overrides(Config(), ["--help"])
    flags = {flag for flag in _TRAIN_FLAGS if command == "train" and flag in arguments[1:]}
    config = _read_config(command, [word for word in arguments if word not in flags])
    # Imported here so that help and bad options answer without loading jax.
    if command == "train":
        from spade_jax.train import train

        if "--profile" in flags and not config.telemetry.profile_steps:
            telemetry = dataclasses.replace(config.telemetry, profile_steps=_PROFILE_STEPS)
            config = dataclasses.replace(config, telemetry=telemetry)
        train(config, resume=None if "--resume-if-any" in flags else "--resume" in flags)
    else:
        from spade_jax.warmstart import warmstart

        warmstart(config)
    return 0


def _read_config(command: str, arguments: list[str]) -> Config:
    """The config of a file, which comes first, with the options behind it."""
    if not arguments or arguments[0].startswith("-"):
        given = f"got {arguments[0]!r}" if arguments else "nothing was given"
        raise ConfigError(f"{command} needs a config file first, such as configs/tiny.py; {given}")
    return parse_overrides(load_config(Path(arguments[0])), arguments[1:])


class _Parser(argparse.ArgumentParser):
    """Options of a command without a config; a mistake is an error like any other."""

    def __init__(self, command: str, details: str) -> None:
        super().__init__(
            f"spade-jax {command}",
            description=COMMANDS[command],
            epilog=details,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.prog} --help lists every option")

    def read(self, arguments: list[str]) -> argparse.Namespace:
        values, rest = self.parse_known_args(arguments)
        if rest:
            kind = "option" if rest[0].startswith("--") else "argument"
            self.error(f"unknown {kind} {rest[0]}{_closest(rest[0], self._option_string_actions)}")
        return values


def _play(arguments: list[str]) -> int:
    from spade_jax.play import DETAILS, play

    parser = _Parser("play", DETAILS)
    parser.add_argument("target", nargs="?", metavar="FILE|PACKAGE:ID", help="what to play")
    parser.add_argument("--seed", type=_seed, default=0, help="the instance, from 0 (default: 0)")
    parser.add_argument(
        "--hint",
        nargs="?",
        const="",
        metavar="TEXT|FILE",
        help="show the hint that a run stored beside FILE, or this text, or this file's",
    )
    parser.add_argument(
        "--actions", type=Path, metavar="FILE", help="play these actions and end (see below)"
    )
    parser.add_argument(
        "--transcript", type=Path, metavar="FILE", help="write what happens, a JSON object a line"
    )
    parser.add_argument(
        "--envs.unsafe-sandbox",
        dest="unsafe_sandbox",
        default="",
        metavar="I-accept",
        help="play although this host does not contain the program",
    )
    options = parser.read(arguments)
    if options.target is None:  # as in `play --hint FILE`
        options.target, options.hint = options.hint, ""
    if not options.target:
        parser.error("nothing to play was given; expected a program file or PACKAGE:ID")
    return play(**vars(options))


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 18 digits")
    return int(text)


def _doctor(arguments: list[str]) -> int:
    from spade_jax.doctor import DETAILS, LAYERS, doctor

    parser = _Parser("doctor", DETAILS)
    parser.add_argument(
        "--hostile",
        type=Path,
        metavar="DIR",
        help="run every program of DIR, confined, and compare what it got with what is right",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=LAYERS,
        metavar="LAYER",
        help=f"do without a layer, to see what the others hold: {', '.join(LAYERS)}",
    )
    parser.add_argument("--json", action="store_true", help="print it all as JSON")
    options = parser.read(arguments)
    return doctor(folder=options.hostile, without=options.without, as_json=options.json)


def _plan(arguments: list[str]) -> int:
    from spade_jax.plan.options import DETAILS, add_options, prepare

    parser = _Parser("plan", DETAILS)
    add_options(parser)
    options, rest = parser.parse_known_args(arguments)
    config = _read_config("plan", rest)
    prepare(options)
    from spade_jax.plan.command import plan

    return plan(config, **vars(options))


def _convert(arguments: list[str]) -> int:
    parser = _Parser("convert", CONVERT_DETAILS)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder or .gguf file")
    parser.add_argument("target", type=Path, metavar="DESTINATION", help="a folder to make")
    parser.add_argument(
        "--to",
        choices=("orbax", "hf"),
        default="orbax",
        help="orbax to train from (default), hf for transformers and what else reads safetensors",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="round the weights to this (default: as they are in the source)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="take the tokenizer from this folder"
    )
    options = parser.read(arguments)
    import jax

    jax.config.update("jax_platforms", "cpu")  # host work: an accelerator stays free
    from spade_jax.convert import convert

    convert(**vars(options))
    return 0


def _checkpoints(arguments: list[str]) -> int:
    from spade_jax.checkpoints import DETAILS, checkpoints

    parser = _Parser("checkpoints", DETAILS)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its URL")
    return checkpoints(parser.read(arguments).run)


def _generate(arguments: list[str]) -> int:
    parser = _Parser("generate", GENERATE_DETAILS)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="a folder of weights, or a run's")
    add("--prompts", type=Path, metavar="FILE", help="complete these instead of talking")
    add("--out", type=Path, metavar="FILE", help="where to write the completions")
    add("--overwrite", action="store_true", help="replace what --out holds")
    add("--chat", action="store_true", help="a prompt's text is a user's message, to be answered")
    add("--system", metavar="TEXT", help="system message of conversations that bring none")
    add("--template", default="auto", metavar="NAME", help="chat template (default: by the files)")
    add("--thinking", action="store_true", help="think before answering, where the model can")
    add("--hide-thinking", action="store_true", help="do not show it in the terminal")
    add("--temperature", type=_number, default=1.0, help="0 is greedy (default: 1)")
    add("--top-p", type=_number, default=1.0, help="keep the likeliest of this share (1: all)")
    add("--top-k", type=_whole(0), default=0, help="keep so many of the likeliest (0: all)")
    add("--min-p", type=_number, default=0.0, help="keep by a share of the likeliest (0: all)")
    add("--max-tokens", type=_whole(1), default=256, metavar="N", help="a completion's (256)")
    add("--stop", action="append", metavar="STRING", help="end with this text; may be repeated")
    add("--seed", type=_seed, default=0, help="of what is random (default: 0)")
    add("--slots", type=_whole(1), metavar="N", help="prompts sampled together (default: 32)")
    add("--context", type=_whole(16), metavar="N", help="longest sequence, in tokens")
    add("--tensor", type=_whole(1), default=1, metavar="N", help="devices that share the model")
    options = parser.read(arguments)
    options.stop = tuple(options.stop or ())
    # Read when jax is imported; programs that were compiled before are found there.
    kept = os.path.expanduser(RunConfig().compile_cache)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", kept)
    from spade_jax.generate import Options, generate

    return generate(Options(**vars(options)))


def _number(text: str) -> float:
    if not _is_number(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= least):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to 9 digits"
            )
        return int(text)

    return read


_IN_TERMINAL = {
    "play": _play,
    "plan": _plan,
    "generate": _generate,
    "convert": _convert,
    "checkpoints": _checkpoints,
    "doctor": _doctor,
}


def _in_terminal(command: str, arguments: list[str]) -> int:
    """Run a command whose output is for a person, whatever it is that shows it."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters it cannot show are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _IN_TERMINAL[command](arguments)
    except BrokenPipeError:  # nobody reads on; what is still buffered has nowhere to go
        mute()
        return 1


def load_config(path: Path) -> Config:
    """Run a config file and call its `config()`. Config files are the user's own code.

    Raises:
        ConfigError: the file is missing, fails, or defines no `config() -> Config`.
    """
    if not os.path.isfile(path):  # unlike the method, it bears names that cannot be
        raise ConfigError(
            f"config file {str(path)!r} does not exist; the repository's presets are in configs/"
        )
    spec = importlib.util.spec_from_file_location("spade_jax_config_file", path)
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"config file {str(path)!r} is not Python; expected a .py file that defines config()"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        make: Callable[[], Any] | None = getattr(module, "config", None)
        config = make() if callable(make) else None
    except (SpadeError, ModelError):
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"config file {str(path)!r} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, Config):
        raise ConfigError(
            f"config file {str(path)!r} must define config() returning a spade_jax.config.Config; "
            f"got {type(config).__name__}"
        )
    return config


def parse_overrides(preset: Config, arguments: Sequence[str]) -> Config:
    """Apply `--section.field value` (or `=value`) to a preset; `--help` prints every field with
    default and doc.

    Raises:
        ConfigError: an unknown option, or a value of the wrong type or out of range.
    """
    if "-h" in arguments or "--help" in arguments:
        tyro.cli(
            Config,
            default=preset,
            args=["--help"],
            prog="spade-jax train|warmstart CONFIG",
            config=_TYRO,
        )
    names = {
        f"{section.name}.{name}"
        for section in dataclasses.fields(Config)
        for name in _leaves(getattr(preset, section.name))
    }
    options = (
        names | {name.replace("_", "-") for name in names} | {_negated(name) for name in names}
    )
    for argument in arguments:
        name = argument[2:].split("=", 1)[0]
        if argument.startswith("--") and name not in options and not _is_number(argument):
            raise ConfigError(
                f"unknown option --{name}{_closest(name, names)}; --help lists every option"
            )
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            return tyro.cli(Config, default=preset, args=list(arguments), config=_TYRO)
    except SystemExit as error:
        raise ConfigError(_blame(preset, arguments, output.getvalue())) from error


def _blame(preset: Config, arguments: Sequence[str], message: str) -> str:
    """Say which option was refused and why: its type here, its range by building its section."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") and not _is_number(argument):
            groups.append(argument.split("=", 1))
        elif groups:
            groups[-1].append(argument)
        else:
            return f"unexpected argument {argument!r}; options look like --section.field value"
    values: dict[str, dict[str, Any]] = {}
    for name, *words in groups:
        section, _, item = name[2:].replace("-", "_").partition(".")
        owner, _, leaf = f"{section}.{item}".rpartition(".")
        holder = operator.attrgetter(owner)(preset)
        kind = get_type_hints(type(holder)).get(leaf, bool)
        negated = leaf.startswith("no_") and not hasattr(holder, leaf)
        if negated or (kind is bool and not words):  # a flag has no value that could be wrong
            values.setdefault(owner, {})[
                leaf.removeprefix("no_") if negated else leaf
            ] = not negated
            continue
        if len(words) > 1 and isinstance(kind, type):
            return f"unexpected argument {words[1]!r} after {name} {words[0]!r}"
        try:
            with (
                contextlib.redirect_stderr(io.StringIO()),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                values.setdefault(owner, {})[leaf] = tyro.cli(kind, args=words)
        except SystemExit:
            default = getattr(holder, leaf, None)
            shown = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            given = " ".join(words)
            return (
                f"--{section}.{item}: {given!r} is not a valid {shown}; the default is {default!r}"
            )
    try:
        changed = {
            owner: dataclasses.replace(operator.attrgetter(owner)(preset), **items)
            for owner, items in values.items()
        }
        dataclasses.replace(
            preset, **{owner: section for owner, section in changed.items() if "." not in owner}
        )
    except (ConfigError, ModelError, TypeError) as error:
        return str(error)
    return f"the options cannot be read: {message}"


def _leaves(section: Any) -> list[str]:
    """Dotted names of the fields of a section that can be set; not of one that is absent."""
    names = []
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            names += [f"{item.name}.{name}" for name in _leaves(value)]
        elif value is not None:
            names.append(item.name)
    return names


def _negated(name: str) -> str:
    section, _, item = name.partition(".")
    return f"{section}.no-{item.replace('_', '-')}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _closest(name: str, options: Any) -> str:
    close = difflib.get_close_matches(name, list(options), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _one_line(text: str) -> str:
    """Return a message that may quote a hostile file: no control characters, and not a page."""
    text = " ".join(text.replace("│", " ").split())
    if len(text) > MESSAGE_LETTERS:
        text = f"{text[: MESSAGE_LETTERS // 2]} ... {text[-MESSAGE_LETTERS // 2 :]}"
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


if __name__ == "__main__":
    sys.exit(main())
