import base64
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvmem.models import get_config
from kvmem.models.text import tokenizer as text
from kvmem.models.text.tokenizer import ByteTokenizer, JsonTokenizer, TiktokenTokenizer

PRINTABLE = st.text(st.sampled_from("\n\t" + "".join(map(chr, range(0x20, 0x7F)))))


@pytest.mark.parametrize("name", ["kimi_tiny_tp8", "glm_tiny_tp8", "kimi_tiny_parity"])
@given(words=PRINTABLE)
def test_byte_tokenizer_printable_text_round_trips(name, words):
    tokenizer = ByteTokenizer(get_config(name))
    ids = tokenizer.encode(words)
    assert all(0 <= id_ < 97 for id_ in ids)
    assert tokenizer.decode(ids) == words


@given(words=st.text())
def test_byte_tokenizer_with_room_for_all_bytes_round_trips_any_text(words):
    tokenizer = ByteTokenizer(get_config("kimi_k2.6"))
    assert tokenizer.decode(tokenizer.encode(words)) == words
    assert len(tokenizer.encode(words)) == len(words.encode())


@pytest.mark.parametrize("character", ["\r", "é", "\x00", "漢"])
def test_byte_tokenizer_other_characters_are_refused_by_name(character):
    with pytest.raises(ValueError, match="holds printable ASCII, newline and tab only"):
        ByteTokenizer(get_config("kimi_tiny_tp8")).encode("ab" + character)


@pytest.mark.parametrize("name", ["kimi_tiny_tp8", "glm_tiny_tp8", "kimi_k2.6", "glm_5.2"])
def test_byte_tokenizer_special_tokens_agree_with_config_and_are_distinct(name):
    config = get_config(name)
    tokenizer = ByteTokenizer(config)
    ids = list(tokenizer.specials.values())
    assert len(set(ids)) == len(ids) == len(text.SPECIALS[config.family])
    assert all(97 <= id_ < config.vocab_size for id_ in ids)
    ends = ["<|im_end|>"] if config.family == "kimi" else ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert tuple(tokenizer.special(end) for end in ends) == config.eos_ids
    if config.family == "kimi":
        assert tokenizer.special("[BOS]") == config.bos_id
        assert tokenizer.special("[PAD]") == config.pad_id


def test_byte_tokenizer_decodes_every_id_of_the_vocabulary():
    config = get_config("glm_tiny_tp8")
    tokenizer = ByteTokenizer(config)
    shown = [tokenizer.decode([id_]) for id_ in range(config.vocab_size)]
    assert len(set(shown)) == config.vocab_size
    assert (
        tokenizer.decode([*tokenizer.encode("hi"), tokenizer.special("<|user|>"), 159]) == "hi<|user|><|159|>"
    )
    with pytest.raises(ValueError, match="token id 160 is outside"):
        tokenizer.decode([160])


def test_byte_tokenizer_names_of_special_tokens_in_text_stay_text():
    tokenizer = ByteTokenizer(get_config("kimi_tiny_tp8"))
    assert tokenizer.special("<|im_end|>") not in tokenizer.encode("<|im_end|>")


def test_special_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'<nope>' is not in"):
        ByteTokenizer(get_config("kimi_tiny_tp8")).special("<nope>")


