"""A tokenizer from a GGUF file's `tokenizer.ggml.*` metadata (ggml/docs/gguf.md, "Tokenizer").

GGUF has the vocabulary and merges but only names the pre-tokenizer; what the names mean is defined by
llama.cpp's converter, which takes them from each family's own tokenizer.json. The patterns here are those
originals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from worker.text.parts import TokenizerError, TokenizerParts
from worker.text.pieces import SPACE, Spelling

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str, marks: str = "") -> str:
    """The pattern of tiktoken's cl100k family; `marks` joins combining marks to letters (Qwen3.5)."""
    letters = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_REST}"
    )


def _o200k(digits: str, contractions: str = "") -> str:
    """The pattern of tiktoken's o200k family, which splits at changes from lower to upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{contractions}|{lead}{_UPPER}+{_LOWER}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
    )


class PreTokenizer(NamedTuple):
    """Patterns applied one after the other, and what else goes with a family."""

    patterns: tuple[str, ...]
    nfc: bool = False  # the family normalizes text to NFC first
    ignore_merges: bool = False  # a word that is in the vocabulary is taken whole
    add_bos: bool = False  # when the file doesn't say


_BY_DIGIT: Final = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2: Final = PreTokenizer((_GPT2,))
_LLAMA3: Final = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K: Final = PreTokenizer((_cl100k(r"\p{N}{1,3}"),))
_QWEN2: Final = PreTokenizer((_cl100k(r"\p{N}"),), nfc=True)
_O200K: Final = PreTokenizer((_o200k(r"\p{N}{1,3}", _CONTRACTIONS + "?"),))
_DEFAULT: Final = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    "default": _DEFAULT,
    "gpt-2": _PLAIN_GPT2, "phi-2": _PLAIN_GPT2, "mpt": _PLAIN_GPT2, "olmo": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "smollm": _BY_DIGIT, "starcoder": _BY_DIGIT, "refact": _BY_DIGIT, "command-r": _BY_DIGIT,
    "codeshell": _BY_DIGIT,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3, "pixtral": _LLAMA3,
    "dbrx": _CL100K, "smaug-bpe": _CL100K, "glm4": _CL100K, "chatglm-bpe": _CL100K,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2, "stablelm2": _QWEN2._replace(nfc=False),
    "qwen35": PreTokenizer((_cl100k(r"\p{N}", r"\p{M}"),), nfc=True),
    "gpt-4o": _O200K, "llama4": _O200K,
    "tekken": PreTokenizer((_o200k(r"\p{N}"),), ignore_merges=True, add_bos=True),
}  # fmt: skip

_LONGEST_PIECE: Final = 256  # in merging; SentencePiece's own limit is 16 by default

# What ends a turn in the chat formats of the families served; many files name only one of two such tokens as
# EOS.
_TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build the tokenizer that `metadata` describes.

    Raises:
        TokenizerError: a key is missing or inconsistent, or the tokenizer's kind isn't known.
    """
    fields = _Fields(metadata)
    if fields.model == "gpt2":
        backend, spelling, add_bos = _byte_level(fields)
    elif fields.model == "llama":
        backend, spelling, add_bos = _sentencepiece(fields)
    else:
        raise TokenizerError(
            f"tokenizer.ggml.model is {fields.model!r}; this server reads 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE). Point --tokenizer at a directory with the model's tokenizer.json."
        )
    _add_tokens(backend, fields)
    bos, eos = fields.token_id("bos"), fields.token_id("eos")
    first = bos if fields.get("add_bos_token", add_bos) else None
    last = eos if fields.get("add_eos_token", False) else None
    set_template(backend, fields.token(first), fields.token(last))
    ends = [eos, fields.token_id("eot"), fields.token_id("eom")]
    ends += [token for token, text in enumerate(fields.tokens) if text in _TURN_ENDS]
    template = metadata.get("tokenizer.chat_template")
    tool_template = metadata.get("tokenizer.chat_template.tool_use")
    return TokenizerParts(
        backend=backend,
        spelling=spelling,
        bos_token=fields.token(bos),
        eos_token=fields.token(eos),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        special_ids=frozenset(fields.ids_of_type(CONTROL) + fields.ids_of_type(UNKNOWN)),
        chat_template=template if isinstance(template, str) else None,
        tool_template=tool_template if isinstance(tool_template, str) else None,
    )


