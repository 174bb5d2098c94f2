"""Designs by another model, behind an OpenAI-compatible endpoint (`designer.source=endpoint`): the
control whose designer never learns.

What it is asked is what the policy would be asked, and what it answers is read and admitted alike;
there is no trajectory, so nothing to train on. Its key is read from the environment and stands in
no file, log or message. Only `endpoint.url` is spoken to: redirects are not followed.

A reply that may come right later (429, 5xx, no connection, no sense in it) is asked for again, a
bounded number of times. What still has no answer fails one design; what nothing can mend, such as a
wrong key, ends the run. Streaming and the interfaces of single vendors are not here.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx2

from spade_jax.errors import ConfigError, EndpointError
from spade_jax.roles import parsing, prompts
from spade_jax.roles.designer import Answer
from spade_jax.roles_config import DesignerConfig, EndpointConfig
from spade_jax.types import Trajectory

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 1 << 24
MAX_SHOWN_CHARS = 300  # of what a server says of an error
MAX_WAIT_S = 60.0  # before a request is repeated, whatever the server asks for
HOPELESS = (401, 403, 404, 405)  # of every request alike, with redirects
PASSING = (408, 409, 425, 429)  # with 5xx

Message = dict[str, str]


class Unanswered(Exception):
    """One request that has no answer; others may have theirs."""


class _Again(Exception):
    """A reply that may be better next time, after `wait_s` if the server says so."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


