import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem.models.text import chat, tools
from kvmem.models.text.chat import Message
from kvmem.models.text.tools import ToolCall

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.\nNot the climate.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["C", "F"], "description": "of degrees", "default": "C"},
                "place": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
                "at": {"type": "array", "items": {"type": "number"}},
            },
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}


def test_declare_kimi_writes_a_typescript_namespace():
    assert tools.declare_kimi([WEATHER, CLOCK]) == (
        "# Tools\n\n## functions\nnamespace functions {\n"
        "// The weather of a place.\n// Not the climate.\n"
        "type weather = (_: {\n"
        "  place: string,\n"
        "  at?: Array<number>,\n"
        "  // maximum: 7, minimum: 1\n"
        "  days?: number,\n"
        "  // of degrees\n"
        '  // Default: "C"\n'
        '  unit?: "C" | "F",\n'
        "  [k: string]: never\n"
        "}) => any;\n"
        "type clock = (_: {}) => any;\n"
        "}\n"
    )


def test_declare_kimi_nested_objects_references_and_unions():
    function = {
        "name": "f",
        "parameters": {
            "type": "object",
            "$defs": {
                "Point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
            },
            "properties": {
                "p": {"$ref": "#/$defs/Point"},
                "o": {"type": "object", "properties": {"b": {"type": "boolean"}}},
                "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "v": {"type": ["integer", "null"]},
                "w": {"type": "array", "items": {"type": "string", "description": "a word"}},
            },
        },
    }
    assert tools.declare_kimi([{"type": "function", "function": function}]).splitlines()[4:-1] == [
        "interface Point {",
        "  x: number",
        "}",
        "type f = (_: {",
        "  o?: {",
        "    b?: boolean",
        "  },",
        "  p?: Point,",
        "  u?: string | null,",
        "  v?: number | null,",
        "  w?: Array<",
        "    // a word",
        "    string",
        "  >",
        "}) => any;",
    ]


def test_declare_glm_lists_one_json_object_a_line():
    lines = tools.declare_glm([WEATHER, CLOCK]).splitlines()
    begin, end = lines.index("<tools>"), lines.index("</tools>")
    assert [json.loads(line) for line in lines[begin + 1 : end]] == [WEATHER, CLOCK]
    assert "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>" in lines[-1]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ([{"type": "plugin", "function": {"name": "f"}}], "type must be 'function'"),
        ([{"type": "function", "function": {}}], "a function that has a name"),
        ([CLOCK, CLOCK], "'clock' is declared twice"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "obj"}}}], "'f': parameters"),
    ],
    ids=["type", "name", "twice", "schema"],
)
def test_functions_bad_declarations_are_refused(declared, message):
    with pytest.raises(ValueError, match=message):
        tools.functions(declared)


