"""Tool declarations, and the calls that a model writes, in both models' formats.

A declaration is OpenAI's: ``{"type": "function", "function": {"name", "description", "parameters"}}`` with a
JSON schema. Parsing is strict: a call that is malformed, unknown, or contradicts its schema is not repaired;
it comes back as a problem that says why.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonschema

Tool = Mapping[str, Any]
Schema = Mapping[str, Any] | bool

GLM_INSTRUCTIONS = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{{function-name}}<arg_key>{{arg-key-1}}</arg_key><arg_value>{{arg-value-1}}</arg_value><arg_key>\
{{arg-key-2}}</arg_key><arg_value>{{arg-value-2}}</arg_value>...</tool_call>"""


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call. ``call_id`` is Kimi's ``functions.NAME:INDEX``; GLM writes none: its index in the turn."""

    name: str
    arguments: dict[str, Any]
    call_id: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a turn says: its reasoning, its text, valid calls in order, and why other calls are not valid."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    problems: tuple[str, ...]


def functions(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The declared functions by name. ValueError: another type, a duplicate, or a schema that is none."""
    declared: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        if tool.get("type") != "function" or not tool.get("function", {}).get("name"):
            raise ValueError(f"tool {tool!r}: type must be 'function', with a function that has a name")
        function = tool["function"]
        if function["name"] in declared:
            raise ValueError(f"tool {function['name']!r} is declared twice")
        try:
            jsonschema.Draft202012Validator.check_schema(function.get("parameters", {}))
        except jsonschema.SchemaError as error:
            raise ValueError(f"tool {function['name']!r}: parameters: {error.message}") from error
        declared[function["name"]] = function
    return declared


def declare_kimi(tools: Sequence[Tool]) -> str:
    """Kimi K2.5 and K2.6: a TypeScript namespace, fields sorted by name, required ones first."""
    lines = []
    for function in functions(tools).values():
        parameters = dict(function.get("parameters") or {})
        definitions = parameters.pop("$defs", {})
        for name, schema in definitions.items():
            lines += [*_comments(schema), f"interface {name} {_typescript(schema)}"]
        lines += _comment(function.get("description", ""))
        fields = _typescript({"type": "object", **parameters})
        lines.append(f"type {function['name']} = (_: {fields}) => any;")
    body = "\n".join(lines)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


def declare_glm(tools: Sequence[Tool]) -> str:
    """GLM: instructions around one JSON object a line."""
    functions(tools)
    return GLM_INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def _comment(text: str, indent: str = "") -> list[str]:
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")] if text else []


_SHOWN = ("maximum", "minimum", "maxLength", "minLength", "pattern", "maxItems", "minItems")


def _comments(schema: Schema, indent: str = "") -> list[str]:
    """A field's description, then its constraints in one line, then its default."""
    if isinstance(schema, bool):
        return []
    lines = _comment(schema.get("description", ""), indent)
    if shown := [f"{key}: {schema[key]}" for key in sorted(_SHOWN) if key in schema]:
        lines.append(f"{indent}// {', '.join(shown)}")
    return lines


_SCALARS = {"integer": "number", "object": "{}", "array": "Array<any>"}


def _typescript(schema: Schema, indent: str = "") -> str:
    """The TypeScript type of a JSON schema as Kimi's tokenizer writes it."""
    if isinstance(schema, bool):
        return "any" if schema else "null"
    if "$ref" in schema:
        return schema["$ref"].rsplit("/", 1)[-1]
    if "anyOf" in schema:
        return " | ".join(_typescript(option, indent) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " | ".join(str(_SCALARS.get(one, one)) for one in kind)
    inner = indent + "  "
    if kind == "array":
        item = schema.get("items", True)
        if notes := _comments(item, inner):
            return "\n".join(["Array<", *notes, inner + _typescript(item, inner), indent + ">"])
        return f"Array<{_typescript(item, indent)}>"
    if kind == "object":
        return _typescript_object(schema, indent)
    return "number" if kind == "integer" else str(kind)


def _typescript_object(schema: Mapping[str, Any], indent: str) -> str:
    inner = indent + "  "
    required = set(schema.get("required", ()))
    fields = []
    for name, value in sorted(
        schema.get("properties", {}).items(), key=lambda p: (p[0] not in required, p[0])
    ):
        notes = _comments(value, inner)
        if not isinstance(value, bool) and value.get("default") is not None:
            default = value["default"]
            shown = (
                repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
            )
            notes.append(f"{inner}// Default: {shown}")
        optional = "" if name in required else "?"
        fields.append("\n".join([*notes, f"{inner}{name}{optional}: {_typescript(value, inner)}"]))
    more = schema.get("additionalProperties")
    if more is not None:
        fields.append(f"{inner}[k: string]: {'never' if more is False else _typescript(more, inner)}")
    return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def parse(family: str, text: str, tools: Sequence[Tool] = (), *, thinking: bool = True) -> Answer:
    """Splits the text of a turn into reasoning, content and calls.

    ``thinking`` says that the prompt ended in ``<think>``, so the turn starts inside the reasoning. Calls are
    checked against ``tools``.
    """
    reasoning = ""
    if thinking:
        reasoning, closed, text = text.partition("</think>")
        if not closed:
            return Answer(reasoning.strip(), "", (), ("the reasoning does not end",))
    split = {"kimi": _split_kimi, "glm": _split_glm}[family]
    declared = functions(tools)
    content, found = split(text, declared)
    calls = [call for call in found if isinstance(call, ToolCall)]
    problems = [problem for problem in found if isinstance(problem, str)]
    valid = []
    for call in calls:
        wrong = check(call, declared)
        problems += wrong
        valid += [] if wrong else [call]
    return Answer(reasoning.strip(), content.strip(), tuple(valid), tuple(problems))


def check(call: ToolCall, declared: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why a call is not valid: unknown function, or arguments that contradict the schema (2020-12)."""
    if call.name not in declared:
        return [f"{call.call_id}: function {call.name!r} is not declared"]
    validator = jsonschema.Draft202012Validator(declared[call.name].get("parameters", {}))
    errors = sorted(validator.iter_errors(call.arguments), key=lambda error: list(map(str, error.path)))
    return [f"{call.call_id}: {'.'.join(map(str, e.path)) or 'arguments'}: {e.message}" for e in errors]


_KIMI_SECTION = re.compile(r"<\|tool_calls_section_begin\|>(.*)<\|tool_calls_section_end\|>", re.DOTALL)
_KIMI_CALL = re.compile(
    r"<\|tool_call_begin\|>\s*functions\.([\w.-]+):(\d+)\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)


def _split_kimi(text: str, declared: Mapping[str, Any]) -> tuple[str, list[ToolCall | str]]:
    content, begin, _ = text.partition("<|tool_calls_section_begin|>")
    if not begin:
        return content, _stray(text, ("<|tool_call_begin|>", "<|tool_call_end|>"))
    section = _KIMI_SECTION.search(text)
    if not section:
        return content, ["the tool call section does not end"]
    found: list[ToolCall | str] = []
    for match in _scan(_KIMI_CALL, section[1]):
        if isinstance(match, str):
            found.append(f"no tool call: {match!r}")
            continue
        name, index, arguments = match.groups()
        call_id = f"functions.{name}:{index}"
        try:
            value = json.loads(arguments)
        except json.JSONDecodeError as error:
            found.append(f"{call_id}: arguments are not JSON: {error}")
            continue
        if isinstance(value, dict):
            found.append(ToolCall(name, value, call_id))
        else:
            found.append(f"{call_id}: arguments must be an object, got {value!r}")
    return content + text[section.end() :], found or ["the tool call section is empty"]


_GLM_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _split_glm(text: str, declared: Mapping[str, Any]) -> tuple[str, list[ToolCall | str]]:
    found: list[ToolCall | str] = []
    for index, match in enumerate(_GLM_CALL.finditer(text)):
        name, opened, rest = match[1].partition("<arg_key>")
        found.append(_glm_call(name.strip(), opened + rest, str(index), declared))
    content = _GLM_CALL.sub("", text)
    return content.partition("<tool_call>")[0], found + _stray(content, ("<tool_call>", "</tool_call>"))


def _glm_call(name: str, body: str, index: str, declared: Mapping[str, Any]) -> ToolCall | str:
    properties = declared.get(name, {}).get("parameters", {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for match in _scan(_GLM_ARGUMENT, body):
        if isinstance(match, str):
            return f"{index}: {name}: no argument: {match!r}"
        key, text = match.groups()
        if key in arguments:
            return f"{index}: {name}: argument {key!r} is given twice"
        schema = properties.get(key, {})
        if isinstance(schema, dict) and schema.get("type") == "string":
            arguments[key] = text  # strings are written raw, everything else as JSON
            continue
        try:
            arguments[key] = json.loads(text)
        except json.JSONDecodeError:
            if isinstance(schema, dict) and "type" in schema and "string" not in schema["type"]:
                return f"{index}: {name}: argument {key!r} is not JSON: {text!r}"
            arguments[key] = text
    return ToolCall(name, arguments, index)


def _scan(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str] | str]:
    """Matches in order, and whatever but white space stands between them."""
    end = 0
    for match in pattern.finditer(text):
        if between := text[end : match.start()].strip():
            yield between
        yield match
        end = match.end()
    if rest := text[end:].strip():
        yield rest


def _stray(text: str, marks: Sequence[str]) -> list[ToolCall | str]:
    return [f"{mark} without its counterpart" for mark in marks if mark in text]