@dataclass(frozen=True)
class EndpointStats:
    """What was asked since the last look; tokens as the server counts them, if it does."""

    requests: int = 0  # repeated ones included
    repeated: int = 0
    unanswered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Endpoint:
    """Asks the server, a bounded number of requests at a time."""

    def __init__(self, config: EndpointConfig, key: str = "") -> None:
        self._config, self._key = config, key
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._stats = EndpointStats()
        self._places = asyncio.Semaphore(config.concurrency)
        self._waits = random.Random(config.model)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # the deadline of a request is that of all its parts together, below
        self._client = httpx2.AsyncClient(headers=headers, timeout=None, follow_redirects=False)

    async def close(self) -> None:
        """Let the connections go."""
        await self._client.aclose()

    def stats(self) -> EndpointStats:
        """Return what was done since the last call."""
        found, self._stats = self._stats, EndpointStats()
        return found

    async def complete(
        self, messages: Sequence[Message], sampling: Mapping[str, Any], max_tokens: int
    ) -> str:
        """The text that answers a conversation; "" if the server gives none.

        Raises:
            Unanswered: no answer after all attempts, or a refusal of this request alone.
            EndpointError: no request can be answered.
        """
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": list(messages),
            self._config.length_name: max_tokens,
        }
        if self._config.sampling:
            body |= sampling
        if self._config.reasoning_effort:
            body["reasoning_effort"] = self._config.reasoning_effort
        data = json.dumps(body).encode()
        # A request keeps its place while it waits: a server with too much to do is asked less.
        async with self._places:
            for attempt in itertools.count():
                try:
                    return await self._ask(data)
                except _Again as error:
                    if attempt == self._config.retries:
                        self._count(unanswered=1)
                        raise Unanswered(f"{error}, {attempt + 1} times") from error
                    wait_s = min(max(error.wait_s, self._wait_s(attempt)), MAX_WAIT_S)
                    logger.info("endpoint: %s; asking again in %.0f s", error, wait_s)
                self._count(repeated=1)
                await asyncio.sleep(wait_s)
        raise AssertionError("a count has no end")

    def _wait_s(self, attempt: int) -> float:
        """Twice as long each time, less a share by chance that keeps requests apart."""
        longest = min(self._config.backoff_s * 2.0 ** min(attempt, 30), MAX_WAIT_S)
        return longest * self._waits.uniform(0.5, 1.0)

    async def _ask(self, data: bytes) -> str:
        """One request."""
        self._count(requests=1)
        try:
            async with asyncio.timeout(self._config.timeout_s):
                status, headers, reply = await self._post(data)
        except TimeoutError as error:
            raise _Again(f"no answer within {self._config.timeout_s:g} s") from error
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
            shown = self._shown(str(error))
            raise _Again(f"the request failed ({type(error).__name__}: {shown})") from error
        if status in PASSING or status >= 500:
            raise _Again(f"HTTP {status}: {self._reason(reply)}", _retry_after(headers))
        if status in HOPELESS or status < 200 or 300 <= status < 400:
            raise EndpointError(
                f"endpoint.url={self._config.url!r} answered HTTP {status} for endpoint.model="
                f"{self._config.model!r}: {self._reason(reply)}; mend the address, the model or "
                f"the key in {self._config.key_env or 'endpoint.key_env'}, then go on with --resume"
            )
        if status >= 300:
            self._count(unanswered=1)
            raise Unanswered(f"HTTP {status}: {self._reason(reply)}")
        return self._text(reply)

    async def _post(self, data: bytes) -> tuple[int, Mapping[str, str], bytes]:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        async with self._client.stream("POST", self._url, content=data, headers=headers) as reply:
            parts, size = [], 0
            async for part in reply.aiter_raw():
                size += len(part)
                if size > MAX_REPLY_BYTES:
                    raise _Again(f"a reply of more than {MAX_REPLY_BYTES} bytes")
                parts.append(part)
            return reply.status_code, reply.headers, b"".join(parts)

    def _text(self, reply: bytes) -> str:
        try:
            found = json.loads(reply)
            message = found["choices"][0]["message"]
            content = message["content"] if message.get("content") is not None else ""
            if not isinstance(content, str):
                raise TypeError("its content is no text")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            shown = self._shown(reply.decode(errors="replace"))
            raise _Again(f"a reply that is no chat completion ({shown!r})") from error
        usage = found.get("usage")
        if isinstance(usage, dict):
            for name in ("prompt_tokens", "completion_tokens"):
                if type(count := usage.get(name)) is int and 0 <= count < 2**31:
                    self._count(**{name: count})
        # JSON can spell halves of letters, which no program and no file can hold
        return content.encode(errors="replace").decode()

    def _reason(self, reply: bytes) -> str:
        """What an error reply says, in the form of OpenAI or in any."""
        text = reply.decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            text = str(json.loads(text)["error"]["message"])
        return self._shown(text) or "no reason given"

    def _shown(self, text: str) -> str:
        """Text of a server for a line of ours: short, and without the key."""
        if self._key:
            text = text.replace(self._key, "***")
        text = " ".join(text[: 4 * MAX_SHOWN_CHARS].split())
        text = "".join(letter for letter in text if letter.isprintable())
        return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 3]}..."

    def _count(self, **more: int) -> None:
        sums = {name: getattr(self._stats, name) + count for name, count in more.items()}
        self._stats = replace(self._stats, **sums)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait; 0 if it does not, or by a date."""
    text = headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0.0


class Conversation:
    """One attempt from its prompt to its last answer, as `designer.Conversation`."""

    def __init__(
        self, endpoint: Endpoint, config: DesignerConfig, prompt: prompts.Prompt, seed: int
    ) -> None:
        self._endpoint, self._config = endpoint, config
        self._messages: list[Message] = []
        if prompt.persona is not None:
            self._messages.append({"role": "system", "content": prompt.persona})
        self._messages.append({"role": "user", "content": prompt.text})
        self._sampling: dict[str, Any] = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": seed,
        }
        # not in every interface: sent where they do something
        self._sampling |= {"top_k": config.top_k} if config.top_k else {}
        self._sampling |= {"min_p": config.min_p} if config.min_p else {}

    async def answer(self) -> Answer:
        """Ask for the next answer."""
        text = await self._endpoint.complete(
            self._messages, self._sampling, self._config.max_tokens
        )
        self._messages.append({"role": "assistant", "content": text})
        return Answer(text, Trajectory.empty(), parsing.program(text))

    def refuse(self, message: str) -> bool:
        """Say why the last answer was refused; False, and nothing is said, after an empty one."""
        if not self._messages[-1]["content"]:
            return False
        self._messages.append({"role": "user", "content": message})
        return True


def open_endpoint(designer: DesignerConfig, config: EndpointConfig) -> Endpoint | None:
    """The endpoint of the settings, its key read from the environment; None where it has no part.

    Raises:
        ConfigError: the variable holds no key.
    """
    if designer.source != "endpoint":
        return None
    key = os.environ.get(config.key_env, "").strip() if config.key_env else ""
    if config.key_env and not (key and key.isascii() and key.isprintable()):
        raise ConfigError(
            f"endpoint.key_env={config.key_env!r}: this environment variable "
            f"{'holds what cannot be a key' if key else 'is not set'}; export the key under this "
            "name, or leave endpoint.key_env empty for a server that asks for none"
        )
    try:
        return Endpoint(config, key)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"no connection to endpoint.url can be made: {type(error).__name__}: {error}; it goes "
            "through what HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and SSL_CERT_FILE name: correct or "
            "unset them"
        ) from error
