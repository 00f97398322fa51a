import json

import pytest

from experiments import request_file


def _read(tmp_path, *rows):
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return request_file.read(path, lambda text: list(text.encode()), vocab_size=150, max_new_tokens=7)


def test_read_of_text_and_tokens_gives_requests_in_order(tmp_path):
    first, second = _read(
        tmp_path,
        {"prompt": "Hi"},
        "",
        {"id": "b", "tokens": [3, 4, 5], "max_new_tokens": 2, "sampling": {"temperature": 0.5, "seed": 9}},
    )
    assert (first.request_id, first.prompt_tokens, first.max_new_tokens) == ("line1", (72, 105), 7)
    assert (second.request_id, second.prompt_tokens, second.max_new_tokens) == ("b", (3, 4, 5), 2)
    assert (second.sampling.temperature, second.sampling.seed) == (0.5, 9)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ("{", "r.jsonl:2"),
        ("[1]", "a request is a JSON object"),
        ({"tokens": [1], "temperature": 1}, "unknown fields"),
        ({"prompt": "a", "tokens": [1]}, "either a prompt or tokens"),
        ({"id": "x"}, "either a prompt or tokens"),
        ({"prompt": 3}, "must be text"),
        ({"tokens": [1, "2"]}, "list of integers"),
        ({"tokens": []}, "the prompt is empty"),
        ({"tokens": [150]}, r"outside \[0, 150\)"),
        ({"tokens": [1], "max_new_tokens": 0}, "max_new_tokens=0"),
        ({"tokens": [1], "sampling": {"beam": 4}}, "unknown sampling options"),
        ({"tokens": [1], "id": "line1"}, "is there twice"),
    ],
    ids=str,
)
def test_read_of_a_malformed_row_names_file_line_and_rule(tmp_path, row, rule):
    with pytest.raises(ValueError, match=rule) as caught:
        _read(tmp_path, {"tokens": [1, 2]}, row)
    assert "r.jsonl:2" in str(caught.value)


def test_read_of_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no request"):
        _read(tmp_path, "")