def kimi_calls(*calls):
    body = "".join(
        f"<|tool_call_begin|>{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>" for i, a in calls
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def glm_call(name, **arguments):
    body = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{body}</tool_call>"


def test_parse_kimi_calls_in_order_with_reasoning_and_content():
    turn = "Let me see.</think>Two calls." + kimi_calls(
        ("functions.weather:3", '{"place": "Oslo", "days": 2}'), ("functions.clock:4", "{}")
    )
    answer = tools.parse("kimi", turn, [WEATHER, CLOCK])
    assert answer == tools.Answer(
        reasoning="Let me see.",
        content="Two calls.",
        calls=(
            ToolCall("weather", {"place": "Oslo", "days": 2}, "functions.weather:3"),
            ToolCall("clock", {}, "functions.clock:4"),
        ),
        problems=(),
    )


def test_parse_glm_strings_are_raw_and_other_values_json():
    turn = "Two calls." + glm_call("weather", place="12", days="2", at="[1.5, 2]") + "\n" + glm_call("clock")
    answer = tools.parse("glm", turn, [WEATHER, CLOCK], thinking=False)
    assert answer.calls == (
        ToolCall("weather", {"place": "12", "days": 2, "at": [1.5, 2]}, "0"),
        ToolCall("clock", {}, "1"),
    )
    assert (answer.content, answer.problems) == ("Two calls.", ())


BAD = [
    ("kimi", kimi_calls(("functions.weather:0", "{")), "arguments are not JSON"),
    ("kimi", kimi_calls(("functions.weather:0", "[1]")), "must be an object"),
    ("kimi", kimi_calls(("weather", "{}")), "no tool call"),
    ("kimi", kimi_calls(("functions.rain:0", "{}")), "'rain' is not declared"),
    ("kimi", kimi_calls(("functions.weather:0", "{}")), "'place' is a required property"),
    ("kimi", kimi_calls(("functions.weather:0", '{"place": "x", "days": 9}')), "days: 9 is greater than"),
    ("kimi", kimi_calls(("functions.weather:0", '{"place": "x", "more": 1}')), "'more' was unexpected"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>", "section does not end"),
    ("kimi", kimi_calls(), "section is empty"),
    ("kimi", "<|tool_call_begin|>functions.clock:0", "without its counterpart"),
    ("glm", glm_call("weather", place="x", days="two"), "'days' is not JSON"),
    ("glm", glm_call("weather", days="2"), "'place' is a required property"),
    ("glm", glm_call("rain"), "'rain' is not declared"),
    ("glm", "<tool_call>weather<arg_key>place</arg_key></tool_call>", "no argument"),
    (
        "glm",
        glm_call("weather", place="x")[:-12] + "<arg_key>place</arg_key><arg_value>y</arg_value></tool_call>",
        "twice",
    ),
    ("glm", "<tool_call>weather", "without its counterpart"),
]


@pytest.mark.parametrize(("family", "turn", "problem"), BAD)
def test_parse_malformed_or_invalid_call_is_a_problem_not_a_call(family, turn, problem):
    answer = tools.parse(family, turn, [WEATHER, CLOCK], thinking=False)
    assert answer.calls == ()
    assert any(problem in found for found in answer.problems), answer.problems


def test_parse_one_bad_call_leaves_the_good_one():
    turn = kimi_calls(("functions.rain:0", "{}"), ("functions.clock:1", "{}"))
    answer = tools.parse("kimi", turn, [WEATHER, CLOCK], thinking=False)
    assert [call.name for call in answer.calls] == ["clock"]
    assert len(answer.problems) == 1


def test_parse_reasoning_that_does_not_end_has_no_content():
    answer = tools.parse("glm", "still thinking" + glm_call("clock"), [CLOCK])
    assert (answer.content, answer.calls) == ("", ())
    assert answer.problems == ("the reasoning does not end",)


NAMES = st.text("abcxyz_", min_size=1, max_size=5)
VALUES = st.one_of(st.integers(), st.booleans(), st.none(), st.lists(st.integers()), st.text("ab \n\"'{}é"))


@given(arguments=st.dictionaries(NAMES, VALUES, max_size=4), family=st.sampled_from(["kimi", "glm"]))
def test_parse_gives_back_every_call_that_chat_renders(arguments, family):
    kinds = {str: "string"}
    schema = {key: {"type": kinds[type(v)]} if type(v) in kinds else {} for key, v in arguments.items()}
    declared = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": schema}},
        }
    ]
    call_id = "functions.f:0" if family == "kimi" else "0"
    call = ToolCall("f", arguments, call_id)
    turn = Message("assistant", "Calling.", reasoning="Why not.", calls=(call,))
    rendered = chat.plain_text(
        chat.render(family, [Message("user", "go"), turn], options=chat.Options(generate=False))
    )
    answer = tools.parse(family, rendered.rpartition("<think>")[2].removesuffix("<|im_end|>"), declared)
    assert answer == tools.Answer("Why not.", "Calling.", (call,), ())
