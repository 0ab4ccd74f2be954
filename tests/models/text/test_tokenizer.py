"""Ids and text: special tokens in documents, BOS, offsets, streaming and damaged files."""

import json

import numpy as np
import pytest
import tokenizers
from refusal import refused
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxrag.base.errors import TokenizerError
from jaxrag.models.text import tokenizer as tokenizer_module
from jaxrag.models.text.tokenizer import Tokenizer, check_vocab

CORPUS = [
    "The cache keeps keys and values of every chunk, so a document is never read twice.",
    "Quick foxes, 42 lazy dogs & naïve cafés.",
    "缓存保存每个文档块的键和值，所以文档不会被读取两次。你好，世界！",
    "def f(x):\n    return x ** 2  # squares\n",
]
TEXTS = [
    "",
    " ",
    "The cache keeps keys.",
    "  leading and trailing  ",
    "你好，世界！ 🎉👩‍🚀 naïve",
    "tabs\tand\n\nnew lines",
    "unseen: Ω≈ç√∫ ☃",
]
SPECIAL = ["<s>", "</s>", "<|user|>"]


def byte_level():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback():
    """As Llama 2 and Mistral have it: words start with U+2581, unknown characters fall to bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # so that no token spans two words
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=460, special_tokens=["<unk>", *SPECIAL, *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    # The trainer marks the bytes as special; in released tokenizers they are plain vocabulary.
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = [t for t in values["added_tokens"] if t["content"] not in bytes_]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(values))
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return tokenizer


def metaspace():
    """As newer conversions have it: a pre-tokenizer in place of the normalizer."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


MAKERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def write(directory, tokenizer, **config):
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "model"
    return Tokenizer.load(
        write(directory, MAKERS[request.param](), bos_token="<s>", eos_token={"content": "</s>"})
    )


@pytest.mark.parametrize("text", TEXTS)
def test_decode_inverts_encode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    # A Metaspace pre-tokenizer adds no space before a space, and its decoder strips one.
    assert tokenizer.decode(ids) in (text, text.removeprefix(" "))


def test_no_special_token_is_added(tokenizer):
    assert tokenizer.encode("").size == 0
    ids = tokenizer.encode("The cache")
    assert tokenizer.bos_id not in ids
    assert tokenizer.eos_ids[0] not in ids


def test_special_tokens_spelled_in_a_document_stay_text(tokenizer):
    text = "before <|user|> after </s>"
    plain = tokenizer.encode(text)
    assert not set(plain.tolist()) & {tokenizer.bos_id, *tokenizer.eos_ids}
    assert tokenizer.decode(plain) == text
    marked = tokenizer.encode(text, special=True)
    assert marked[-1] == tokenizer.eos_ids[0]
    assert len(marked) < len(plain)
    assert "</s>" not in tokenizer.decode(marked)
    assert "</s>" in tokenizer.decode(marked, skip_special=False)
    np.testing.assert_array_equal(tokenizer.encode(text), plain)  # the calls do not interfere


def test_batch_equals_one_by_one(tokenizer):
    texts = [*TEXTS, "x <s> y"]
    for got, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, tokenizer.encode(text))


def test_the_longest_token_is_added_or_of_the_vocabulary():
    made = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "falcon": 1}, unk_token="<unk>"))
    assert Tokenizer(made.to_str().encode(), {}, {}).longest_token == len("falcon")
    made.add_special_tokens(["<|a long mark|>"])
    assert Tokenizer(made.to_str().encode(), {}, {}).longest_token == len("<|a long mark|>")


def test_offsets_are_characters(tokenizer):
    text = "你好 naïve 🎉 <s> dogs"
    ids, offsets = tokenizer.encode_with_offsets(text)
    np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert len(offsets) == len(ids)
    assert offsets[-1][1] == len(text)
    covered = {i for start, end in offsets for i in range(start, end)}
    assert {i for i, character in enumerate(text) if character != " "} <= covered


def pieces_of(tokenizer, ids):
    stream = tokenizer.stream()
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_concatenate_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_streaming_hands_out_text_as_it_comes(tokenizer):
    pieces = pieces_of(tokenizer, tokenizer.encode("The cache keeps keys and values."))
    assert sum(bool(piece) for piece in pieces) > 4
    assert pieces[-1] == ""


