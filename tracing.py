"""`--trace`: one self-contained HTML page of a speculative run. Which token came from whom, why, and what it cost.

`Trace` listens to `generate` (as its `observe` and its `callback`) and keeps a few numbers of each token, not the
distributions they came from. `page` puts them as JSON into tracing.html, whose script draws the page. What the model
wrote reaches the page only as text nodes, and the page's policy lets nothing run or load but what is in tracing.html.
"""

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from generate import DraftLength, Round, residual
from tokenizer import StreamDecoder, Tokenizer

TOP = 5  # tokens shown of each distribution
PROMPT_CHARACTERS = 4000  # of a longer prompt, the end is shown
MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
UNSEEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}  # Unicode categories: controls, bidi and other format characters, …


def visible(text: str, flowing: bool = False) -> str:
    """`text` with all that is invisible made visible: ␣ and ⏎, ⟨U+202E⟩ for a control, ⟨F0⟩ for a byte that is part of
    a character (as `surrogateescape` decodes it). `flowing`: for running text, where a space between words stays one
    and a line still ends."""
    blank = not text.strip()
    shown = []
    for c in text:
        kind = unicodedata.category(c)
        if flowing and not blank and kind == "Zs":
            shown.append(c)
        elif c in MARKS:
            shown.append(MARKS[c] + ("\n" if flowing and c == "\n" else ""))
        elif "\udc80" <= c <= "\udcff":
            shown.append(f"⟨{ord(c) - 0xDC00:02X}⟩")
        elif kind in UNSEEN | {"Zs"} and not (c in "\u200c\u200d" and len(text) > 1):  # joiners shape their neighbours
            shown.append(f"⟨U+{ord(c):04X}⟩")
        else:
            shown.append(c)
    return "".join(shown)


def significant(x: float) -> float:
    """Six digits: more than a reader wants, and few enough that a thousand tokens stay small."""
    return float(f"{x:.6g}")


def compared(record: dict) -> dict:
    """A token's record as temperature 0 has it, where `accept_or_correct` compares tokens: none of the numbers of the
    one-hot distributions, which say no more than the tokens do, nor the random ones, which decided nothing."""
    kept = {key: value for key, value in record.items() if key not in ("q", "p", "ratio", "u", "top")}
    return kept | ({"rejected": [{"name": draft["name"]} for draft in kept["rejected"]]} if "rejected" in kept else {})


