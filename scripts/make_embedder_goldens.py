"""Make the golden embedders in tests/goldens/embed with torch, transformers and tokenizers.

Every encoder is tiny and random, with sizes that are all unequal and unusual constants, so that a
swapped axis or an ignored key changes the result. A directory holds what an embedding model's does
(config, safetensors, tokenizer.json, the files of sentence-transformers), and ``expected.npz``:
for each ``kind`` of "passage" and "query" the ``<kind>/ids`` [N, T] padded with -1 and the
``<kind>/vectors`` [N, D] of TEXTS.

Nothing of jaxrag is imported here. Run it where torch and transformers are installed:

    python scripts/make_embedder_goldens.py [--out tests/goldens/embed]
"""

import dataclasses
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from make_goldens import randomised, write_all
from tokenizers import models, normalizers, pre_tokenizers, processors

TEXTS = (
    "A heron waits at the weir.",
    "",
    "Where does the heron wait?",
    "  Crème brûlée, ÜBER-sweet!  ",
    "白鹭在水边等待。",
    "The mill stands by the weir, and in the evening the heron waits there again, alone, still.",
    "x",
    "Rain. " * 30,
)
WORDS = (
    *("the", "heron", "wait", "at", "weir", "mill", "stand", "by", "and", "in", "rain"),
    *("where", "do", "query", "passage"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz.,:!?-üèû白鹭在水边等待。"


def wordpiece() -> tokenizers.Tokenizer:
    """BERT's tokenizer: lower case without accents, Chinese characters apart."""
    pieces = [*WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS), "##es", "##ing", "##er"]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(pieces)]
    ids = {token: index for index, token in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, handle_chinese_chars=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _surround(tokenizer, "[CLS]", "[SEP]", ("[PAD]", "[UNK]"))


def byte_level() -> tokenizers.Tokenizer:
    """RoBERTa's tokenizer: byte-level BPE."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("r", "o"), ("he", "ro"), ("Ġ", "w"), ("a", "i"), ("ai", "t")]
    vocab = ["<s>", "<mask>", "</s>", "<unk>", "<pad>", *alphabet, *map("".join, merges)]
    ids = {token: index for index, token in enumerate(vocab)}
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _surround(tokenizer, "<s>", "</s>", ("<pad>", "<unk>"))


def unigram() -> tokenizers.Tokenizer:
    """XLM-RoBERTa's tokenizer: sentencepiece's unigram model."""
    pieces = [*("▁" + word for word in WORDS), "▁", *LETTERS]
    vocab = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [(piece, -2.0 - 0.01 * index) for index, piece in enumerate(pieces)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return _surround(tokenizer, "<s>", "</s>", ("<pad>", "<unk>"))


def _surround(
    tokenizer: tokenizers.Tokenizer, first: str, last: str, others: tuple[str, ...]
) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens([first, last, *others])
    ids = [(token, tokenizer.token_to_id(token)) for token in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} {last} $B {last}", special_tokens=ids
    )
    # What a saved tokenizer often carries from its training; embedding does not follow it.
    tokenizer.enable_truncation(7)
    tokenizer.enable_padding(length=7)
    return tokenizer


COMMON: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "type_vocab_size": 5,
    "layer_norm_eps": 0.03,
}
TOKENIZERS = {"bert": wordpiece, "roberta": byte_level, "xlm-roberta": unigram}


@dataclasses.dataclass(frozen=True)
class Golden:
    """One embedder to make: its family, what differs from COMMON, and what its files say."""

    name: str
    model_type: str
    pooling: str = "mean"
    normalize: bool = True
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)
    max_tokens: int | None = None  # stated in sentence_bert_config.json
    with_head: bool = False  # saved as the model it was trained as
    architecture: str | None = None  # written over the one transformers saves
    modules: bool = True  # has the files of sentence-transformers
    dtype: torch.dtype = torch.float32


GOLDENS = (
    Golden("minilm", "bert", max_tokens=20),
    Golden(
        "bge",
        "bert",
        "cls",
        changes={"hidden_act": "gelu_new", "num_attention_heads": 6},
        prompts={"query": "where: "},
        dtype=torch.float16,
    ),
    Golden(
        "contriever",
        "bert",
        normalize=False,
        changes={"hidden_act": "relu"},
        architecture="Contriever",
        modules=False,
    ),
    Golden("bert_last", "bert", "last", normalize=False, with_head=True),
    Golden(
        "roberta",
        "roberta",
        "max",
        normalize=False,
        changes={"pad_token_id": 4, "type_vocab_size": 1},
        with_head=True,
        dtype=torch.bfloat16,
    ),
    Golden(
        "multilingual_e5",
        "xlm-roberta",
        changes={"pad_token_id": 1, "type_vocab_size": 1},
        prompts={"query": "query: ", "passage": "passage: "},
        max_tokens=33,
    ),
)


def make_model(golden: Golden, vocab_size: int) -> torch.nn.Module:
    """A random model in float32, its weights already rounded to the dtype they are saved in."""
    config = transformers.AutoConfig.for_model(
        golden.model_type, **{**COMMON, "vocab_size": vocab_size, **golden.changes}
    )
    kind = transformers.AutoModelForMaskedLM if golden.with_head else transformers.AutoModel
    model = kind.from_config(config, attn_implementation="eager")
    return randomised(model, golden.dtype, zlib.crc32(golden.name.encode()))


def write_settings(golden: Golden, directory: Path) -> None:
    """The files of sentence-transformers."""
    names = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "last": "lasttoken"}
    package = "sentence_transformers.models."
    steps = ["Transformer", "Pooling", "Normalize"][: 3 if golden.normalize else 2]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": index, "name": str(index), "path": paths[index], "type": package + step}
        for index, step in enumerate(steps)
    ]
    pooling = {
        "word_embedding_dimension": COMMON["hidden_size"],
        **{f"pooling_mode_{name}": kind == golden.pooling for kind, name in names.items()},
    }
    (directory / "1_Pooling").mkdir()
    files = {"modules.json": modules, "1_Pooling/config.json": pooling}
    if golden.max_tokens is not None:
        stated = {"max_seq_length": golden.max_tokens, "do_lower_case": False}
        files["sentence_bert_config.json"] = stated
    if golden.prompts:
        files["config_sentence_transformers.json"] = {"prompts": golden.prompts}
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value, indent=2) + "\n")


def expected_vectors(
    golden: Golden, model: torch.nn.Module, directory: Path, kind: str
) -> dict[str, np.ndarray]:
    """Ids and vectors of TEXTS as one kind, each text by itself."""
    positions = COMMON["max_position_embeddings"]
    if golden.model_type != "bert":
        positions -= model.config.pad_token_id + 1
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json")
    )
    prefix = golden.prompts.get(kind, "")
    rows, vectors = [], []
    for text in TEXTS:
        ids = tokenizer(
            (prefix + text).strip(), truncation=True, max_length=golden.max_tokens or positions
        )["input_ids"]
        with torch.no_grad():
            hidden = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        vector = {
            "mean": hidden.mean(0),
            "cls": hidden[0],
            "max": hidden.max(0).values,
            "last": hidden[-1],
        }[golden.pooling]
        rows.append(ids)
        vectors.append(vector / vector.norm() if golden.normalize else vector)
    padded = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return {f"{kind}/ids": padded, f"{kind}/vectors": torch.stack(vectors).numpy()}


def write_golden(golden: Golden, out: Path) -> None:
    """Write one embedder with its expected vectors."""
    directory = out / golden.name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    tokenizer = TOKENIZERS[golden.model_type]()
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    model = make_model(golden, tokenizer.get_vocab_size() + 3)
    expected: dict[str, Any] = {}
    for kind in ("passage", "query"):
        expected |= expected_vectors(golden, model, directory, kind)
    if golden.modules:
        write_settings(golden, directory)
    model.to(golden.dtype).save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if golden.architecture is not None:
        path = directory / "config.json"
        config = json.loads(path.read_text()) | {"architectures": [golden.architecture]}
        path.write_text(json.dumps(config, indent=2) + "\n")
    np.savez_compressed(directory / "expected.npz", **expected)
    texts = json.dumps(TEXTS, indent=2, ensure_ascii=False)
    (out / "texts.json").write_text(texts + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_all(GOLDENS, write_golden, "tests/goldens/embed", "tokenizers")