def set_template(backend: Tokenizer, first: str | None, last: str | None) -> None:
    """Make `encode(add_special_tokens=True)` put exactly these tokens before and after the text."""
    around = {"first": first, "last": last}  # names, because a token's text may hold the colon of "name:type"
    specials = [
        {"id": name, "ids": [backend.token_to_id(text)], "tokens": [text]}
        for name, text in around.items()
        if text
    ]
    single = [*(["first"] if first else []), "$A", *(["last"] if last else [])]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)


class _Fields:
    """The `tokenizer.ggml.*` keys, checked as far as building relies on them."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = self.get("model")
        self.tokens: Sequence[str] = self.get("tokens", ())
        if not self.tokens:
            raise TokenizerError(
                "the GGUF file has no tokenizer (no tokenizer.ggml.tokens). "
                "Point --tokenizer at a directory with the model's tokenizer.json."
            )
        types = self.get("token_type")
        self.types: Sequence[int] = [NORMAL] * len(self.tokens) if types is None else [int(t) for t in types]
        if len(self.types) != len(self.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.token_type has {len(self.types)} entries for {len(self.tokens)} tokens"
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    @property
    def architecture(self) -> str:
        return str(self._metadata.get("general.architecture", ""))

    def token_id(self, role: str) -> int | None:
        token = self.get(f"{role}_token_id")
        return int(token) if token is not None and int(token) < len(self.tokens) else None

    def token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]

    def ids_of_type(self, kind: int) -> list[int]:
        return [token for token, its in enumerate(self.types) if its == kind]

    def vocabulary(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(self.tokens)}


def _byte_level(fields: _Fields) -> tuple[Tokenizer, Spelling, bool]:
    name = fields.get("pre") or "default"
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}, which this server doesn't know; it knows "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. "
            "Point --tokenizer at a directory with the model's tokenizer.json."
        )
    merges = [_split_merge(merge) for merge in fields.get("merges", ())]
    if not merges:
        raise TokenizerError("the GGUF file's byte-level tokenizer has no merges (tokenizer.ggml.merges)")
    backend = Tokenizer(_bpe(fields, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, Spelling("byte-level"), pre.add_bos


def _split_merge(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise TokenizerError(f"tokenizer.ggml.merges: {merge[:80]!r} isn't two pieces with a space between")
    return left, right


def _sentencepiece(fields: _Fields) -> tuple[Tokenizer, Spelling, bool]:
    merges = [_split_merge(merge) for merge in fields.get("merges", ())] or _merges_from_scores(fields)
    unknown = next(iter(fields.ids_of_type(UNKNOWN)), None)
    options = {"unk_token": fields.token(unknown), "fuse_unk": True, "byte_fallback": True}
    backend = Tokenizer(_bpe(fields, merges, **options))
    prefix = bool(fields.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, Spelling("sentencepiece", strip_leading_space=prefix), True


def _merges_from_scores(fields: _Fields) -> list[tuple[str, str]]:
    """Merges in SentencePiece's order: pieces by falling score, each from all pairs that make it up."""
    scores = fields.get("scores")
    if scores is None or len(scores) != len(fields.tokens):
        raise TokenizerError(
            "the GGUF file's SentencePiece tokenizer needs a score for each token (tokenizer.ggml.scores)"
        )
    texts = ((fields.tokens[token], token) for token in fields.ids_of_type(NORMAL))
    ids = {text: token for text, token in texts if len(text) <= _LONGEST_PIECE}
    merges: list[tuple[str, str]] = []
    for text in sorted(ids, key=lambda text: (-float(scores[ids[text]]), ids[text])):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _bpe(fields: _Fields, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=fields.vocabulary(), merges=merges, **options)
    except Exception as error:  # the library raises no other: a merge's result may not be a token
        raise TokenizerError(f"the GGUF file's merges don't fit its vocabulary: {error}") from error


def _add_tokens(backend: Tokenizer, fields: _Fields) -> None:
    """Control tokens and user-defined ones are found in the text before anything is split."""
    if fields.model == "llama" and fields.architecture == "phi3":
        # Phi-3's own tokenizer swallows white space after its chat markers; GGUF has no field to say so.
        keeps_space = {"<unk>", "<s>", "<|endoftext|>"}
    else:
        keeps_space = set(fields.tokens)
    for kind, special in ((CONTROL, True), (UNKNOWN, True), (USER_DEFINED, False)):
        texts = [fields.tokens[token] for token in fields.ids_of_type(kind)]
        tokens = [
            AddedToken(text, special=special, normalized=False, rstrip=special and text not in keeps_space)
            for text in texts
            if text
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(tokens)