@pytest.mark.parametrize("length", [1, 5, 40, 400])
def test_streaming_any_ids_equals_decode(tokenizer, length):
    rng = np.random.default_rng(length)
    for _ in range(20):
        ids = rng.integers(0, tokenizer.vocab_size, length).tolist()
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_window_that_begins_with_skipped_tokens_keeps_its_spaces(tokenizer):
    text = tokenizer.encode(CORPUS[0]).tolist()
    ids = text * 3 + [tokenizer.bos_id] * 80 + tokenizer.encode("a b").tolist() + text * 2
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_streaming_stays_linear(tokenizer, monkeypatch):
    longest = 0
    decode = tokenizer.decode

    def watch(ids, skip_special=True):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, skip_special)

    monkeypatch.setattr(tokenizer, "decode", watch)
    pieces_of(tokenizer, tokenizer.encode(" ".join(CORPUS[:2] * 20)))
    assert longest < 100


@pytest.mark.parametrize("spelled", ["\U0001f680", "\u00e9"])
def test_a_token_that_completes_no_character_costs_what_others_do(tokenizer, monkeypatch, spelled):
    """A part of one, again and again."""
    decode, read = tokenizer.decode, []

    def watch(ids, skip_special=True):
        read.append(len(ids))
        return decode(ids, skip_special)

    monkeypatch.setattr(tokenizer, "decode", watch)
    ids = [int(tokenizer.encode(spelled)[-2])] * 3000
    assert "".join(pieces_of(tokenizer, ids)) == decode(ids)
    assert sum(read) < 100 * len(ids)


def test_a_token_has_its_bytes(tokenizer):
    for text in ["a b", "\U0001f680 na\u00efve"]:
        spelled = b"".join(tokenizer.token_bytes(int(it)) for it in tokenizer.encode(text))
        assert spelled.decode().strip() == text
    assert tokenizer.token_bytes(tokenizer.bos_id) == b"<s>"
    assert tokenizer.token_bytes(10**6) is None


def template(*names):
    return processors.TemplateProcessing(
        single=[*names, "$A"], special_tokens=[(name, SPECIAL.index(name)) for name in names]
    )


@pytest.mark.parametrize(
    ("leading", "config", "expected"),
    [
        ([], {}, []),
        (["<s>"], {}, [0]),  # Llama 3: only the post-processor says so
        ([], {"add_bos_token": True}, [0]),
        (["<s>"], {"add_bos_token": False}, []),
        (["<|user|>", "</s>"], {}, [2, 1]),  # GLM: two tokens, neither of them BOS
    ],
)
def test_what_leads_a_prompt(tmp_path, leading, config, expected):
    raw = byte_level()
    if leading:
        raw.post_processor = template(*leading)
    tokenizer = Tokenizer.load(write(tmp_path, raw, bos_token="<s>", **config))
    assert tokenizer.leading_ids.tolist() == expected
    assert tokenizer.encode("").size == 0


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path):
    directory = write(tmp_path, byte_level(), bos_token=None)
    (directory / "special_tokens_map.json").write_text(
        '{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}}'
    )
    tokenizer = Tokenizer.load(directory)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    raw = byte_level()
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    tokenizer = Tokenizer.load(write(tmp_path, raw))
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]
    assert len(tokenizer.encode("a")) == 1


def test_digest_follows_the_file(tmp_path):
    first = Tokenizer.load(write(tmp_path / "a", byte_level()))
    same = Tokenizer.load(write(tmp_path / "b", byte_level(), chat_template="x"))
    other = Tokenizer.load(write(tmp_path / "c", metaspace()))
    assert first.digest == same.digest != other.digest


