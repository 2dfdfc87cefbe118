"""Text to token ids and back: SentencePiece, tiktoken and byte-level BPE behind one class.

`get_tokenizer` goes by what is inside a checkpoint's tokenizer file, not by its name. Three rules hold for all kinds:
- the text of a control token, say "<|im_end|>", becomes that token only where `allow_special` asks for it;
- `decode` is the streaming decoder run to its end, so streamed text and decoded text cannot differ;
- what a tokenizer.json asks for and this file does not do is refused by name, never approximated.
"""

import base64
import codecs
import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Container, Iterable, Iterator
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import regex  # comes with tiktoken; unlike `re` it knows \p{L}
import sentencepiece
import tiktoken

# How GPT-2 and Llama 3 cut text into pieces, which no merge crosses. A tiktoken file does not hold its pattern.
GPT2_PATTERN = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    r"(?i:'(?:[stmd]|re|ve|ll))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id "
    "reserved_special_token_2 start_header_id end_header_id eom_id eot_id python_tag"
).split() + [f"reserved_special_token_{i}" for i in range(3, 248)]


class Tokenizer:
    """One checkpoint's vocabulary.

    tokens: the bytes each id stands for. encode_text: ordinary text to ids. added: the tokens that are found as they
    stand, before `encode_text` sees the rest, as tokenizer.json lists them (id, content, special, normalized, …).
    strip_space: SentencePiece puts a space before the text; decoding takes it away again.
    """

    def __init__(
        self,
        directory: Path,
        tokens: dict[int, bytes],
        encode_text: Callable[[str], list[int]],
        added: list[dict],
        normalize: Callable[[str], str] = str,
        strip_space: bool = False,
        bos_id: int | None = None,
        add_bos: bool = False,
        eos_ids: Iterable[int] = (),
    ):
        config = read_config(directory / "tokenizer_config.json")
        self.tokens = tokens | {token["id"]: token["content"].encode() for token in added}
        self.vocab_size: int = max(self.tokens) + 1  # a model's head may be padded beyond it
        self.strip_space = strip_space
        self.special = {token["id"]: token["content"] for token in added if token.get("special")}
        self._encode_text, self._normalize = encode_text, normalize
        # Tokens marked `normalized` are looked for in the normalized text, the others before, in the text as it is.
        self._added = {normalize(t["content"]) if t.get("normalized") else t["content"]: t for t in added}
        self._find_raw = any_of(c for c, t in self._added.items() if not t.get("normalized"))
        self._find_normalized = any_of(c for c, t in self._added.items() if t.get("normalized"))
        self._find_special = any_of(self.special.values(), regex)

        names = {key: v["content"] if isinstance(v, dict) else v for key, v in config.items() if key.endswith("_token")}
        self._names = {key: name for key, name in names.items() if isinstance(name, str)}
        id_of = {token["content"]: token["id"] for token in added}
        self.bos_id: int | None = id_of.get(self._names.get("bos_token"), bos_id)
        add = config.get("add_bos_token")
        self.add_bos: bool = (add_bos if add is None else bool(add)) and self.bos_id is not None
        stops = {id_of.get(self._names.get("eos_token"))} | set(eos_ids)
        for name in ("config.json", "generation_config.json"):
            stop = read_config(directory / name).get("eos_token_id")
            stops |= set(stop) if isinstance(stop, list) else {stop}
        self.eos_ids: frozenset[int] = frozenset(stops - {None})
        self._names.setdefault("bos_token", self.special.get(self.bos_id, ""))
        self._template, self._template_file = read_template(directory, config)

        # Stand-ins for the first characters of control tokens; see `encode_chat`.
        self._hide = {c: chr(0xDC00 + i) for i, c in enumerate(sorted({s[0] for s in self.special.values()}))}
        self._show = str.maketrans({stand_in: first for first, stand_in in self._hide.items()})

    def vocabulary(self) -> str:
        """A digest of what every id stands for. A draft can serve a target if and only if theirs are equal."""
        return hashlib.sha256(repr(sorted(self.tokens.items())).encode()).hexdigest()

    def encode(self, text: str, bos: bool | None = None, allow_special: bool = False) -> list[int]:
        """Ids of `text`. bos: whether to begin with BOS (None: what the checkpoint says). allow_special: whether the
        text of a control token becomes that token. A lone surrogate, which no file can hold, counts as U+FFFD."""
        if bos and self.bos_id is None:
            raise ValueError("this checkpoint's tokenizer has no BOS token; encode with bos=False")
        ids = [self.bos_id] if (self.add_bos if bos is None else bos) else []
        return ids + self._encode(replace_surrogates(text), allow_special)

    def _encode(self, text: str, allow_special: bool) -> list[int]:
        ids: list[int] = []
        for part in self._split_added(self._find_raw, text, allow_special):
            if isinstance(part, int):
                ids.append(part)
                continue
            for piece in self._split_added(self._find_normalized, self._normalize(part), allow_special):
                ids += [piece] if isinstance(piece, int) else self._encode_text(piece.translate(self._show))
        return ids

    def _split_added(self, find: regex.Pattern, text: str, allow_special: bool) -> Iterator[str | int]:
        """`text` as a run of strings and, where an added token stands, its id."""
        end = 0
        for match in find.finditer(text):
            token = self._added[match[0]]
            if token.get("special") and not allow_special:
                continue
            before, after = text[end : match.start()], match.end()
            if token.get("lstrip"):
                before = before.rstrip()
            if token.get("rstrip"):
                after = len(text) - len(text[after:].lstrip())
            if before:
                yield before
            yield token["id"]
            end = after
        if text[end:]:
            yield text[end:]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`. Invalid UTF-8 becomes U+FFFD, an id outside the vocabulary (a padded head's) nothing."""
        stream = StreamDecoder(self, skip_special)
        return "".join([stream.put(i) for i in ids]) + stream.flush()

    def encode_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, [{"role": …, "content": …}, …], through the checkpoint's own chat template.

        Control tokens are taken from what the template wrote and never from what a message says. The template
        returns one string, so before rendering, the first character of each control token inside a message becomes a
        stand-in (a lone surrogate: no text has those), which becomes that character again once the control tokens
        have been found. The template sees the messages otherwise as they are, so its `trim` and its tests work.
        """

        def guard(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: guard(v) for key, v in value.items()}
            if isinstance(value, (list, tuple)):
                return [guard(v) for v in value]
            if not isinstance(value, str):
                return value
            chars = list(replace_surrogates(value))
            # `partial`: a message may also end inside a control token, for the text after it to complete.
            for match in self._find_special.finditer("".join(chars).rstrip(), overlapped=True, partial=True):
                if match[0]:
                    chars[match.start()] = self._hide[match[0][0]]
            return "".join(chars)

        if self._template is None:
            raise ValueError(f"{self._template_file}: no chat_template; a chat needs an instruction-tuned checkpoint")
        try:
            text = compile_template(self._template).render(
                **self._names, messages=guard(messages), add_generation_prompt=add_generation_prompt,
                tools=None, documents=None,
            )  # fmt: skip
        except Exception as error:  # a template is a program of the checkpoint's: it can fail in any way
            raise ValueError(f"{self._template_file}: chat_template: {one_line(error)}") from None
        ids = self._encode(text, allow_special=True)
        return ids if not self.add_bos or ids[:1] == [self.bos_id] else [self.bos_id, *ids]


class StreamDecoder:
    """Text of ids that arrive one at a time. A character comes out whole, with the id that completes it.

    Text that continues a prompt is decoded by putting the prompt's ids first: SentencePiece's first space is dropped
    at the start of a text, but not in the middle of it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokens = tokenizer.tokens
        self._skip = tokenizer.special if skip_special else {}
        self._strip_space = tokenizer.strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, token_id: int) -> str:
        """The text that `token_id` completes, "" if none."""
        data = b"" if token_id in self._skip else self._tokens.get(token_id, b"")
        if data and self._strip_space:
            data, self._strip_space = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)


# ---- loading -----------------------------------------------------------------------------------------------------


def get_tokenizer(checkpoint_dir: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint, given as its directory or a file in it; ValueError if there is none to use.

    tokenizer.model comes first: where both are there (Llama 2, Mistral) it is the original, and tokenizer.json a
    conversion that is not byte-level. Llama 3's hub repositories keep theirs in original/, so there tokenizer.json is
    read, whose ids are the same.
    """
    path = Path(checkpoint_dir)
    directory = path if path.is_dir() else path.parent
    file = next((f for f in (directory / "tokenizer.model", directory / "tokenizer.json") if f.is_file()), None)
    if not path.exists() or file is None:
        raise ValueError(f"{path}: no tokenizer.model or tokenizer.json here; give a checkpoint's directory")
    data = file.read_bytes()
    if data.lstrip()[:1] == b"{":
        load = load_json
    elif re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\s", data):
        load = load_tiktoken
    else:
        load = load_sentencepiece
    try:
        return load(file, data)
    except (KeyError, TypeError, AttributeError, IndexError, UnicodeError) as error:  # valid JSON of another shape
        raise ValueError(f"{file}: damaged, or not a tokenizer: {type(error).__name__} {one_line(error)}") from None


def load_sentencepiece(file: Path, data: bytes) -> Tokenizer:
    """Llama 2, Mistral. Text between two control tokens is encoded by itself, as SentencePiece and Llama 2 do it."""
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(data)
    except RuntimeError:
        wanted = "a SentencePiece model, or a tiktoken file (a base64 token and its rank on each line)"
        raise ValueError(f"{file}: damaged or incomplete; it should be {wanted}") from None
    tokens, special = {}, {}
    for i in range(model.vocab_size()):
        piece = model.id_to_piece(i)
        if model.is_control(i):
            special[i] = {"id": i, "content": piece, "special": True}
        elif model.is_byte(i):
            tokens[i] = bytes([int(piece[3:5], 16)])  # "<0x0A>"
        else:
            tokens[i] = (model.decode([i]) if model.is_unknown(i) else piece.replace("▁", " ")).encode()
    later = {t["id"]: t for t in added_in_config(file.parent) if t["id"] >= model.vocab_size()}
    return Tokenizer(
        file.parent, tokens, model.encode, [*(special | later).values()],
        strip_space=model.encode("a", out_type=str)[0].startswith("▁"),
        bos_id=model.bos_id() if model.bos_id() >= 0 else None, add_bos=True,
        eos_ids=[model.eos_id()] if model.eos_id() >= 0 else [],
    )  # fmt: skip


def load_tiktoken(file: Path, data: bytes) -> Tokenizer:
    """Llama 3 as Meta publishes it: a base64 token and its rank on each line. Special tokens follow the ranks."""
    ids: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ids[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"{file}: line {number} should be a base64 token and its rank") from None
    if sorted(ids.values()) != list(range(number)):
        raise ValueError(f"{file}: the {number} ranks should be 0 to {number - 1}, each once; is a line missing?")
    llama3 = [{"id": number + i, "content": f"<|{name}|>", "special": True} for i, name in enumerate(LLAMA3_SPECIAL)]
    merged = [token for token in sorted(ids, key=ids.__getitem__) if len(token) > 1]
    return Tokenizer(
        file.parent, {i: token for token, i in ids.items()},
        byte_pair_encoder(merged, ids, [isolate(LLAMA3_PATTERN)]), added_in_config(file.parent) or llama3,
        bos_id=number, add_bos=True, eos_ids=[number + 1, number + 8, number + 9],
    )  # fmt: skip


def load_json(file: Path, data: bytes) -> Tokenizer:
    """Byte-level BPE as Hugging Face writes it: SmolLM2, Llama 3, Qwen2, Qwen3."""
    spec = parse_json(file, data)
    model, added = spec["model"], spec.get("added_tokens") or []

    def refuse(what: str, value: Any) -> None:
        supported = "byte-level BPE (SmolLM2, Llama 3, Qwen) is supported, and tokenizer.model goes before this file"
        raise ValueError(f"{file}: {what} {json.dumps(value)[:80]} is not supported; {supported}")

    if model.get("type", "BPE" if "merges" in model else None) != "BPE":  # old files do not name the type
        refuse("model type", model.get("type"))
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            refuse(f"BPE with {option}", model[option])
    for token in added:
        if token.get("single_word"):
            refuse("an added token with single_word,", token["content"])

    # The splits run one after the other, each on the pieces of the one before: SmolLM2 cuts digits out first, and then
    # "\s+(?!\S)" takes all the spaces before a digit, since the piece ends there.
    splits, steps = [], flatten(spec.get("pre_tokenizer"), "pretokenizers")
    for step in steps:
        kind = step["type"]
        if kind == "Digits":
            splits.append(isolate(r"\p{N}" if step.get("individual_digits") else r"\p{N}+"))
        elif kind == "Split" and step["behavior"] == "Isolated":
            ((syntax, pattern),) = step["pattern"].items()
            try:
                splits.append(isolate(pattern if syntax == "Regex" else regex.escape(pattern)))
            except regex.error as error:
                refuse(f"pattern ({error})", pattern)
        elif kind == "ByteLevel":
            if step.get("add_prefix_space", True):
                splits.append(lambda text: [text if text.startswith(" ") else " " + text])
            if step.get("use_regex", True):
                splits.append(isolate(GPT2_PATTERN))
        else:
            refuse("pre-tokenizer", f"{kind} {step['behavior']}" if kind == "Split" else kind)
    if [i for i, step in enumerate(steps) if step["type"] == "ByteLevel"] != [len(steps) - 1]:
        refuse("a pre-tokenizer that does not end in its one ByteLevel,", [step["type"] for step in steps])

    normalizers = [step["type"] for step in flatten(spec.get("normalizer"), "normalizers")]
    if normalizers not in ([], ["NFC"]):
        refuse("normalizer", normalizers)
    normalize = partial(unicodedata.normalize, "NFC") if normalizers else str
    if (spec.get("decoder") or {"type": "ByteLevel"})["type"] != "ByteLevel":
        refuse("decoder", spec["decoder"]["type"])

    bos = None
    for step in flatten(spec.get("post_processor"), "processors"):
        if step["type"] == "TemplateProcessing":
            # An EOS after the text is left out, as the text is to be continued.
            kinds = [next(iter(part)) for part in step["single"]]
            before = step["single"][: kinds.index("Sequence")]
            if len(before) > 1:
                refuse("a post-processor that puts several tokens before the text,", before)
            for part in before:
                (bos,) = step["special_tokens"][part["SpecialToken"]["id"]]["ids"]
        elif step["type"] != "ByteLevel":
            refuse("post-processor", step["type"])

    vocab, control = model["vocab"], {token["content"] for token in added if token.get("special")}
    ids = {byte_level(token): i for token, i in vocab.items() if is_byte_level(token)}
    whole = (
        {byte_level(token) for token in vocab.keys() - control if is_byte_level(token)}
        if model.get("ignore_merges")
        else set()
    )
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    if any(len(pair) != 2 for pair in merges):
        raise ValueError(f"{file}: damaged: each of its merges should be a pair of tokens")
    merged = [byte_level(token) for token in merge_order(merges)]
    unknown = None if model.get("unk_token") is None else vocab[model["unk_token"]]
    encode_text = byte_pair_encoder(merged, ids, splits, whole, unknown, bool(model.get("fuse_unk")))
    tokens = {i: byte_level(token) if is_byte_level(token) else token.encode() for token, i in vocab.items()}
    return Tokenizer(file.parent, tokens, encode_text, added, normalize, bos_id=bos, add_bos=bos is not None)


# ---- byte-pair encoding --------------------------------------------------------------------------------------------


def byte_pair_encoder(
    merged: list[bytes],
    ids: dict[bytes, int],
    splits: list[Callable[[str], list[str]]],
    whole: Container[bytes] = (),
    unknown: int | None = None,
    fuse_unknown: bool = False,
) -> Callable[[str], list[int]]:
    """A function from text to ids; tiktoken does the merging.

    merged: the tokens of two bytes and more, in the order in which they are merged. splits: how text is cut into
    pieces. whole: pieces that are one token whatever the merges say (`ignore_merges`). A byte that is not in `ids` is
    dropped before merging, or becomes `unknown` (one for a run of them if fuse_unknown), as in Hugging Face's BPE.
    """
    order = [bytes([b]) for b in range(256)] + merged  # all bytes: tiktoken panics on one that it has no token for
    bpe = tiktoken.Encoding("bpe", pat_str="", mergeable_ranks={t: i for i, t in enumerate(order)}, special_tokens={})
    id_of = [ids.get(token, unknown) for token in order]
    absent = re.compile(b"(?:%s)+" % (b"|".join(re.escape(b) for b in order[:256] if b not in ids) or b"(?!)"))

    @lru_cache(maxsize=1 << 16)
    def encode_piece(piece: str) -> list[int]:
        data = piece.encode()
        if data in whole:
            return [ids[data]]
        if unknown is None:
            data = absent.sub(b"", data)
        elif fuse_unknown:
            data = absent.sub(lambda run: run[0][:1], data)
        return [id_of[rank] for rank in bpe._encode_single_piece(data)] if data else []

    def encode_text(text: str) -> list[int]:
        pieces = [text]
        for split in splits:
            pieces = [part for piece in pieces for part in split(piece)]
        return [i for piece in pieces for i in encode_piece(piece)]

    return encode_text


def merge_order(merges: list[tuple[str, str]]) -> list[str]:
    """Tokens in the order in which tiktoken has to merge them to give what Hugging Face's BPE gives.

    Hugging Face merges the listed pairs; tiktoken merges any neighbours that together are a token. These differ unless
    tiktoken knows just the tokens that the listed pairs make of their own text, each at the rank of its last merge.
    With those the two agree on every text: until two neighbours that spell a token T are merged, all that has
    happened between T's ends is what happens when T stands alone, so they are the pair of T's last merge.
    """
    rank_of, never = {pair: rank for rank, pair in enumerate(merges)}, len(merges)
    order = {}
    for token in {left + right for left, right in merges}:
        parts = list(token)
        ranks = [rank_of.get(pair, never) for pair in zip(parts, parts[1:], strict=False)]
        while ranks and (rank := min(ranks)) != never:
            i = ranks.index(rank)
            del ranks[i]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
            for j in range(max(i - 1, 0), min(i + 1, len(ranks))):
                ranks[j] = rank_of.get((parts[j], parts[j + 1]), never)
        if not ranks:
            order[token] = rank
    return sorted(order, key=order.__getitem__)


def isolate(pattern: str) -> Callable[[str], list[str]]:
    """A function that cuts text before and after each match of `pattern`."""
    find = regex.compile(pattern)

    def split(text: str) -> list[str]:
        pieces, end = [], 0
        for match in find.finditer(text):
            pieces += [text[end : match.start()], match[0]]
            end = match.end()
        return [piece for piece in [*pieces, text[end:]] if piece]

    return split


# GPT-2's byte-level alphabet: a byte that prints in Latin-1 is its own character, the others follow from U+0100.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF = {chr(b): b for b in PRINTABLE} | {chr(256 + i): b for i, b in enumerate(sorted({*range(256)} - {*PRINTABLE}))}


def is_byte_level(token: str) -> bool:
    """Whether tokenizer.json spells `token` in that alphabet; added tokens are in its list as well, in plain text."""
    return BYTE_OF.keys() >= set(token)


def byte_level(token: str) -> bytes:
    return bytes([BYTE_OF[c] for c in token])


# ---- small things --------------------------------------------------------------------------------------------------


def any_of(contents: Iterable[str], engine: Any = re) -> Any:
    """A pattern that finds any of these strings, the longest where several begin at one place."""
    return engine.compile("|".join(map(re.escape, sorted(filter(None, contents), key=len, reverse=True))) or r"(?!)")


def replace_surrogates(text: str) -> str:
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def flatten(step: dict | None, children: str) -> list[dict]:
    """A tokenizer.json step as a list: none, one, or the steps of a Sequence."""
    if step is None or step["type"] != "Sequence":
        return [step] if step else []
    return [leaf for child in step[children] for leaf in flatten(child, children)]


def parse_json(file: Path, data: bytes) -> dict:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: should hold a JSON object, not {type(value).__name__}")
    return value


def read_config(file: Path) -> dict:
    """An optional JSON file: {} if it is not there."""
    return parse_json(file, file.read_bytes()) if file.is_file() else {}


def added_in_config(directory: Path) -> list[dict]:
    """Tokens that were added to a tokenizer.model, which tokenizer_config.json lists by id."""
    listed = read_config(directory / "tokenizer_config.json").get("added_tokens_decoder", {})
    return [{"id": int(i), **token} for i, token in listed.items()]


def read_template(directory: Path, config: dict) -> tuple[str | None, Path]:
    """The chat template, None if there is none, and the file that has it or should."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8"), file
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template, directory / "tokenizer_config.json"


@lru_cache(maxsize=8)
def compile_template(template: str) -> jinja2.Template:
    """The template as Hugging Face would run it: sandboxed, since it comes with the weights."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, **{"ensure_ascii": False, **kwargs})
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
