"""Detokenizer: pieces that join to the full decode, whatever the tokenizer and the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from pageforge.engine.text import UNKNOWN, Detokenizer

# --- tokenizers -----------------------------------------------------------------------------

END = "</end>"
TEXT = [
    "Hello world, 你好吗? 👍🏽 👨‍👩‍👧 naïve café e\u0301",
    "the world and the café 你们好 👍👍 🇨🇭",
]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def bytes_only() -> PreTrainedTokenizerBase:
    """Each byte a token: every character can be split anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend)


def byte_level() -> PreTrainedTokenizerBase:
    """As GPT-2: trained merges, of which some hold parts of two characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return wrapped(backend)


def byte_fallback() -> PreTrainedTokenizerBase:
    """As Llama 2: the first piece drops its space, rare characters are runs of byte tokens."""
    pieces = ["<unk>", *BYTE_PIECES, "▁", *"Helowrdthcafn,?你好", UNKNOWN, "▁world", "▁t"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [("▁", "t")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrapped(backend)


def metaspace() -> PreTrainedTokenizerBase:
    """As XLM-R: unigram pieces, each with its space in front."""
    pieces = ["<unk>", "▁", *"Helowrdthcafn,?你好", "▁world", "▁the", "lo"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return wrapped(backend)


def word_piece() -> PreTrainedTokenizerBase:
    """As BERT: spaces come with the next word; transformers would clean them up."""
    pieces = [
        "[UNK]",
        *"Helowrdthcafn,?.你好",
        *(f"##{letter}" for letter in "Helowrdthcafn好"),
        "do",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    tokenizer = wrapped(backend)
    tokenizer.clean_up_tokenization_spaces = True
    return tokenizer


def end_of_word() -> PreTrainedTokenizerBase:
    """As the first GPT: a word's last piece stands for the space behind it, but not at the end."""
    letters = "Helowrdthcafn,?你好"
    pieces = ["<unk>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder()
    return wrapped(backend)


def slow_bytes() -> PreTrainedTokenizerBase:
    """A tokenizer in Python, which leaves bytes out that make no character."""
    return ByT5Tokenizer(extra_ids=0)


MAKERS = [
    bytes_only,
    byte_level,
    byte_fallback,
    metaspace,
    word_piece,
    end_of_word,
    slow_bytes,
]
made = cache(lambda maker: maker())
every_tokenizer = pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip: bool = True) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert isinstance(ids, list)
    return ids


# --- strategies -----------------------------------------------------------------------------

words = st.sampled_from(
    [
        "Hello",
        " world",
        ",",
        " the",
        "你好",
        "👍🏽",
        "👨‍👩‍👧",
        "e\u0301",
        UNKNOWN,
        "\n",
        " ",
        "?",
        END,
    ]
)
texts = st.lists(words | st.text(max_size=4), max_size=12).map("".join)


