"""What the files beside a tokenizer say: the text of the chat template, the name of the padding
token, added tokens. They are untrusted, so whatever is not of its expected form counts as absent or
is a `ModelError`; a chat template is text here and is never run.
"""

import json
from collections.abc import Mapping
from typing import Any

from models.errors import ModelError


def read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The JSON object in the file `name`; an empty one where there is no such file."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} holds a {type(value).__name__}; expected a JSON object")
    return value


def template_text(files: Mapping[str, bytes]) -> str | None:
    """The default chat template; a file of its own counts before the one in the config."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8", errors="replace")
    found = read_object(files, "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def token_text(value: Any) -> str | None:
    """The token that a field such as `pad_token` names, as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def added_tokens(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Added tokens that `tokenizer_config.json` declares, in the form of `tokenizer.json`."""
    declared = read_object(files, "tokenizer_config.json").get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return []
    return [
        {**token, "id": int(index)}
        for index, token in declared.items()
        if isinstance(token, dict) and index.isdecimal()
    ]