class Trace:
    """Collects a run of `rows` rows that continue `prompt`: pass `observe` and `put` to `generate`."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], rows: int = 1):
        self.tokenizer, self.prompt = tokenizer, list(prompt)
        self.rounds: list[list[float]] = []  # k, seconds of drafting, seconds of verifying
        self.tokens: list[list[dict]] = [[] for _ in range(rows)]
        self.decoders = [StreamDecoder(tokenizer, skip_special=False) for _ in range(rows)]
        for decoder in self.decoders:
            for token in prompt:
                decoder.put(token)
        self.drafts: list[list[dict]] = [[] for _ in range(rows)]  # of the last round, with what decided on each
        self.accepted = [0] * rows  # how many of them
        self.left = [0] * rows  # tokens of that round that are still to come
        self.last: tuple[Tensor, ...] = ()  # the last round's distributions of the token after the accepted ones

    def name(self, token: int) -> str:
        """A token by itself, all of it visible."""
        data = self.tokenizer.tokens.get(token)
        if not data:  # a head may be padded beyond the vocabulary
            return f"⟨id {token}⟩"
        text = visible(data.decode("utf-8", "surrogateescape"))
        return "◌" + text if unicodedata.category(text[0])[0] == "M" else text  # a mark needs something to stand on

    def observe(self, round: Round) -> None:
        """Take from a round's distributions, which are large, what the page will show."""
        self.rounds.append([round.drafts.shape[1], significant(round.draft_s), significant(round.verify_s)])
        q, p = (
            probs.gather(-1, round.drafts[..., None]).squeeze(-1) for probs in (round.q, round.p[:, : round.q.shape[1]])
        )
        ratio = (p / q).clamp(max=1).nan_to_num(0)  # 0 / 0 is rejected
        numbers = torch.stack((q, p, ratio, round.uniform.to(p.dtype)), dim=-1).tolist()
        for row, ids in enumerate(round.drafts.tolist()):
            self.drafts[row] = [
                {"name": self.name(id)} | dict(zip(("q", "p", "ratio", "u"), map(significant, of), strict=True))
                for id, of in zip(ids, numbers[row], strict=True)
            ]
            for untested in self.drafts[row][round.accepted[row] + 1 :]:
                del untested["u"]  # it was drawn, but decided nothing
        self.accepted, self.left = round.accepted, [n + 1 for n in round.accepted]

        accepted = torch.tensor(round.accepted, device=round.p.device)
        row = torch.arange(len(accepted), device=round.p.device)
        drawn_from = residual(round.q, round.p, accepted)
        drawn_from = drawn_from / drawn_from.sum(-1, keepdim=True)
        self.last = F.pad(round.q, (0, 0, 0, 1))[row, accepted], round.p[row, accepted], drawn_from

    def put(self, row: int, token: int, kind: str) -> None:
        """One token, as `generate`'s callback gets it."""
        text = self.decoders[row].put(token)
        # Until a character is complete, its tokens show their bytes.
        record = {"text": visible(text, flowing=True) or self.name(token), "name": self.name(token), "kind": kind}
        self.tokens[row].append(record)
        if self.left[row] == 0:  # the prompt's pass made it, or it came after the draft had failed
            return
        drafts = self.drafts[row]
        record["round"] = len(self.rounds) - 1
        self.left[row] -= 1
        at = self.accepted[row] - self.left[row]
        if kind == "accepted":
            record |= {key: drafts[at][key] for key in ("q", "p", "ratio", "u")} | {"place": at + 1}
            return
        q, p, drawn_from = (probs[row] for probs in self.last)
        likeliest = drawn_from.topk(min(TOP, len(drawn_from))).indices
        shown = torch.cat((likeliest, likeliest.new_tensor([token])))  # the last one is the one that was drawn
        numbers = torch.stack((q[shown], p[shown], drawn_from[shown]), dim=-1).tolist()
        top = [
            {"name": self.name(id), "drawn": id == token}
            | dict(zip(("q", "p", "prob"), map(significant, of), strict=True))
            for id, of in zip(shown.tolist(), numbers, strict=True)
            if of[2] > 0 or id == token
        ]
        drawn = top[-1]
        if any(entry["drawn"] for entry in top[:-1]):
            top.pop()
        record |= {"p": drawn["p"], "top": top}
        if kind == "corrected":
            record |= {"q": drawn["q"], "rejected": drafts[at:]}

    def page(self, stats: dict, length: DraftLength, about: dict[str, str]) -> str:
        """The page. stats: of `generate`. length: what it drafted by. about: names and settings to be shown; by its
        "temperature" the page tells which rule decided."""
        shown = ("alpha", "tokens_per_pass", "predicted_speedup", "measured_speedup", "plain_tokens_per_s")
        shown += ("tokens_per_s", "ttft_s", "decode_s", "fallback")
        prompt = visible(self.tokenizer.decode(self.prompt, skip_special=False), flowing=True)
        greedy = float(about.get("temperature", 1)) == 0
        data = {
            "greedy": greedy,
            "about": {key: visible(value, flowing=True) for key, value in about.items()},
            "stats": {key: stats.get(key) for key in shown},
            "plain_s": length.plain_s or None,
            "prompt": prompt if len(prompt) <= PROMPT_CHARACTERS else "… " + prompt[-PROMPT_CHARACTERS:],
            "prompt_tokens": len(self.prompt),
            "rounds": self.rounds,
            "rows": [[compared(record) for record in row] for row in self.tokens] if greedy else self.tokens,
        }
        return fill(Path(__file__).with_name("tracing.html").read_text(encoding="utf-8"), data)


def fill(template: str, data: dict) -> str:
    """Put `data` as JSON, and the hashes by which the page allows its own style and script, into the template."""
    for tag in ("style", "script"):
        body = re.search(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        template = template.replace(f"{tag}-hash", f"sha256-{digest}")
    # Pure ASCII, and no "<": nothing in it can end the element that holds it.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace('"the data"', text)