@pytest.fixture
def json_directory(tmp_path):
    """A byte-level BPE of 256 bytes and two merges, with a special and a plain added token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id_ for id_, token in enumerate([*alphabet, "he", "er"])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[("h", "e"), ("e", "r")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|user|>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_json_tokenizer_is_loaded_and_text_never_becomes_an_added_token(json_directory):
    tokenizer = text.load(json_directory, get_config("glm_5.2"))
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer.specials == {"<|user|>": 258, "<think>": 259}
    for words in ("a<|user|>b", "<think>", "<<think><|user|>", "there"):
        ids = tokenizer.encode(words)
        assert not {258, 259} & set(ids)
        assert tokenizer.decode(ids) == words
    assert 256 in tokenizer.encode("there")
    assert tokenizer.decode([258, *tokenizer.encode("hé"), 259]) == "<|user|>hé<think>"


def test_json_tokenizer_library_default_is_the_fault_that_cutting_prevents(json_directory):
    library = tokenizers.Tokenizer.from_file(str(json_directory / "tokenizer.json"))
    assert {258, 259} <= set(library.encode("<|user|><think>").ids)


def test_load_broken_tokenizer_json_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: no tokenizer"):
        text.load(tmp_path, get_config("glm_5.2"))


def test_load_tokenizer_larger_than_the_model_is_refused(json_directory):
    with pytest.raises(ValueError, match=r"tokenizer.json: 260 tokens, the model has 160"):
        text.load(json_directory, get_config("glm_tiny_tp8"))


def test_load_without_tokenizer_files_is_byte_level(tmp_path):
    assert isinstance(text.load(tmp_path, get_config("glm_tiny_tp8")), ByteTokenizer)


MERGES = [b"45", b"34", "字".encode()[:2], "字".encode(), "字a".encode(), b" he", b"'s", b"!\n", b"he"]


def write_ranks(directory, tokens):
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")


@pytest.fixture
def tiktoken_directory(tmp_path):
    write_ranks(tmp_path, [bytes([b]) for b in range(256)] + MERGES)
    return tmp_path


def test_tiktoken_tokenizer_special_ids_follow_the_ranks(tiktoken_directory):
    tokenizer = text.load(tiktoken_directory, get_config("kimi_k2.6"))
    assert isinstance(tokenizer, TiktokenTokenizer)
    base = 256 + len(MERGES)
    assert tokenizer.special("[BOS]") == base
    assert tokenizer.special("<|im_end|>") == base + 2
    assert tokenizer.special("[PAD]") == base + 255 == tokenizer.vocab_size - 1
    # With the published number of ranks the ids are the published ones.
    assert {n: i - base + 163584 for n, i in tokenizer.specials.items()} == text.KIMI_SPECIALS


def test_tiktoken_tokenizer_config_names_override_the_table(tiktoken_directory):
    base = 256 + len(MERGES)
    added = {str(base + 2): {"content": "<|other_end|>"}}
    (tiktoken_directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = text.load(tiktoken_directory, get_config("kimi_k2.6"))
    assert tokenizer.special("<|other_end|>") == base + 2
    assert "<|im_end|>" not in tokenizer.specials


@pytest.mark.parametrize(
    ("words", "merged"),
    [
        ("12345", [b"45"]),  # numbers split after three digits: 34 never merges
        ("34", [b"34"]),
        ("字a", ["字".encode()]),  # Han and Latin never share a piece
        ("x he's", [b" he", b"'s"]),  # a word takes its leading space and its contraction
        ("!\n", [b"!\n"]),  # punctuation takes its line breaks
        ("!\n\n", [b"!\n"]),
        ("x  he", [b" he"]),  # the last space goes with the word
    ],
)
def test_tiktoken_tokenizer_splits_as_kimi_does(tiktoken_directory, words, merged):
    tokenizer = text.load(tiktoken_directory, get_config("kimi_k2.6"))
    ids = tokenizer.encode(words)
    assert [MERGES[id_ - 256] for id_ in ids if id_ >= 256] == merged
    assert tokenizer.decode(ids) == words


@given(words=st.text())
def test_tiktoken_tokenizer_round_trips_any_text(tmp_path_factory, words):
    directory = tmp_path_factory.getbasetemp() / "ranks"
    if not directory.exists():
        directory.mkdir()
        write_ranks(directory, [bytes([b]) for b in range(256)] + MERGES)
    tokenizer = text.load(directory, get_config("kimi_k2.6"))
    assert tokenizer.decode(tokenizer.encode(words)) == words


def test_tiktoken_tokenizer_long_runs_are_cut_and_short_text_is_not(tiktoken_directory):
    tokenizer = text.load(tiktoken_directory, get_config("kimi_k2.6"))
    assert len(list(text._pieces("a " * 30_000))) == 1
    long = "x" * 60_000 + " " * 30_000 + "end"
    assert len(list(text._pieces(long))) == 4
    assert tokenizer.decode(tokenizer.encode(long)) == long


def test_tiktoken_tokenizer_special_names_in_text_stay_text(tiktoken_directory):
    tokenizer = text.load(tiktoken_directory, get_config("kimi_k2.6"))
    assert max(tokenizer.encode("<|im_end|><think>")) < 256 + len(MERGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [("YQ== 0\nnonsense\n", "line 2 is not"), ("YQ== 0\nYg== 2\n", r"ranks of 2 tokens are not 0\.\.1")],
    ids=["line", "gap"],
)
def test_tiktoken_tokenizer_broken_file_is_refused(tmp_path, content, message):
    (tmp_path / "tiktoken.model").write_text(content)
    with pytest.raises(ValueError, match=message):
        text.load(tmp_path, get_config("kimi_k2.6"))
