"""Chat templates as data: what a model was taught to see around a turn.

A template is found by what a checkpoint says of itself. Its chat template text (Jinja, never run
here) names the family, and its literals hold the wording that differs between checkpoints of one
family: the system message of those who give none, the introduction of tools, the date. Families:

    spade    <|bos|> <|user|>TEXT<|end|> <|assistant|>          the project's own tokenizers
    chatml   <|im_start|>user\\nTEXT<|im_end|>\\n <|im_start|>assistant\\n     SmolLM2, Qwen2
    qwen3    ChatML that may think: <think>\\n...\\n</think>\\n\\n opens the completion
    llama3   <|start_header_id|>user<|end_header_id|>\\n\\nTEXT<|eot_id|>, TEXT stripped

Tools are there for the `<tools>`, `<tool_call>`, `<tool_response>` form of Qwen alone; Llama's
other forms are not. How pieces become ids is `chat`'s work.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from models.tokenizer import Tokenizer
from spade_jax.errors import ConfigError

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
NO_THOUGHT = f"{THINK_OPEN}\n\n{THINK_CLOSE}\n\n"
"""What Qwen3 finds at the start of a completion that is to hold no thinking."""


@dataclass(frozen=True)
class Template:
    """Text around turns. It is the model's own: control tokens named in it become control ids."""

    name: str
    header: str  # opens a turn of {role}
    end: str  # the control token that ends a turn
    begin: str = ""  # before the first turn
    after: str = ""  # between the end of a turn and the next one
    stops: tuple[str, ...] = ()  # further control tokens that end a completion, where they exist
    strips: bool = False  # messages lose the white space around them
    has_system: bool = True  # whether there is a system turn
    system_prefix: str = ""  # opens every system turn
    default_system: str | None = None  # the system message of those who give none; None: no turn
    tools: tuple[str, str] | None = None  # before and after the list of tools; None: no tools
    thinks: Literal["never", "on request", "always"] = "never"


SPADE = Template("spade", header="<|{role}|>", end="<|end|>", begin="<|bos|>", has_system=False)
CHATML = Template(
    "chatml",
    header="<|im_start|>{role}\n",
    end="<|im_end|>",
    after="\n",
    stops=("<|endoftext|>",),
)
QWEN3 = replace(CHATML, name="qwen3", thinks="on request")
LLAMA3 = Template(
    "llama3",
    header="<|start_header_id|>{role}<|end_header_id|>\n\n",
    end="<|eot_id|>",
    begin="<|begin_of_text|>",
    stops=("<|end_of_text|>", "<|eom_id|>"),
    strips=True,
)
FAMILIES = {family.name: family for family in (SPADE, CHATML, QWEN3, LLAMA3)}

# What is never closed runs to the end, so that a hostile text is read once.
_LITERAL = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|['"].*""", re.DOTALL)
_COMMENT = re.compile(r"\{#.*?(?:#\}|\Z)", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}
_DATE = re.compile(r"\d{1,2} [A-Z][a-z]{2} \d{4}")


def choose(tokenizer: Tokenizer, name: str = "auto") -> Template:
    """The template of a tokenizer's checkpoint; `name` overrides the family."""
    if name != "auto" and name not in FAMILIES:
        raise ConfigError(
            f"run.chat_template={name!r}: expected auto or one of {', '.join(FAMILIES)}"
        )
    text = tokenizer.template_text
    if name != "auto":
        family = FAMILIES[name]
    else:
        family = _family_of_text(text) if text else _family_of_tokens(tokenizer.control_ids)
    missing = [mark for mark in _marks(family) if mark not in tokenizer.control_ids]
    if missing:
        raise ConfigError(
            f"the chat template {family.name} needs {', '.join(missing)}, which the tokenizer does "
            "not have; set run.chat_template to the template that the checkpoint was trained with"
        )
    return _worded(family, text) if text else family


def _family_of_text(text: str) -> Template:
    if all(mark in text for mark in ("<|start_header_id|>", LLAMA3.end)):
        return LLAMA3
    if all(mark in text for mark in ("<|im_start|>", CHATML.end)):
        return QWEN3 if "enable_thinking" in text or _always_thinks(text) else CHATML
    raise ConfigError(_unknown("its chat template is of none of them"))


def _family_of_tokens(control_ids: Mapping[str, int]) -> Template:
    for family in (SPADE, LLAMA3, CHATML):
        if all(mark in control_ids for mark in _marks(family)):
            return QWEN3 if family is CHATML and THINK_OPEN in control_ids else family
    raise ConfigError(
        _unknown("it has no chat template, and its control tokens are of none of them")
    )


def _unknown(why: str) -> str:
    return (
        f"the checkpoint's chat format is not known: {why} ({', '.join(FAMILIES)}); set "
        "run.chat_template to the one it was trained with"
    )


def _marks(family: Template) -> list[str]:
    """The control tokens without which a family cannot be spoken."""
    headers = [family.header.format(role=role) for role in ("user", "assistant")]
    return [*dict.fromkeys(re.findall(r"<\|\w+\|>", "".join((family.begin, *headers, family.end))))]


def _worded(family: Template, text: str) -> Template:
    """The family with the wording that the literals of this chat template hold."""
    literals = list(_literals(text))
    if family.name == LLAMA3.name:
        cutoff = next((part for part in literals if part.startswith("Cutting Knowledge")), None)
        today = _DATE.search(text)  # the template's own, not the clock's: a prompt is a constant
        if cutoff is None or today is None:
            return family
        prefix = f"{cutoff}Today Date: {today[0]}\n\n"
        return replace(family, system_prefix=prefix, default_system="")
    if family.name == SPADE.name:
        return family
    opening = CHATML.header.format(role="system")
    default = next(
        (
            part.removeprefix(opening).split(CHATML.end)[0]
            for part in literals
            if part.startswith(opening) and CHATML.end in part
        ),
        None,
    )
    before = next((part for part in literals if part.endswith("<tools>")), None)
    behind = next((part for part in literals if part.startswith("\n</tools>")), None)
    tools = (before.lstrip("\n"), behind.split(CHATML.end)[0]) if before and behind else None
    always = family.thinks != "never" and _always_thinks(text)
    return replace(
        family,
        default_system=default,
        tools=tools,
        thinks="always" if always else family.thinks,
    )


def _always_thinks(text: str) -> bool:
    """Whether the template opens the thinking block itself."""
    return any(part.endswith(f"assistant\n{THINK_OPEN}\n") for part in _literals(text))


def _literals(text: str) -> Iterator[str]:
    """The string literals of a Jinja template, with their escapes resolved."""
    for match in _LITERAL.finditer(_COMMENT.sub("", text)):
        literal = match[1] if match[1] is not None else match[2]
        if literal is not None:
            yield _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[1]), literal)
