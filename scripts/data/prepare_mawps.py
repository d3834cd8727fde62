"""Host: MAWPS (Koncel-Kedziorski et al., NAACL 2016), word problems of one and two steps, as prompt files.

    python scripts/data/prepare_mawps.py singleop.jsonl addsub.jsonl multiarith.jsonl

Reads JSON Lines or Parquet with `input` and `target` (the files of PaL, arXiv:2211.10435) or with `question` and
`result` (MU-NLPC/Calc-mawps on the Hugging Face hub), and writes DIR/train.parquet and DIR/heldout.parquet.

Problems of one template tell the same story with other numbers, names and things. They all go into the same split,
chosen by a hash of the template. So a template is never split between train and held-out, and a row's split does not
depend on the other rows. The files have no equations to split by; equal wording has an equal one.

Three worked examples, which are in no data set, come before each problem. The verifier is `arithmetic`: the last number
counts.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("prepare_mawps")

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from script_ends import command

from dapo_jax.data.published import Row, make_row, text_of
from dapo_jax.errors import InputError
from dapo_jax.rewards.numerals import whole_number
from dapo_jax.tools.data import distinct_rows, write_rows

EXAMPLES = (  # made up; before every problem, since a small model follows examples rather than instructions
    ("Ann has 3 red pens and 4 blue pens. How many pens does Ann have?", "3 + 4 = 7"),
    ("A baker had 12 rolls and sold 5 of them. How many rolls are left?", "12 - 5 = 7"),
    ("There are 6 boxes with 8 toys in each. How many toys are there?", "6 * 8 = 48"),
)
MAX_DECIMALS = 3  # of an answer: a third, for example, has no exact decimal

NUMBER_WORDS = frozenset("one two three four five six seven eight nine ten eleven twelve".split())
PRONOUNS = frozenset("he she it they his her its their him them hers theirs i my me you your we our us".split())
ENDS_OF_NOUNS = frozenset(  # what may follow a number or "how many" without being the thing that is counted
    "a all an and are at can could did do does each extra fewer for from had has have he how if in is less left more "
    "of on other she than the then they to total was were will with would".split()
)
NUMBER = re.compile(r"[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+")
GENITIVE = re.compile("['\N{RIGHT SINGLE QUOTATION MARK}]s\\b")
TOKEN = re.compile(r"#|[A-Za-z]+")


def template_of(problem: str) -> str:
    """The wording of a problem without its particulars: numbers are #, things counted *, names and pronouns @.

    A thing is the word after a number, or up to three words after "how many", wherever they are. Every word with a
    capital counts as a name. This merges more templates than a reader would, and fewer where a plural is
    irregular.
    """
    words = TOKEN.findall(GENITIVE.sub("", NUMBER.sub(" # ", problem)))
    words = ["#" if word.lower() in NUMBER_WORDS else word for word in words]
    things: set[str] = set()
    for position, word in enumerate(words):
        how_many = word.lower() == "many" and words[position - 1 : position] in (["how"], ["How"])
        for following in words[position + 1 :][: 3 if how_many else 1 if word == "#" else 0]:
            if following == "#" or following.lower() in ENDS_OF_NOUNS:
                break
            things |= _singulars(following)
    template: list[str] = []
    for word in words:
        if things & _singulars(word):
            symbol = "*"
        else:
            symbol = "@" if word.lower() in PRONOUNS or word[0].isupper() else word
        if symbol not in "@*" or template[-1:] != [symbol]:
            template.append(symbol)
    return " ".join(template)


def _singulars(word: str) -> set[str]:
    """What the word may be the plural of, and itself: of "boxes" also "boxe" and "box"."""
    word = word.lower()
    endings = ("", ""), ("s", ""), ("es", ""), ("ies", "y"), ("ves", "f"), ("ves", "fe")
    return {word.removesuffix(plural) + singular for plural, singular in endings if word.endswith(plural)}


def split_of(template: str, heldout_share: float) -> str:
    """ "heldout" for this share of all templates, by their hash, else "train"."""
    number = int.from_bytes(hashlib.sha256(template.encode()).digest()[:8], "big")
    return "heldout" if number < heldout_share * 2**64 else "train"


def mawps_row(record: dict[str, Any], heldout_share: float) -> Row | None:
    """A row of verl's schema; None if the answer is no short decimal. InputError if a field is missing."""
    problem, given = tidy(text_of(record, "input", "question")), record.get("target", record.get("result"))
    answer = whole_number(str(given))
    if answer is None:
        raise InputError(f"target or result must be a number, not {given!r}: give the file as its publisher ships it")
    if len(answer.partition(".")[2]) > MAX_DECIMALS:
        return None
    template = template_of(problem)
    examples = [
        {"role": role, "content": text}
        for example in EXAMPLES
        for role, text in zip(("user", "assistant"), example, strict=True)
    ]
    row = make_row(
        problem,
        data_source="mawps",
        ground_truth=answer,
        extra_info={"split": split_of(template, heldout_share), "template": template},
    )
    return row | {"prompt": examples + row["prompt"]}


def tidy(text: str) -> str:
    """One space between words, none before punctuation: the files hold tokenised text."""
    text = re.sub(r"\s+(?=[.,;?!]|['\N{RIGHT SINGLE QUOTATION MARK}]s\b)", "", " ".join(text.split()))
    return text.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="Parquet or JSON Lines, or hf://OWNER/NAME/SPLIT")
    parser.add_argument(
        "--heldout-share", type=float, default=0.15, help="share of the templates held out (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("data/mawps"), metavar="DIR", help="default: %(default)s")
    given = parser.parse_args(arguments)
    if not 0 < given.heldout_share < 1:
        parser.error(f"--heldout-share={given.heldout_share} must be between 0 and 1")
    rows, counts = distinct_rows(given.files, lambda record: mawps_row(record, given.heldout_share))
    splits = {name: [row for row in rows if row["extra_info"]["split"] == name] for name in ("train", "heldout")}
    templates = {split: {row["extra_info"]["template"] for row in found} for split, found in splits.items()}
    assert templates["train"].isdisjoint(templates["heldout"])
    for split, found in splits.items():
        if not found:
            raise InputError(f"the {split} split has no row: change --heldout-share or give more problems")
    print(*(f"{what} {count}" for what, count in counts.items()), sep=", ")
    for split, found in splits.items():
        write_rows(found, path := given.output / f"{split}.parquet")
        print(f"{path}: {len(found)} problems of {len(templates[split])} templates")


if __name__ == "__main__":
    command(main)