@st.composite
def ids_for(draw: st.DrawFn, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Text as it is encoded, and ids as a model without sense makes them, past the vocabulary."""
    end = ids_of(tokenizer, END)
    any_id = st.integers(0, len(tokenizer) + 1 if tokenizer.is_fast else 258)
    parts = texts.map(lambda text: ids_of(tokenizer, text)) | st.lists(any_id, max_size=12)
    # Halves of characters, so that runs of byte tokens end inside one.
    parts |= texts.map(lambda text: ids_of(tokenizer, text)[:-1]) | st.just(end)
    return [i for part in draw(st.lists(parts, max_size=5)) for i in part]


@st.composite
def split(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@st.composite
def stops_in(draw: st.DrawFn, text: str) -> tuple[str, ...]:
    """Stop strings: parts of the text, also overlapping ones, and strings that almost are."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        part = text[start : start + draw(st.integers(1, 6))]
        found.append(part + draw(st.sampled_from(["", "", "", "x", "好"])))
    return tuple(stop for stop in found if stop)


# --- the rules, said plainly ----------------------------------------------------------------


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the text is cut: read it letter by letter until it ends with a stop string."""
    for end in range(len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return end - len(stop), stop
    return None


def held_for(text: str, stops: Sequence[str]) -> int:
    """Letters at the end of the text with which a stop string may begin."""
    return max(
        k for k in range(len(text) + 1) if not k or any(s.startswith(text[-k:]) for s in stops)
    )


# --- join -----------------------------------------------------------------------------------


@every_tokenizer
@settings(max_examples=60)
@given(data=st.data())
def test_pieces_join_to_the_full_decode(maker, data) -> None:
    tokenizer = made(maker)
    skip = data.draw(st.booleans())
    ids = data.draw(ids_for(tokenizer))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    whole = decode(tokenizer, ids, skip)
    shown = ""
    for part in data.draw(split(ids)):
        shown += detokenizer.push(part)
        assert whole.startswith(shown)  # no half character, nothing taken back
    shown += detokenizer.finish()
    assert shown == whole
    assert detokenizer.stopped is None
    assert detokenizer.num_tokens == len(ids)
    assert detokenizer.finish() == ""


@every_tokenizer
@settings(max_examples=60)
@given(data=st.data())
def test_a_stop_string_ends_the_text(maker, data) -> None:
    tokenizer = made(maker)
    ids = data.draw(ids_for(tokenizer))
    stops = data.draw(stops_in(decode(tokenizer, ids)))
    assume(not any(UNKNOWN in stop for stop in stops))
    # Generation ends with the first token after which the text holds a stop string.
    texts = [decode(tokenizer, ids[:k]) for k in range(len(ids) + 1)]
    last = next((k for k, text in enumerate(texts) if first_stop(text, stops)), len(ids))
    found = first_stop(texts[last], stops)
    want = texts[last][: found[0]] if found else texts[last]

    detokenizer = Detokenizer(tokenizer, stop=stops)
    shown = ""
    for part in data.draw(split(ids)):
        shown += detokenizer.push(part)
        assert want.startswith(shown)  # nothing of what is cut
    assert detokenizer.stopped == (found[1] if found else None)
    shown += detokenizer.finish()
    assert shown == want
    assert detokenizer.stopped == (found[1] if found else None)
    num_tokens = detokenizer.num_tokens
    if not found:
        assert num_tokens == len(ids)
        return
    assert texts[num_tokens].startswith(want)
    if UNKNOWN not in want:  # else half a character may look like the whole one
        assert not any(text.startswith(want) for text in texts[:num_tokens])
    assert detokenizer.push(ids) == detokenizer.finish() == ""  # late tokens are ignored
    assert detokenizer.num_tokens == num_tokens


@pytest.mark.parametrize("maker", [bytes_only, byte_level], ids=lambda maker: maker.__name__)
@settings(max_examples=60)
@given(data=st.data())
def test_nothing_is_held_back_without_need(maker, data) -> None:
    tokenizer = made(maker)
    ids = data.draw(ids_for(tokenizer))
    stops = data.draw(st.just(()) | stops_in(decode(tokenizer, ids)))
    detokenizer = Detokenizer(tokenizer, stop=stops)
    shown = ""
    for k, token_id in enumerate(ids, 1):
        shown += detokenizer.push([token_id])
        if detokenizer.stopped is not None:
            break
        settled = decode(tokenizer, ids[:k])
        settled = settled[: len(settled) - settled.endswith(UNKNOWN)]
        assert len(shown) == len(settled) - held_for(settled, stops)


# --- by eye ---------------------------------------------------------------------------------


def pieces(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


def of_pieces(*names: str) -> list[int]:
    return [made(byte_fallback).convert_tokens_to_ids(name) for name in names]


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = made(bytes_only)
    ids = ids_of(tokenizer, "é👍a")
    assert pieces(Detokenizer(tokenizer), ids) == ["", "é", "", "", "", "👍", "a", ""]


def test_half_a_character_at_the_end_is_what_the_tokenizer_makes_of_it() -> None:
    tokenizer = made(bytes_only)
    ids = ids_of(tokenizer, "a👍")[:-1]
    assert pieces(Detokenizer(tokenizer), ids) == ["a", "", "", "", UNKNOWN]


def test_a_replacement_character_of_the_text_is_kept() -> None:
    tokenizer = made(bytes_only)
    ids = ids_of(tokenizer, f"{UNKNOWN}{UNKNOWN}a{UNKNOWN}")
    shown = pieces(Detokenizer(tokenizer), ids)
    assert shown == ["", "", "", UNKNOWN, "", "", UNKNOWN + "a", "", "", "", UNKNOWN]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    # 吗 is there with its third byte, but a fourth byte makes four U+FFFD of it.
    run = of_pieces("<0xE5>", "<0x90>", "<0x97>")
    tokenizer = made(byte_fallback)
    assert pieces(Detokenizer(tokenizer), [*run, *of_pieces("l")]) == ["", "", "", "吗l", ""]
    cut = [*run, *of_pieces("<0xE5>")]
    assert pieces(Detokenizer(tokenizer), cut) == ["", "", "", "", UNKNOWN * 4]
    assert pieces(Detokenizer(tokenizer), run) == ["", "", "", "吗"]


def test_a_stop_string_that_is_a_byte_token_stops_at_once() -> None:
    detokenizer = Detokenizer(made(byte_fallback), stop=("\n",))
    assert [detokenizer.push([i]) for i in of_pieces("l", "o", "<0x0A>")] == ["l", "o", ""]
    assert detokenizer.stopped == "\n"
    assert detokenizer.num_tokens == 2


def test_a_replacement_character_parts_what_stands_beside_it() -> None:
    # "l", U+FFFD and the byte "o" are no "lo": the run goes on.
    ids = of_pieces("l", UNKNOWN, "<0x6F>", "<0xE5>")
    shown = pieces(Detokenizer(made(byte_fallback), stop=("lo",)), ids)
    assert shown == ["", "", "", "", f"l{UNKNOWN * 3}"]


def test_only_what_may_begin_a_stop_string_is_held() -> None:
    ids = of_pieces("<0x61>", "<0x61>", "<0x62>", "l")  # comes as one: no "a" in it goes on rightly
    shown = pieces(Detokenizer(made(byte_fallback), stop=("a----",)), ids)
    assert shown == ["", "", "", "aabl", ""]


def test_the_first_piece_alone_drops_its_space() -> None:
    ids = of_pieces("▁t", "h", "▁t", "▁", "▁", "▁world")
    assert pieces(Detokenizer(made(byte_fallback)), ids) == ["t", "h", " t", " ", " ", " world", ""]


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped", "num_tokens"),
    [
        ("ab\n\ncd", ("\n\n",), ["a", "b", "", ""], "\n\n", 2),
        ("ab\ncd", ("\n\n",), ["a", "b", "", "\nc", "d"], None, 5),
        ("xDEFxDEFGHIJz", ("DEFGHIJ",), ["x", "", "", "", "DEFx", "", "", "", "", "", "", ""],
         "DEFGHIJ", 5),
        ("aab", ("ab",), ["", "a", ""], "ab", 1),  # the held letter is let go, the next one held
        ("abab", ("ababc",), ["", "", "", ""], None, 4),  # held to the end
        ("abcd", ("bcd", "c"), ["a", "", "b"], "c", 2),  # the first to end, not to begin
        ("abcd", ("c", "bc"), ["a", "", ""], "bc", 1),  # the longest that ends there
        ("abcd", ("a",), [""], "a", 0),
    ],
)  # fmt: skip
def test_stop_strings_by_eye(text, stops, shown, stopped, num_tokens) -> None:
    tokenizer = made(bytes_only)
    detokenizer = Detokenizer(tokenizer, stop=stops)
    ids = ids_of(tokenizer, text)
    got = []
    for token_id in ids:
        got.append(detokenizer.push([token_id]))
        if detokenizer.stopped is not None:
            break
    assert got == shown
    rest = detokenizer.finish()
    assert (detokenizer.stopped, detokenizer.num_tokens) == (stopped, num_tokens)
    assert rest == ("" if stopped else text[len("".join(shown)) :])
    at_once = Detokenizer(tokenizer, stop=stops)
    assert at_once.push(ids) + at_once.finish() == "".join(got) + rest
    assert (at_once.stopped, at_once.num_tokens) == (stopped, num_tokens)


@pytest.mark.parametrize(
    ("names", "stop", "text", "num_tokens"),
    [
        (["l", "▁world"], "world", "l ", 2),  # begins inside the second token: it stays
        (["l", "▁world"], " world", "l", 1),
        (["l", "▁world"], "rl", "l wo", 2),
        (["l", "▁world", "o"], "do", "l worl", 2),
        (["l", "</end>", "o"], "o", "l", 1),
        (["<0xE5>", "<0x90>", "<0x97>", "l"], "l", "吗", 3),
        (["<0xE5>", "<0x90>", "<0x97>", "<0x0A>", "l"], "\n", "吗", 3),
        (["<0xE5>", "<0x90>", "<0x97>", "<0x0A>", "l"], "\nl", "吗", 3),
        (["l", "<0xE5>", "<0x90>", "<0x97>", "o"], "吗", "l", 1),
        (["<0xE5>", "<0x90>", "</end>", "<0x97>", "l"], "l", "吗", 4),
        (["<0xE5>", "<0x90>", "l"], "l", UNKNOWN * 2, 2),
        ([UNKNOWN, "<0x0A>", "l"], "l", f"{UNKNOWN}\n", 2),
        ([UNKNOWN, "l"], "l", UNKNOWN, 1),
    ],
)
def test_ids_and_text_agree_after_a_stop(names, stop, text, num_tokens) -> None:
    detokenizer = Detokenizer(made(byte_fallback), stop=(stop,))
    assert "".join(pieces(detokenizer, of_pieces(*names))) == text
    assert detokenizer.stopped == stop
    assert detokenizer.num_tokens == num_tokens


def test_a_stop_string_of_replacement_characters_is_found_at_the_end() -> None:
    tokenizer = made(bytes_only)
    detokenizer = Detokenizer(tokenizer, stop=(UNKNOWN,))
    assert detokenizer.push(ids_of(tokenizer, f"ab{UNKNOWN}")) == "ab"
    assert detokenizer.stopped is None
    assert detokenizer.finish() == ""
    assert (detokenizer.stopped, detokenizer.num_tokens) == (UNKNOWN, 2)


def test_a_character_is_no_stop_string_before_it_is_whole() -> None:
    tokenizer = made(bytes_only)
    detokenizer = Detokenizer(tokenizer, stop=(UNKNOWN,))
    assert "".join(pieces(detokenizer, ids_of(tokenizer, "a👍b"))) == "a👍b"
    assert detokenizer.stopped is None


def test_an_empty_completion_has_no_text() -> None:
    detokenizer = Detokenizer(made(bytes_only), stop=("a",))
    assert detokenizer.push([]) == detokenizer.finish() == ""
    assert (detokenizer.stopped, detokenizer.num_tokens) == (None, 0)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop: expected strings that are not empty"):
        Detokenizer(made(bytes_only), stop=("a", ""))


# --- faults and cost ------------------------------------------------------------------------


class Watched:
    """A tokenizer that counts the ids that it decodes, and cannot decode one of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, broken: int = -1):
        self.tokenizer, self.broken, self.decoded = tokenizer, broken, 0
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **options) -> str:
        self.decoded += len(token_ids)
        if self.broken in token_ids:
            raise KeyError("no such token")
        return self.tokenizer.decode(token_ids, skip_special_tokens, **options)


