"""Tokenizers: the checkpoint's own (tokenizer.json, tiktoken.model), else one token a byte.

Text never becomes a special token: a user who types ``<|im_end|>`` gets its characters. Special tokens enter
a prompt by name only (``special``), which is what ``kvmem.models.text.chat`` does.
"""

from __future__ import annotations

import base64
import binascii
import json
import pathlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tiktoken
import tokenizers

from kvmem.models.config import ModelConfig

KIMI_VOCABULARY, KIMI_RANKS = 163840, 163584
GLM_VOCABULARY = 154880
# Published ids. Kimi's are ranks + offset: a shorter rank file moves them.
KIMI_SPECIALS: dict[str, int] = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|start_header_id|>": 163590,
    "<|end_header_id|>": 163591,
    "[EOT]": 163593,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<think>": 163606,
    "</think>": 163607,
    "[UNK]": 163838,
    "[PAD]": 163839,
}
GLM_SPECIALS: dict[str, int] = {
    "<|endoftext|>": 154820,
    "[gMASK]": 154822,
    "<sop>": 154824,
    "<|system|>": 154826,
    "<|user|>": 154827,
    "<|assistant|>": 154828,
    "<|observation|>": 154829,
    "<think>": 154841,
    "</think>": 154842,
    "<tool_call>": 154843,
    "</tool_call>": 154844,
    "<tool_response>": 154845,
    "</tool_response>": 154846,
    "<arg_key>": 154847,
    "</arg_key>": 154848,
    "<arg_value>": 154849,
    "</arg_value>": 154850,
}
SPECIALS: dict[str, dict[str, int]] = {"kimi": KIMI_SPECIALS, "glm": GLM_SPECIALS}