def test_unusable_directories_are_refused(tmp_path):
    with refused(TokenizerError, "tokenizer.json"):
        Tokenizer.load(tmp_path)
    write(tmp_path, byte_level(), bos_token="<absent>")
    with refused(TokenizerError, "'<absent>'"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with refused(TokenizerError, "tokenizer_config.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with refused(TokenizerError, "tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer, tiny_config):
    check_vocab(tokenizer, tiny_config(vocab_size=tokenizer.vocab_size))
    with refused(TokenizerError, tokenizer.vocab_size - 1):
        check_vocab(tokenizer, tiny_config(vocab_size=tokenizer.vocab_size - 1))


def test_chat_templates_by_name(tmp_path):
    user = [{"role": "user", "content": "Why?"}]
    directory = write(tmp_path, byte_level(), bos_token="<s>")
    bare = Tokenizer.load(directory)
    assert not bare.has_chat_template
    with refused(TokenizerError):
        bare.render_chat(user)

    listed = [{"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}]
    listed += [{"name": "rag", "template": "rag"}]
    write(tmp_path, byte_level(), bos_token="<s>", chat_template=listed)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.has_chat_template
    text = tokenizer.render_chat(user)
    assert text == "<s>Why?"
    assert tokenizer.encode(text, special=True)[0] == tokenizer.bos_id
    assert tokenizer.render_chat(user, template="rag") == "rag"

    (directory / "chat_template.jinja").write_text("file{% if add_generation_prompt %}>{% endif %}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("rag file")
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.render_chat(user) == "file>"
    assert tokenizer.render_chat(user, add_generation_prompt=False) == "file"
    assert tokenizer.render_chat(user, template="rag") == "rag file"


def word_level():
    """A word a token, as small models have it; marks stand alone."""
    vocabulary = ["<unk>", "\u2581who", "\u2581lives", "\u2581here", "?", "\u2581caf\u00e9"]
    made = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            pre_tokenizers.Split(tokenizers.Regex(r"[^\w\u2581]"), "isolated"),
        ]
    )
    made.add_special_tokens(["<unk>"])
    return made


def unigram():
    """Sub-words without bytes to fall back to, as T5 has them; id 2 is the unknown one."""
    pieces = [("a", -1.0), ("b", -1.5), ("<unk>", -9.0), ("\u2581", -2.0), ("\u2581ab", -2.5)]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


def word_piece():
    made = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "ab": 1, "##a": 2}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def wrapped(tokenizer):
    return Tokenizer(tokenizer.to_str().encode(), {}, {})


@pytest.mark.parametrize(
    ("make", "unk_id", "text", "unknown"),
    [
        (word_level, 0, "who lives here?", []),
        (word_level, 0, " who lives\n in  Upper-Senn, here? in", ["in", "Upper", "-", "Senn", ","]),
        (word_level, 0, "cafe\u0301 caf\u00e9 cafe", ["cafe"]),
        (word_level, 0, "<unk> who", ["<", "unk", ">"]),
        (unigram, 2, "ab ba", []),
        (unigram, 2, "ab \u6851ab\u6851\u6851 zz ab zz", ["\u6851", "\u6851\u6851", "zz"]),
        (word_piece, 0, "aba abba ab \u6851", ["abba", "\u6851"]),
        (byte_level, None, "\u03a9 \u6851 anything", []),
    ],
)
def test_unknown_words(make, unk_id, text, unknown):
    tokenizer = wrapped(make())
    assert tokenizer.unk_id == unk_id
    assert tokenizer.unknown_words(text) == unknown
    assert tokenizer.is_word_level == (make is word_level)


def test_byte_fallback_knows_every_word():
    tokenizer = wrapped(byte_fallback())
    assert tokenizer.unk_id == 0
    assert tokenizer.unknown_words("\u03a9 \u6851 \U0001f389") == []


@pytest.mark.parametrize(
    ("make", "text", "knows"),
    [
        (unigram, "ab \u6851", True),
        (unigram, "\u6851\u6851 zz \u6851?", False),
        (word_level, "who??", True),
        (word_level, "what? ?", False),
        (byte_level, "\u6851", True),
        (unigram, "\u6851a\u6851", True),
    ],
)
def test_whether_a_word_is_known(make, text, knows):
    assert wrapped(make()).knows_a_word(text) is knows


@pytest.fixture
def with_added_tokens(tmp_path):
    """A tokenizer whose files call one added token special, and two others not."""
    tokenizer = byte_level()
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken("<think>", special=False),
            tokenizers.AddedToken("    ", special=False, normalized=False),
        ]
    )
    return Tokenizer.load(write(tmp_path, tokenizer)), tokenizer