def test_what_the_tokenizer_raises_passes_through() -> None:
    tokenizer = made(bytes_only)
    a, b = ids_of(tokenizer, "ab")
    detokenizer = Detokenizer(Watched(tokenizer, broken=b))
    assert detokenizer.push([a]) == "a"
    with pytest.raises(KeyError, match="no such token"):
        detokenizer.push([b])


class Interrupted:
    """A tokenizer in whose call number `at` an interrupt comes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, at: int):
        self.tokenizer, self.left = tokenizer, at

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **options) -> str:
        self.count()
        return self.tokenizer.decode(token_ids, skip_special_tokens, **options)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        self.count()
        return self.tokenizer.convert_ids_to_tokens(token_id)


@pytest.mark.parametrize("stop", [(), ("\n",), ("好 the",)])
@pytest.mark.parametrize("maker", [bytes_only, byte_fallback, metaspace])
def test_an_interrupted_call_can_be_made_again(maker, stop: tuple[str, ...]) -> None:
    tokenizer = made(maker)
    text = f"Hello 你好 👍 the{UNKNOWN} world, {END}naïve\n\nthe 你好 the"
    ids = [*ids_of(tokenizer, text), 10**6, *ids_of(tokenizer, "👍")[:1]]
    whole = Detokenizer(tokenizer, stop=stop)
    want = pieces(whole, ids)
    at, is_interrupted = 0, True
    while is_interrupted:  # in every call there is
        at, is_interrupted = at + 1, False
        detokenizer = Detokenizer(Interrupted(tokenizer, at), stop=stop)
        found = []
        for call in [*(partial(detokenizer.push, [each]) for each in ids), detokenizer.finish]:
            try:
                found.append(call())
            except KeyboardInterrupt:
                is_interrupted = True
                found.append(call())
        assert found == want
        assert (detokenizer.stopped, detokenizer.num_tokens) == (whole.stopped, whole.num_tokens)
    assert at > len(ids) / 2


FLOODS = {
    "text": (bytes_only, "Hello world " * 100),
    "emoji": (bytes_only, "👍" * 400),
    "U+FFFD": (bytes_only, UNKNOWN * 400),
    "the end token": (bytes_only, END * 1000),
    "half a character, then the end token": (byte_fallback, f"Hello{UNKNOWN}" + END * 1000),
    "lines of byte tokens": (byte_fallback, "\n" * 1000),
    "characters of byte tokens": (byte_fallback, "吗 吗" * 200),
}


def check_cost(maker, ids: list[int], stop: tuple[str, ...]) -> None:
    tokenizer = Watched(made(maker))
    assert "".join(pieces(Detokenizer(tokenizer, stop=stop), ids)) == decode(made(maker), ids)
    assert tokenizer.decoded < 30 * len(ids)  # it grows with the square, were the window to grow


@pytest.mark.parametrize("stop", [(), ("#",)], ids=["", "with a stop"])
@pytest.mark.parametrize(("maker", "text"), FLOODS.values(), ids=FLOODS.keys())
def test_a_token_costs_the_same_at_any_length(maker, text: str, stop: tuple[str, ...]) -> None:
    check_cost(maker, ids_of(made(maker), text), stop)


def test_half_characters_without_end_cost_the_same() -> None:
    check_cost(bytes_only, ids_of(made(bytes_only), "👍")[:1] * 1000, ())


class Hesitant:
    """A tokenizer that takes the last letter back with every second token."""

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return chr(token_id)

    def decode(self, token_ids: list[int], **options) -> str:
        text = "".join(map(chr, token_ids))
        return text if len(text) % 2 else text[:-2]


def test_what_was_shown_is_neither_taken_back_nor_said_twice() -> None:
    detokenizer = Detokenizer(Hesitant())
    assert pieces(detokenizer, list(map(ord, "abcde"))) == ["a", "", "bc", "", "de", ""]


def test_ids_past_the_vocabulary_cost_nothing() -> None:
    tokenizer = Watched(made(bytes_only))
    detokenizer = Detokenizer(tokenizer)
    assert "".join(pieces(detokenizer, [10**6] * 1000)) == ""
    assert detokenizer.num_tokens == 1000
    assert tokenizer.decoded == 0