# How Kimi splits text before merging: Han runs; words in mixed and upper case, with a leading mark and an
# English contraction; numbers of up to three digits; punctuation; line breaks; spaces. tiktoken knows ``&&``.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_SPLIT = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# tiktoken's regular expressions recurse; much longer pieces would overflow its stack.
_MAX_PIECE = 25_000


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
      specials: the id of each special token by its name.
      vocab_size: ids are below it.
    """

    specials: Mapping[str, int]
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; never a special token. ValueError if a character has no token."""
        return self._encode(text)

    def special(self, name: str) -> int:
        """The id of a special token; ValueError if the vocabulary has none of that name."""
        if name not in self.specials:
            raise ValueError(f"special token {name!r} is not in this tokenizer's {sorted(self.specials)}")
        return self.specials[name]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids below vocab_size: special tokens by name, ids without a token as ``<|id|>``."""
        names = {id_: name for name, id_ in self.specials.items()}
        text: list[str] = []
        plain: list[int] = []
        for id_ in ids:
            if not 0 <= id_ < self.vocab_size:
                raise ValueError(f"token id {id_} is outside the vocabulary of {self.vocab_size}")
            if id_ not in names and self._has(id_):
                plain.append(id_)
                continue
            text += [self._decode(plain), names.get(id_, f"<|{id_}|>")]
            plain = []
        return "".join([*text, self._decode(plain)])

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: Sequence[int]) -> str: ...

    @abstractmethod
    def _has(self, id_: int) -> bool: ...


class ByteTokenizer(Tokenizer):
    """One token a byte, for checkpoints without a tokenizer.

    A vocabulary with room for 256 bytes and the family's special tokens holds every byte (UTF-8). A smaller
    one (the tiny models) holds 97: newline, tab and printable ASCII, as ids 0..96; other characters are
    refused. Special tokens have their published ids in a vocabulary of the published size; in others, those
    that config.json names (bos, eos, pad) have the ids it gives, and the rest the first free ids.
    """

    PRINTABLE = b"\n\t" + bytes(range(0x20, 0x7F))

    def __init__(self, config: ModelConfig):
        names = SPECIALS[config.family]
        self.vocab_size = config.vocab_size
        room = config.vocab_size - len(names)
        self._alphabet = bytes(range(256)) if room >= 256 else self.PRINTABLE
        if config.vocab_size < len(self._alphabet):
            raise ValueError(
                f"vocab_size={config.vocab_size}: a byte-level tokenizer needs at least {len(self._alphabet)}"
            )
        self._ids = {byte: id_ for id_, byte in enumerate(self._alphabet)}
        if config.vocab_size in (KIMI_VOCABULARY, GLM_VOCABULARY):
            self.specials = names
        else:
            self.specials = _place(names, config, len(self._alphabet))

    def _encode(self, text: str) -> list[int]:
        ids = []
        for character in text:
            for byte in character.encode():
                if byte not in self._ids:
                    raise ValueError(
                        f"character {character!r}: the byte-level vocabulary of {self.vocab_size} tokens "
                        "holds printable ASCII, newline and tab only"
                    )
                ids.append(self._ids[byte])
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        return bytes(self._alphabet[id_] for id_ in ids).decode(errors="replace")

    def _has(self, id_: int) -> bool:
        return id_ < len(self._alphabet)


def _place(names: Iterable[str], config: ModelConfig, first: int) -> dict[str, int]:
    """Ids at or above ``first``: of the tokens that the config names, then of the rest while room is."""
    ends = {"kimi": ("<|im_end|>",), "glm": ("<|endoftext|>", "<|user|>", "<|observation|>")}[config.family]
    pinned = dict(zip(ends, config.eos_ids))
    if config.family == "kimi":
        pinned |= {n: i for n, i in (("[BOS]", config.bos_id), ("[PAD]", config.pad_id)) if i is not None}
    placed = {name: id_ for name, id_ in pinned.items() if id_ >= first}
    free = iter(sorted(set(range(first, config.vocab_size)) - set(placed.values())))
    for name in names:
        if name not in pinned and (id_ := next(free, None)) is not None:
            placed[name] = id_
    return placed


class JsonTokenizer(Tokenizer):
    """A ``tokenizer.json``, read by the tokenizers library."""

    def __init__(self, path: pathlib.Path):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: no tokenizer: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: id_ for id_, token in added.items()}
        self.vocab_size = max([self._tokenizer.get_vocab_size() - 1, *added]) + 1
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def _encode(self, text: str) -> list[int]:
        # The library turns the name of an added token into that token wherever it finds it: text is cut
        # inside each such name, so that none is left to find.
        ids, start = [], 0
        for match in self._special.finditer(text):
            ids += self._tokenizer.encode(text[start : match.start() + 1], add_special_tokens=False).ids
            start = match.start() + 1
        return ids + self._tokenizer.encode(text[start:], add_special_tokens=False).ids

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False) if ids else ""

    def _has(self, id_: int) -> bool:
        return self._tokenizer.id_to_token(id_) is not None


class TiktokenTokenizer(Tokenizer):
    """Kimi's ``tiktoken.model``: base64 tokens with ranks, special tokens after the last rank."""

    def __init__(self, path: pathlib.Path):
        ranks = _read_ranks(path)
        base = len(ranks)
        self.specials = {name: base + id_ - KIMI_RANKS for name, id_ in KIMI_SPECIALS.items()}
        # What tokenizer_config.json says of added tokens goes before the published table.
        config = path.with_name("tokenizer_config.json")
        if config.exists():
            added = json.loads(config.read_text()).get("added_tokens_decoder", {})
            named = {token["content"]: int(id_) for id_, token in added.items()}
            taken = set(named.values())
            self.specials = {n: i for n, i in self.specials.items() if i not in taken} | named
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=KIMI_SPLIT, mergeable_ranks=ranks, special_tokens=dict(self.specials)
        )
        self._base = base
        self.vocab_size = base + KIMI_VOCABULARY - KIMI_RANKS

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _pieces(text):
            ids += self._encoding.encode_ordinary(piece)
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids), errors="replace")

    def _has(self, id_: int) -> bool:
        return id_ < self._base


def _read_ranks(path: pathlib.Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path}: line {number} is not 'base64 rank': {line[:40]!r}") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: the ranks of {len(ranks)} tokens are not 0..{len(ranks) - 1}")
    return ranks


def _pieces(text: str) -> Iterator[str]:
    """Cuts runs without white space, or of nothing but white space, that are too long for tiktoken."""
    start = 0
    for match in re.finditer(rf"\s{{{_MAX_PIECE}}}|\S{{{_MAX_PIECE}}}", text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def load(directory: str | pathlib.Path, config: ModelConfig) -> Tokenizer:
    """The directory's tokenizer.json or tiktoken.model, else a ByteTokenizer.

    ValueError if the file is broken or holds more tokens than the model's vocabulary.
    """
    directory = pathlib.Path(directory)
    readers = {"tokenizer.json": JsonTokenizer, "tiktoken.model": TiktokenTokenizer}
    for name, reader in readers.items():
        if (directory / name).exists():
            tokenizer = reader(directory / name)
            if tokenizer.vocab_size > config.vocab_size:
                raise ValueError(
                    f"{directory / name}: {tokenizer.vocab_size} tokens, the model has {config.vocab_size}"
                )
            return tokenizer
    return ByteTokenizer(config)
