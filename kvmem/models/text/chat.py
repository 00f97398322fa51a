"""Both models' chat formats: a conversation to token ids.

A conversation is rendered to a sequence of special tokens and text, then encoded piece by piece, so that what
a user or a tool says is never read as markup. Sources: the chat templates published with the checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from kvmem.models.text import tools as tools_module
from kvmem.models.text.tokenizer import Tokenizer
from kvmem.models.text.tools import Tool, ToolCall

Role = Literal["system", "user", "assistant", "tool"]


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn. ``reasoning`` and ``calls`` belong to assistants; ``call_id`` to the result of a call."""

    role: Role
    content: str = ""
    name: str | None = None
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


@dataclasses.dataclass(frozen=True)
class Special:
    """A special token, by name."""

    name: str


Piece = str | Special


@dataclasses.dataclass(frozen=True)
class Options:
    """How to render.

    Attributes:
      thinking: the next turn starts with reasoning; without it an empty reasoning is given.
      keep_reasoning: earlier reasoning stays (Kimi's ``preserve_thinking``, GLM's ``clear_thinking=false``).
      effort: GLM's reasoning effort.
      generate: end with the start of an assistant turn.
    """

    thinking: bool = True
    keep_reasoning: bool = False
    effort: Literal["high", "max"] = "max"
    generate: bool = True


def render(
    family: str, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Options | None = None
) -> list[Piece]:
    """The conversation as special tokens and text. ValueError on an unknown role or family."""
    options = options or Options()
    for message in messages:
        if message.role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"role {message.role!r}: must be system, user, assistant or tool")
        if message.role != "assistant" and (message.calls or message.reasoning):
            raise ValueError(f"role {message.role!r} has reasoning or calls, which only an assistant has")
    if options.effort not in ("high", "max"):
        raise ValueError(f"effort {options.effort!r}: must be high or max")
    if family == "kimi":
        return list(_kimi(messages, tools, options))
    if family == "glm":
        return list(_glm(messages, tools, options))
    raise ValueError(f"family {family!r}: chat formats are known for kimi and glm")


def encode(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[int]:
    """The token ids of a rendered conversation."""
    ids: list[int] = []
    for piece in pieces:
        ids += [tokenizer.special(piece.name)] if isinstance(piece, Special) else tokenizer.encode(piece)
    return ids


def plain_text(pieces: Iterable[Piece]) -> str:
    """The rendered conversation for a person to read."""
    return "".join(piece.name if isinstance(piece, Special) else piece for piece in pieces)


def _kimi(messages: Sequence[Message], tools: Sequence[Tool], options: Options) -> Iterator[Piece]:
    """Kimi K2.6. No system prompt is added: the published renderers disagree whether there is a default."""

    def turn(token: str, name: str) -> Iterator[Piece]:
        yield from (Special(f"<|im_{token}|>"), name, Special("<|im_middle|>"))

    if tools:
        yield from turn("system", "tool_declare")
        yield from (tools_module.declare_kimi(tools), Special("<|im_end|>"))
    # Reasoning is emptied up to the last answer that calls no tool; after it, a chain of calls keeps its own.
    answers = [i for i, m in enumerate(messages) if m.role == "assistant" and not m.calls]
    emptied = -1 if options.keep_reasoning or not answers else answers[-1]
    for index, message in enumerate(messages):
        role = "system" if message.role == "tool" else message.role
        yield from turn(role, message.name or message.role)
        if message.role == "assistant":
            yield from (Special("<think>"), message.reasoning if index > emptied else "", Special("</think>"))
        if message.role == "tool":
            yield f"## Return of {message.call_id}\n"
        yield message.content
        if message.calls:
            yield Special("<|tool_calls_section_begin|>")
            for call in message.calls:
                yield from (Special("<|tool_call_begin|>"), call.call_id)
                yield Special("<|tool_call_argument_begin|>")
                yield from (json.dumps(call.arguments, ensure_ascii=False), Special("<|tool_call_end|>"))
            yield Special("<|tool_calls_section_end|>")
        yield Special("<|im_end|>")
    if options.generate:
        yield from turn("assistant", "assistant")
        yield Special("<think>")
        if not options.thinking:
            yield Special("</think>")


def _glm(messages: Sequence[Message], tools: Sequence[Tool], options: Options) -> Iterator[Piece]:
    """GLM 5.2. A turn has no end token: the next role ends it."""
    yield from (Special("[gMASK]"), Special("<sop>"))
    if options.thinking:
        yield from (Special("<|system|>"), f"Reasoning Effort: {options.effort.capitalize()}")
    if tools:
        yield from (Special("<|system|>"), tools_module.declare_glm(tools))
    users = [i for i, m in enumerate(messages) if m.role == "user"]
    dropped = -1 if options.keep_reasoning or not users else users[-1]
    for index, message in enumerate(messages):
        if message.role == "tool":
            if index == 0 or messages[index - 1].role != "tool":
                yield Special("<|observation|>")
            yield from (Special("<tool_response>"), message.content, Special("</tool_response>"))
            continue
        yield Special(f"<|{message.role}|>")
        if message.role != "assistant":
            yield message.content
            continue
        yield from (Special("<think>"), message.reasoning if index > dropped else "", Special("</think>"))
        yield message.content.strip()
        for call in message.calls:
            yield from (Special("<tool_call>"), call.name)
            for key, value in call.arguments.items():
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                yield from (Special("<arg_key>"), key, Special("</arg_key>"))
                yield from (Special("<arg_value>"), text, Special("</arg_value>"))
            yield Special("</tool_call>")
    if options.generate:
        yield from (Special("<|assistant|>"), Special("<think>"))
        if not options.thinking:
            yield Special("</think>")