@pytest.mark.parametrize("text", ["<think> a", "a<think>", "<|user|>\n<think>\n</s>"])
def test_added_tokens_in_a_text_are_text_whatever_the_files_call_them(with_added_tokens, text):
    tokenizer, library = with_added_tokens
    live = {library.token_to_id(name) for name in ("<think>", *SPECIAL)}
    ids, offsets = tokenizer.encode_with_offsets(text)
    for found in (tokenizer.encode(text), ids, *tokenizer.encode_batch([text])):
        assert not live & set(found.tolist())
        assert tokenizer.decode(found) == text
    assert len(offsets) == len(ids)
    assert live & set(tokenizer.encode(text, special=True).tolist())
    assert tokenizer.vocab_size == library.get_vocab_size(with_added_tokens=True)


def test_white_space_that_was_added_is_no_mark_and_an_answer_shows_what_is_not_special(
    with_added_tokens,
):
    tokenizer, library = with_added_tokens
    assert library.token_to_id("    ") in tokenizer.encode("if x:\n    y")
    assert tokenizer.decode(tokenizer.encode("<s><think>a", special=True)) == "<think>a"


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_tokenizer_that_multiplies_texts_is_refused(tmp_path, part):
    tokenizer = byte_level()
    module = {"normalizer": normalizers, "decoder": decoders}[part]
    setattr(tokenizer, part, module.Sequence([module.Replace("a", "a" * 9)] * 2))
    with refused(TokenizerError, "81"):
        Tokenizer.load(write(tmp_path, tokenizer))


def test_a_pattern_that_gives_up_is_an_error_of_one_line(tmp_path, capfd):
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
    loaded = Tokenizer.load(write(tmp_path, tokenizer))
    for encode in (
        loaded.encode,
        loaded.encode_with_offsets,
        lambda text: loaded.encode_batch([text]),
    ):
        with refused(TokenizerError) as raised:
            encode("x" * 40)
        assert "\n" not in str(raised.value)
    capfd.readouterr()  # the library told stderr


@pytest.mark.parametrize("template", [5, [5], [{"name": "default"}], {"default": 5}, ["ab"]])
def test_a_chat_template_that_is_none(tmp_path, template):
    directory = write(tmp_path, byte_level(), chat_template=template)
    with refused(TokenizerError, "chat_template"):
        Tokenizer.load(directory)


def test_a_deep_file_is_refused(tmp_path):
    directory = write(tmp_path, byte_level())
    (directory / "tokenizer_config.json").write_text('{"a":' + "[" * 100_000)
    with refused(TokenizerError):
        Tokenizer.load(directory)


class Read:
    """An encoding that says how much was read of it at once."""

    def __init__(self, count):
        self.ids, self.most = list(range(count)), 0

    def __len__(self):
        return len(self.ids)

    @property
    def offsets(self):
        self.most = max(self.most, len(self))
        return [(it, it + 1) for it in self.ids]

    def token_to_chars(self, place):
        return place, place + 1


@pytest.mark.parametrize("count", [0, 5, tokenizer_module._AT_ONCE + 5])
def test_a_long_encoding_is_read_bit_by_bit(count, monkeypatch):
    """All of its offsets at once would hold Python's lock for half a second, for 2 MB."""
    found = Read(count)
    monkeypatch.setattr(tokenizer_module, "_encoding", lambda tokenizer, text: found)
    ids, at = tokenizer_module._encoded(None, "")
    assert ids.tolist() == found.ids and ids.dtype == at.dtype == np.int32
    assert at.tolist() == [[it, it + 1] for it in found.ids]
    assert found.most <= tokenizer_module._AT_ONCE


def test_a_long_word_is_encoded_as_the_library_does(chat_model_dir):
    tokenizer = Tokenizer.load(chat_model_dir)
    text = "ab" * 40_000
    ids, at = tokenizer.encode_with_offsets(text)
    whole = tokenizer._text.encode(text, add_special_tokens=False)
    assert ids.tolist() == whole.ids == tokenizer.encode(text).tolist()
    assert at.tolist() == [list(it) for it in whole.offsets]
