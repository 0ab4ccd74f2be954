"""Write the tokenizer of the synthetic task: one token a word, a handful of markers.

A word that the task does not know becomes <|unknown|>.

example: python scripts/make_synthetic_tokenizer.py --out configs/tokenizers/synthetic
"""

import argparse
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxrag.models.text.prompts import PromptTemplate, template_named
from jaxrag.tasks.world import vocabulary, words

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "configs" / "templates" / "short.toml"
SPECIALS = ("<|begin|>", "<|end|>", "<|unknown|>", "<|doc_start|>", "<|doc_end|>")
SPACE = "▁"  # before every word, so that text comes back as it was


def make_tokenizer(template: PromptTemplate) -> Tokenizer:
    """The words of the task and of the template's own text, sorted."""
    known = set(vocabulary())
    for text in (template.prefix, template.chunk, template.final):
        for special in SPECIALS:
            text = text.replace(special, " ")
        for field in ("{text}", "{title}", "{question}"):
            text = text.replace(field, " ")
        known |= set(words(text))
    pieces = [word if not word.isalnum() else SPACE + word for word in sorted(known)]
    tokens = [*SPECIALS, *pieces]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|unknown|>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always"),
            pre_tokenizers.Split(Regex(r"[^\w\s▁]|_"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def main() -> int:
    """Write tokenizer.json and tokenizer_config.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    make_tokenizer(template_named(str(TEMPLATE))).save(str(args.out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "unk_token": "<|unknown|>",
        "model_max_length": 1024,
    }
    path = args.out / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
