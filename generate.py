"""Generate text, plainly or speculatively, from the shell or from Python.

Read on from here: sampling; prompt and decode steps; the drafts; `speculative_decode`, which is what this project is
about; how many tokens to draft; what is counted; and `generate`, the loop around all of them. Its flags: cli.py.

Shapes: B rows (batch), S positions in one call, T prompt length, V vocabulary, k draft tokens.
"""

import time
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import load_model  # noqa: F401 (part of this module's interface, as is the next line)
from compiling import compile_model, fix_shape  # noqa: F401
from model import Transformer

PREFILL_CHUNK = 2048  # a longer prompt is processed in pieces: bounds the memory of its activations


# ---------------------------------------------------------------- sampling


def logits_to_probs(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """The distribution that is sampled from: float32 [..., V], from logits [..., V].

    Temperature, then the `top_k` most likely tokens, then the fewest of those whose probabilities reach `top_p`
    (nucleus sampling, Holtzman et al. 2020, section 3.1). Temperature 0 is argmax: a one-hot distribution, exactly.
    Tokens that tie with the last one kept are kept too. Logits that are not finite do not hide: they give NaN.
    """
    if temperature == 0:
        return one_hot(greedy(logits), logits.shape[-1])
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = logits.softmax(dim=-1)
    if top_p is not None and top_p < 1:
        # A nucleus is nearly always small, and to sort a whole vocabulary takes a CPU half as long as a step.
        descending = probs.topk(min(1024, probs.shape[-1]), dim=-1).values
        if probs.device.type != "cpu" or (descending.cumsum(dim=-1)[..., -1] < top_p).any():
            descending = probs.sort(dim=-1, descending=True).values
        before = descending.cumsum(dim=-1) - descending  # what is likelier than a token; 0 for the first, so one stays
        least = descending.masked_fill(before >= top_p, torch.inf).amin(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token, int64 [...], of logits [..., V]; where they are not finite V, which is no token."""
    top = logits.max(dim=-1)
    return torch.where(top.values.abs() < torch.inf, top.indices, logits.shape[-1])


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    """All probability on one token: float32 [..., V] from int64 [...]. What is no token gives NaN."""
    at = tokens[..., None]
    mass = torch.where(at < vocab_size, 1.0, torch.nan)
    probs = torch.zeros(*tokens.shape, vocab_size, device=tokens.device)
    return probs.scatter_(-1, at.clamp(max=vocab_size - 1), mass)


def draw(probs: Tensor) -> Tensor:
    """Draw one token from each distribution: int64 [...] from (not necessarily normalized) probs [..., V].

    The inverse of the cumulative distribution at one uniform number: a draw costs one random number, and no token of
    probability 0 can be drawn.
    """
    cumulative = probs.double().cumsum(dim=-1)
    uniform = torch.rand(*probs.shape[:-1], 1, dtype=torch.float64, device=probs.device)
    return torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True).squeeze(-1)


def pick(logits: Tensor, **sampling) -> tuple[Tensor, Tensor | None]:
    """`sample`, with None for a one-hot distribution: at temperature 0 the token says all."""
    if sampling.get("temperature") == 0:
        return greedy(logits), None
    probs = logits_to_probs(logits, **sampling)
    return draw(probs), probs


def sample(logits: Tensor, **sampling) -> tuple[Tensor, Tensor]:
    """Sample from logits [..., V]: (token int64 [...], the distribution it was drawn from [..., V])."""
    token, probs = pick(logits, **sampling)
    return token, one_hot(token, logits.shape[-1]) if probs is None else probs


# ---------------------------------------------------------------- prompt and decode steps


def prompt_logits(model: Transformer, x: Tensor, input_pos: Tensor) -> Tensor:
    """Fill the cache with the tokens x [B, S] at `input_pos` [S] or [B, S]; the last position's logits [B, 1, V]."""
    for start in range(0, x.shape[1], PREFILL_CHUNK):
        piece = slice(start, start + PREFILL_CHUNK)
        logits = model(x[:, piece], input_pos[..., piece], logits_to_keep=1)
    return logits


def prefill(model: Transformer, x: Tensor, input_pos: Tensor, **sampling) -> tuple[Tensor, Tensor]:
    """Process a prompt x int64 [B, S] at `input_pos` int64 [S]: (the next token [B, 1], its distribution [B, 1, V])."""
    return sample(prompt_logits(model, x, input_pos), **sampling)


def decode_one_token(model: Transformer, x: Tensor, input_pos: Tensor, **sampling) -> tuple[Tensor, Tensor]:
    """One step: x int64 [B, 1] at `input_pos` [1] or [B, 1] -> (next token [B, 1], its distribution [B, 1, V])."""
    return sample(model(x, input_pos), **sampling)


def decode_n_tokens(
    model: Transformer,
    cur_token: Tensor,
    input_pos: Tensor,
    num_new_tokens: int,
    callback: Callable[[Tensor], bool | None] = lambda token: None,
    **sampling,
) -> Tensor:
    """Plain decoding: the `num_new_tokens` after `cur_token` [B, 1], which is at `input_pos` [1] or [B, 1].

    `callback` gets each token [B, 1] as it is made and may end the run by returning True. Returns int64 [B, n].
    """
    tokens = []
    for step in range(num_new_tokens):
        # As decode_one_token, without the distribution: at temperature 0 that costs as much as a layer.
        cur_token, _ = pick(model(cur_token, input_pos + step), **sampling)
        tokens.append(cur_token)
        if callback(cur_token):
            break
    return torch.cat(tokens, dim=1) if tokens else cur_token[:, :0]


# ---------------------------------------------------------------- drafts


class Draft(Protocol):
    """Anything that proposes. Add your own: one method, and `speculative_decode` keeps it honest."""

    def propose(self, text: list[list[int]], k: int, **sampling) -> tuple[Tensor, Tensor | None]:
        """Guess how each row of `text` (all ids so far, prompt included) goes on.

        Returns up to k tokens for each row, int64 [B, k'] with k' ≤ k, and the distributions that they were drawn from,
        [B, k', V], under the same `sampling` as the target's. None stands for one-hot ones: the guess was no draw.
        """


class NgramDraft:
    """Prompt lookup (Saxena 2023): propose what followed the latest earlier occurrence of the last n tokens.

    Tries n from `longest` down to `shortest`. It costs no forward pass; it pays where a text repeats itself.
    """

    def __init__(self, longest: int = 3, shortest: int = 1):
        self.longest, self.shortest = longest, shortest

    def propose(self, text: list[list[int]], k: int, **sampling) -> tuple[Tensor, None]:
        found = [self.lookup(row, k) for row in text]
        if not any(found):
            return torch.empty(len(text), 0, dtype=torch.int64), None
        # A row without a match has to propose something beside the others: its last token. The rule will judge it.
        return torch.tensor([guess or row[-1:] * k for guess, row in zip(found, text, strict=True)]), None

    def lookup(self, row: list[int], k: int) -> list[int]:
        """The k tokens that followed the latest match in `row`, or []. A match at the end goes on into its own copy."""
        ids = array("i", row)
        haystack, width = ids.tobytes(), ids.itemsize  # as bytes, since their search runs in C
        for n in range(min(self.longest, len(row) - 1), self.shortest - 1, -1):
            pattern = haystack[-n * width :]
            at = haystack.rfind(pattern, 0, -width)
            while at >= 0 and at % width:  # these bytes lie across two ids
                at = haystack.rfind(pattern, 0, at + len(pattern) - 1)
            if at >= 0:
                start = at // width + n
                guess = row[start : start + k]
                while len(guess) < k:
                    guess.append(guess[len(guess) - (len(row) - start)])
                return guess
        return []


def draft_tokens(
    model: Transformer, logits: Tensor, input_pos: Tensor, k: int, vocab_size: int, **sampling
) -> tuple[Tensor, Tensor | None]:
    """Draw k tokens [B, k] one after the other, and their distributions [B, k, V] (None at temperature 0: one-hot),
    from the `logits` [B, 1, V] of the token at `input_pos` [B, 1] on. The last one is not fed to the model. Heads are
    padded to different sizes, so only the target's `vocab_size` ids are drawn from."""
    tokens, probs = [], []
    for i in range(k):
        if i > 0:
            logits = model(tokens[-1].clamp(max=logits.shape[-1] - 1), input_pos + i)  # what is no token fails later
        token, q = pick(logits[..., :vocab_size], **sampling)
        tokens.append(token)
        probs.append(q)
    return torch.cat(tokens, dim=1), None if sampling.get("temperature") == 0 else torch.cat(probs, dim=1)


class ModelDraft:
    """A smaller, or quantized, model with a cache of its own as draft. `vocab_size`: the target's."""

    def __init__(self, model: Transformer, vocab_size: int):
        self.model = model
        self.vocab_size = vocab_size
        self.cached: list[list[int]] = []  # the ids whose keys and values are in the cache, row by row
        self.drafted: Tensor | None = None  # those that the last round added, [B, k - 1], on their way to the host

    def setup_caches(self, max_batch_size: int, max_seq_length: int) -> None:
        if max_batch_size > self.model.max_batch_size or max_seq_length > self.model.max_seq_length:
            self.cached = []  # a larger cache is a new one
        self.model.setup_caches(max_batch_size, max_seq_length)

    def prepare(self, text: list[list[int]]) -> None:
        """Read a prompt ahead of the first proposal."""
        self.feed(text)

    def feed(self, text: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Bring the cache up to `text`: (the last token's logits [B, 1, V], its position [B, 1]).

        What is fed is what was missing: usually the corrected token; after a fully accepted round its last draft too;
        all that was decoded plainly meanwhile. A row that lacks fewer is fed some tokens again, to the same effect.
        """
        if len(self.cached) != len(text):
            self.cached, self.drafted = [[] for _ in text], None
        if self.drafted is not None:
            for row, added in zip(self.cached, self.drafted.tolist(), strict=True):
                row += added
        missing = 1  # at least the last token, to have its logits
        for cached, row in zip(self.cached, text, strict=True):
            while cached != row[: len(cached)]:  # roll back rejected drafts, or to where a new conversation parts
                cached.pop()
            missing = max(missing, len(row) - len(cached))
        positions = [[max(0, i) for i in range(len(row) - missing, len(row))] for row in text]
        ids = [[row[i] for i in at] for row, at in zip(text, positions, strict=True)]
        if max(map(max, ids)) >= self.model.args.vocab_size:  # a GPU, not to be waited for, would assert
            raise ValueError(f"the text has an id beyond the draft's {self.model.args.vocab_size}")
        self.cached, self.drafted = [[] for _ in text], None  # until the pass has succeeded
        device = self.model.norm.weight.device
        input_pos, x = to_device(positions, device), to_device(ids, device)
        # One or two tokens is the common case, for which a compiled step stands ready; anything longer is a prompt.
        logits = self.model(x, input_pos)[:, -1:] if missing <= 2 else prompt_logits(self.model, x, input_pos)
        self.cached = [list(row) for row in text]
        return logits, input_pos[:, -1:]

    def propose(self, text: list[list[int]], k: int, **sampling) -> tuple[Tensor, Tensor | None]:
        drafts, q = draft_tokens(self.model, *self.feed(text), k, self.vocab_size, **sampling)
        self.drafted = drafts[:, : k - 1].to("cpu", non_blocking=True)  # there when the round has waited for the target
        return drafts, q


# ---------------------------------------------------------------- the rule


class DraftError(Exception):
    """The draft failed: it raised, or what it proposed is no distribution. The target is as it was."""


@dataclass
class Round:
    """What one round did, for statistics and traces. Tensors stay on the device.

    One-hot distributions, which is all that temperature 0 has, may stand as their tokens: a vocabulary is long.
    """

    drafts: Tensor  # [B, k]
    q: Tensor  # [B, k, V] or [B, k]: what each draft was drawn from
    p: Tensor  # [B, k + 1, V] or [B, k + 1]: the target's distributions at the same places, and one further
    uniform: Tensor  # [B, k]: the random numbers that decided
    accepted: list[int]  # of each row
    draft_s: float = 0.0
    verify_s: float = 0.0

    def spelled_out(self, vocab_size: int) -> "Round":
        """The same with q and p over the whole vocabulary."""
        q, p = (x if x.is_floating_point() else one_hot(x, vocab_size) for x in (self.q, self.p))
        return replace(self, q=q, p=p)


def accept_or_resample(drafts: Tensor, q: Tensor, p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The rule (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2): (accepted [B], next token [B]).

    Draft i, drawn from q_i, is accepted with probability min(1, p_i / q_i). At the first rejection a token is drawn
    from the residual (p_i - q_i)+, normalized, and the round ends. A round that rejects nothing gets one token more,
    from p_{k+1}: the same residual, with q = 0. Either way each token is distributed as p, whatever q is.
    """
    k = drafts.shape[1]
    p_drafts = p[:, :k].gather(-1, drafts[..., None]).squeeze(-1)
    q_drafts = q.gather(-1, drafts[..., None]).squeeze(-1)
    accept = uniform < p_drafts / q_drafts
    accepted = accept.int().cumprod(dim=1).sum(dim=1)  # how many before the first rejection

    return accepted, draw(residual(q, p, accepted))


def accept_or_correct(drafts: Tensor, likeliest: Tensor) -> tuple[Tensor, Tensor]:
    """What the rule comes to at temperature 0, where p is one-hot, on the target's `likeliest` tokens [B, k + 1]."""
    accepted = (drafts == likeliest[:, :-1]).int().cumprod(dim=1).sum(dim=1)
    return accepted, likeliest.gather(1, accepted[:, None]).squeeze(1)


def residual(q: Tensor, p: Tensor, accepted: Tensor) -> Tensor:
    """What the token after `accepted` [B] drafts is drawn from: (p - q)+ at that place, not normalized, [B, V]."""
    row = torch.arange(len(accepted), device=p.device)
    p_next = p[row, accepted]
    k = q.shape[1]
    q_next = q[row, accepted.clamp(max=k - 1)] * (accepted < k)[:, None] if k else 0.0  # q = 0 after the last draft
    left = (p_next - q_next).clamp(min=0)
    # Rounding can reject where p and q are all but equal; p itself is then what is left to draw from.
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p_next)


def speculative_decode(
    model: Transformer,
    draft: "Draft | Transformer",
    cur_token: Tensor,
    input_pos: Tensor | int,
    speculate_k: int,
    *,
    text: list[list[int]] | None = None,
    observe: Callable[[Round], None] = lambda round: None,
    **sampling,
) -> Tensor | list[Tensor]:
    """One round: the draft proposes k tokens, the target verifies them all in one pass, the rule keeps a prefix.

    `cur_token` int64 [B, 1] is the last token known, not yet in the target's cache, and `input_pos` (int, [1] or [B])
    its position; the cache holds all before it. `text`: all ids so far, row by row, each ending in its `cur_token`.
    Without it `draft` must be a `Transformer` whose own cache holds all before `input_pos`.

    Returns the new tokens, int64 [n] on the CPU, 1 ≤ n ≤ k + 1 (for several rows a list of such, each with its own n),
    and leaves all of them but the last in the target's cache. Rejected entries stay there too, at positions that no
    query sees before they are overwritten. Raises DraftError if the draft fails; the text is then as it was.
    """
    device = model.norm.weight.device
    cur_token = cur_token.reshape(-1, 1).to(device, non_blocking=True)
    input_pos = torch.as_tensor(input_pos).reshape(-1, 1).to(device, non_blocking=True)
    clock = Stopwatch(device)

    drafts, q, sound = propose(draft, text, cur_token, input_pos, speculate_k, model.args.vocab_size, **sampling)
    clock.lap()

    k = drafts.shape[1]
    uniform = torch.rand(drafts.shape, device=device)
    if k == 0:  # nothing to verify: a plain step
        token, p = decode_one_token(model, cur_token, input_pos.expand(len(cur_token), -1), **sampling)
        tokens, counts, sound = token.cpu(), [0] * len(token), True
    else:
        block = torch.cat((cur_token, drafts), dim=1)
        positions = (input_pos + torch.arange(k + 1, device=device)).expand(len(block), -1)
        logits = model(block, positions)
        if sampling.get("temperature") == 0:
            p = greedy(logits)
            accepted, token = accept_or_correct(drafts, p)
        else:
            p = logits_to_probs(logits, **sampling)
            q = q if q.is_floating_point() else one_hot(q, p.shape[-1])
            accepted, token = accept_or_resample(drafts, q, p, uniform)
        tokens = torch.cat((drafts, token[:, None]), dim=1).to("cpu", non_blocking=True)
        *counts, sound = torch.cat((accepted, sound[None])).tolist()  # the one place where a round waits for the device
    clock.lap()

    if not sound:
        raise DraftError("what it proposed was not drawn from a distribution over the vocabulary")
    if isinstance(draft, Transformer) and k and max(counts) == k:
        draft(drafts[:, -1:], input_pos + k)  # accepted but never fed: the cache would have a hole
    observe(Round(drafts, q, p, uniform, counts, *clock.seconds()))
    rows = [torch.cat((tokens[b, :n], tokens[b, k:])) for b, n in enumerate(counts)] if k else list(tokens)
    return rows[0] if len(rows) == 1 else rows


def propose(
    draft: "Draft | Transformer",
    text: list[list[int]] | None,
    cur_token: Tensor,
    input_pos: Tensor,
    k: int,
    vocab_size: int,
    **sampling,
) -> tuple[Tensor, Tensor, Tensor]:
    """Ask the draft for k tokens: int64 [B, k'], their distributions [B, k', V] (or, where those are one-hot, the same
    tokens), and whether those are such, a bool [].

    Whatever the draft raises is a DraftError, and so is a proposal of another form. What only its numbers can tell
    (NaN, ids outside the vocabulary, rows that do not sum up to 1) is left to the caller, who waits for the device.
    """
    rows, device = len(cur_token), cur_token.device
    if k == 0:
        return cur_token[:, :0], cur_token[:, :0], torch.ones((), dtype=torch.bool, device=device)
    try:
        if isinstance(draft, Transformer):
            drafts, q = draft_tokens(draft, draft(cur_token, input_pos), input_pos, k, vocab_size, **sampling)
        else:
            drafts, q = draft.propose(text, k, **sampling)
        if drafts.dtype != torch.int64 or drafts.dim() != 2 or len(drafts) != rows or drafts.shape[1] > k:
            found = f"{drafts.dtype} {list(drafts.shape)}"
            raise ValueError(f"{found} is no proposal of at most {k} tokens for each of {rows} rows")
        proposed = drafts.to(device, non_blocking=True)
        drafts = proposed.clamp(0, vocab_size - 1)
        valid = proposed == drafts
        if q is None:
            return drafts, drafts, valid.all()
        q = q.to(device)
        if q.shape[:-1] != drafts.shape:
            raise ValueError(f"{list(q.shape)} cannot be the distributions of {list(drafts.shape)} tokens")
        q = F.pad(q[..., :vocab_size], (0, max(0, vocab_size - q.shape[-1])))
        valid &= q.gather(-1, drafts[..., None]).squeeze(-1) > 0
        return drafts, q, (valid & (q.amin(-1) >= 0) & ((q.sum(-1) - 1).abs() < 1e-3)).all()
    except Exception as error:  # whatever goes wrong in a draft, the target can do without it
        raise DraftError(reason(error)) from error


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def to_device(values: list, device: torch.device) -> Tensor:
    """A tensor of `values` on `device`, sent without waiting for what that is doing."""
    return torch.tensor(values).to(device, non_blocking=True)


class Stopwatch:
    """Seconds between laps, on a GPU by events, so that timing does not wait for it."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.laps: list = []
        self.lap()

    def lap(self) -> None:
        if self.cuda:
            self.laps.append(torch.cuda.Event(enable_timing=True))
            self.laps[-1].record()
        else:
            self.laps.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self.laps, self.laps[1:], strict=False))
        if self.cuda:
            self.laps[-1].synchronize()
            return [start.elapsed_time(end) / 1000 for start, end in pairs]
        return [end - start for start, end in pairs]


# ---------------------------------------------------------------- how many tokens to draft


class DraftLength:
    """Chooses k for each round, and keeps the costs and the acceptance that the choice rests on.

    With α the chance that a draft is accepted, c the cost of a draft step and v_k that of verifying k drafts, both in
    plain steps of the target, k drafts speed decoding up by (1 - α^(k+1)) / ((1 - α)(k c + v_k)): the expected number
    of tokens (Leviathan et al. 2023, equation 1) over what they cost (theorem 3.8 has v_k = 1, as on an idle GPU).
    `auto` takes the k with the largest value, 0 if none clearly exceeds 1, and then tries again now and then. It drafts
    only where it can afford to see all of it rejected: what it has lost in all is kept below a share of the time.
    """

    LARGEST = 8  # `auto` drafts at most so many
    MEMORY = 0.95  # what a round's evidence on α keeps of its weight for each later round
    LOSS = 0.03  # `auto` may lose this share of the time to trying, and at the start
    START = 2.0  # so many plain steps
    GAIN = 1.03  # a smaller speed-up lies within the error of the costs, and is not worth a draft
    REFRESH = 64  # rounds after which a plain step is measured anew, since it gets dearer as the text grows

    def __init__(self, speculate_k: int | str = "auto", draft_cost: float = 0.0):
        self.fixed = None if speculate_k == "auto" else int(speculate_k)
        self.accepted, self.tested = 3.2, 4.0  # a hopeful start: α = 0.8, on the weight of four drafts
        self.pass_s: dict[int, deque] = {}  # k -> seconds of verifying, of the last 16 such rounds
        self.growth: deque = deque(maxlen=16)  # (v_k - 1) / k of each round
        self.draft_s: deque = deque(maxlen=16)  # seconds of one draft step
        self.plain_s = 0.0  # seconds of one plain step of the target
        self.c = draft_cost  # until it is measured
        self.spent = self.lost = 0.0  # seconds in all; seconds that plain decoding would not have spent
        self.plain_rounds = self.draft_rounds = 0  # since the last of the other kind
        self.wait = self.pause = 16  # plain rounds until drafting is tried again; until the next try after that

    @property
    def alpha(self) -> float:
        return self.accepted / self.tested

    def v(self, k: int) -> float:
        """The cost of verifying k drafts: measured, or as it grew in the rounds that were."""
        times = self.pass_s.get(k, ())
        if len(times) >= 3 or k == 0:
            return median_low(times) / self.plain_s
        return 1 + self.per_token * k

    @property
    def per_token(self) -> float:
        return max(0.0, median_low(self.growth)) if self.growth else 0.1

    def speedup(self, k: int, alpha: float | None = None) -> float:
        alpha = min(self.alpha if alpha is None else alpha, 0.999)
        return (1 - alpha ** (k + 1)) / ((1 - alpha) * (k * self.c + self.v(k)))

    def cost(self, k: int) -> float:
        """Of a round, in plain steps. The draft first reads what was decoded without it."""
        return k * self.c + self.v(k) + self.c * self.per_token * self.plain_rounds

    def choose(self, limit: int) -> int:
        """k for the next round, at most `limit`. The first two are plain: all costs are relative to such."""
        if self.fixed is not None:
            return min(self.fixed, limit) if self.plain_s else 0
        if len(self.pass_s.get(0, ())) < 2 or self.draft_rounds >= self.REFRESH:
            return 0
        limit = min(limit, self.LARGEST, max(3, 2 * max(self.pass_s)))  # costs are not guessed far beyond the measured
        best = max(range(limit + 1), key=self.speedup)
        if self.speedup(best) < self.GAIN:
            best = 0
        if best == 0 and self.plain_rounds >= self.wait:
            best = min(1, limit)
        allowed = self.LOSS * self.spent + self.START * self.plain_s
        while best and self.lost + (self.cost(best) - 1) * self.plain_s > allowed:
            best -= 1
        return best

    def plain_steps(self) -> int:
        """After `choose` has said 0: how many plain steps to make before it might say something else."""
        if self.fixed is not None or len(self.pass_s.get(0, ())) < 2 or not self.plain_rounds:
            return 1
        return max(1, self.wait - self.plain_rounds)

    def record_pass(self, k: int, seconds: float) -> None:
        """Learn from a pass over k + 1 tokens, a plain step with k = 0."""
        self.pass_s.setdefault(k, deque(maxlen=16)).append(seconds)
        self.plain_s = min(median_low(times) for times in self.pass_s.values())  # more tokens never take less
        self.spent += seconds
        if k == 0:
            self.plain_rounds, self.draft_rounds = self.plain_rounds + 1, 0

    def record(self, round: Round, rows: Sequence[int]) -> None:
        """Learn from a round. `rows`: those that were still running."""
        k = round.drafts.shape[1]
        self.record_pass(k, round.verify_s)
        self.spent += round.draft_s
        if k == 0:
            return
        self.growth.append((round.verify_s / self.plain_s - 1) / k)
        if self.plain_rounds <= 2:  # else the time contains reading what was decoded without the draft
            self.draft_s.append(round.draft_s / k)
            self.c = median_low(self.draft_s) / self.plain_s
        # A round that took far longer than it does was held up by something else, as a plain step would have been.
        seconds = min(round.draft_s + round.verify_s, 2 * self.cost(k) * self.plain_s)
        self.lost += seconds - sum(round.accepted[b] + 1 for b in rows) / len(rows) * self.plain_s
        if any(round.accepted[b] for b in rows):
            self.wait, self.pause = 0, 16
        elif self.plain_rounds:  # it was a try
            self.wait, self.pause = self.pause, min(2 * self.pause, 64)
        self.plain_rounds, self.draft_rounds = 0, self.draft_rounds + 1
        self.accepted *= self.MEMORY
        self.tested *= self.MEMORY
        for b in rows:
            self.accepted += round.accepted[b]
            self.tested += min(round.accepted[b] + 1, k)  # what follows the first rejection was not tested


# ---------------------------------------------------------------- figures of a run


class Tally:
    """What the rounds of one run add up to."""

    def __init__(self, largest_k: int):
        self.passes = self.row_passes = 0  # of the target; the same times the rows that were running
        self.drafted: list[tuple[int, float, float]] = []  # k, seconds of drafting, of verifying
        self.accept_counts = [0] * (largest_k + 1)  # rounds (of a row) that accepted 0, 1, 2 … drafts
        self.proposed = self.tested = 0

    def record(self, round: Round, rows: Sequence[int]) -> None:
        self.passes, self.row_passes = self.passes + 1, self.row_passes + len(rows)
        k = round.drafts.shape[1]
        if k == 0:
            return
        self.drafted.append((k, round.draft_s, round.verify_s))
        for row in rows:
            self.accept_counts[round.accepted[row]] += 1
            self.proposed += k
            self.tested += min(round.accepted[row] + 1, k)

    @property
    def draft_steps(self) -> int:
        return sum(k for k, _, _ in self.drafted)

    def statistics(self, tokens: int, length: DraftLength) -> dict:
        """The figures of `--stats_json`. `acceptance_rate` is accepted ÷ proposed. The formula's α is accepted ÷
        tested: what follows a rejection in its round was proposed, but never put to the test."""
        accepted = sum(n * rounds for n, rounds in enumerate(self.accept_counts))
        alpha = accepted / self.tested if self.tested else None
        rounds = len(self.drafted)
        k_counts = [self.passes - rounds] + [0] * (len(self.accept_counts) - 1)  # rounds that drafted 0, 1, 2 … tokens
        for k, _, _ in self.drafted:
            k_counts[k] += 1
        predicted = None
        if rounds:
            bounded = min(alpha, 0.999)
            plain = self.passes - rounds
            gained = sum((1 - bounded ** (k + 1)) / (1 - bounded) for k, _, _ in self.drafted)
            spent = sum(k * length.c + length.v(k) for k, _, _ in self.drafted)
            predicted = (gained + plain) / (spent + plain)
        return {
            "acceptance_rate": accepted / self.proposed if self.proposed else None,
            "alpha": alpha,
            "tokens_per_pass": tokens / self.row_passes if self.row_passes else None,
            "accept_counts": self.accept_counts,
            "k_counts": k_counts,
            "rounds": rounds,
            "draft_s": sum(seconds for _, seconds, _ in self.drafted) / rounds if rounds else None,
            "verify_s": sum(seconds for _, _, seconds in self.drafted) / rounds if rounds else None,
            "predicted_speedup": predicted,
        }


def weight_bytes(model: Transformer) -> int:
    """The bytes of weights that one pass reads: all but the embedding table, of which it reads a row, unless the head
    is the same table."""
    tensors = dict(model.state_dict())  # caches are no part of it
    if model.output.weight is not model.tok_embeddings.weight:
        del tensors["tok_embeddings.weight"]
    return sum(t.numel() * t.element_size() for t in {t.data_ptr(): t for t in tensors.values()}.values())


# ---------------------------------------------------------------- the loop


def generate(
    model: Transformer,
    prompt: Sequence[int] | Tensor,
    max_new_tokens: int,
    *,
    batch_size: int = 1,
    draft: "Draft | Transformer | None" = None,
    speculate_k: "int | str | DraftLength" = 5,
    stop_ids: Sequence[int] = (),
    callback: Callable[[int, int, str], None] = lambda row, token, kind: None,
    observe: Callable[[Round], None] | None = None,
    cached: int = 0,
    **sampling,
) -> tuple[Tensor, dict]:
    """Continue `prompt` (token ids) by up to `max_new_tokens` in each of `batch_size` rows.

    draft: a `Transformer`, or any `Draft`. speculate_k: a number, "auto", or a `DraftLength` that has learned already.
    stop_ids: a row ends with the first of these. callback(row, token, kind) gets each token as it is made; kind is
    "plain", "accepted" (the draft's), "corrected" (in place of a rejected one) or "bonus" (after a fully accepted
    round). observe gets each `Round`. cached: how many tokens of the prompt the cache holds from an earlier call.
    sampling: temperature, top_k, top_p, as in `logits_to_probs`; torch's generator must be seeded by the caller.

    Returns (int64 [B, up to T + max_new_tokens], shorter rows filled up with their end token, statistics).
    """
    prompt = [int(token) for token in prompt]
    if not prompt or max_new_tokens < 1 or batch_size < 1:
        raise ValueError("a prompt of one token, one new token and one row are the least that can be generated")
    if not 0 <= min(prompt) <= max(prompt) < model.args.vocab_size:
        raise ValueError(f"the prompt has ids outside the model's vocabulary of {model.args.vocab_size}")
    if isinstance(draft, Transformer):
        draft = ModelDraft(draft, model.args.vocab_size)
    if isinstance(draft, ModelDraft):
        draft.setup_caches(batch_size, len(prompt) + max_new_tokens)
    if batch_size > model.max_batch_size or len(prompt) + max_new_tokens > model.max_seq_length:
        cached = 0  # a larger cache is a new one
    model.setup_caches(batch_size, len(prompt) + max_new_tokens)
    device = model.norm.weight.device
    draft_bytes = weight_bytes(draft.model) if isinstance(draft, ModelDraft) else 0
    length = speculate_k
    if not isinstance(length, DraftLength):
        length = DraftLength(speculate_k, draft_cost=draft_bytes / weight_bytes(model))

    text = [list(prompt) for _ in range(batch_size)]
    ends = len(prompt) + max_new_tokens
    running = list(range(batch_size))
    tally = Tally(DraftLength.LARGEST if length.fixed is None else length.fixed)

    def emit(row: int, token: int, kind: str) -> None:
        if token == model.args.vocab_size:  # what `draw` makes of NaN
            raise ValueError(not_finite)
        text[row].append(token)
        if token in stop_ids or len(text[row]) == ends:
            running.remove(row)
        callback(row, token, kind)

    def emit_plain(token: Tensor) -> bool:
        nonlocal step_began
        ids = token.flatten().tolist()
        if draft is not None:
            length.record_pass(0, time.perf_counter() - step_began)
        tally.passes, tally.row_passes = tally.passes + 1, tally.row_passes + len(running)
        for row, id in enumerate(ids):
            if row in running:
                emit(row, id, "plain")
        step_began = time.perf_counter()
        return not running

    def last_tokens() -> tuple[list[list[int]], Tensor, Tensor]:
        """Each row's text, its last token [B, 1] and that one's position [B, 1]. A row that has ended waits at the end
        of its prompt, where what is written to its cache harms nobody."""
        rows = [text[row] if row in running else prompt for row in range(batch_size)]
        cur_token = to_device([[row[-1]] for row in rows], device)
        return rows, cur_token, to_device([[len(row) - 1] for row in rows], device)

    # The rows share the prompt: it is processed once, and its keys and values are copied.
    start = time.perf_counter()
    cached = min(cached, len(prompt) - 1)
    input_pos = torch.arange(cached, len(prompt), device=device)
    logits = prompt_logits(model, torch.tensor([prompt[cached:]], device=device), input_pos)
    not_finite = "the model's logits are not finite: its weights are damaged, or --precision is too narrow"
    if not logits.isfinite().all():
        raise ValueError(not_finite)
    if batch_size > 1:
        model.share_prompt(batch_size, len(prompt))
    token, _ = sample(logits.expand(batch_size, -1, -1), **sampling)
    first = token.flatten().tolist()
    fallback = None
    if hasattr(draft, "prepare"):
        try:
            draft.prepare([row[:] for row in text])
        except Exception as error:
            draft, fallback = None, reason(error)
    begin = time.perf_counter()
    for row in range(batch_size):
        emit(row, first[row], "plain")

    step_began = 0.0
    observed: list[Round] = []
    while running and draft is not None:
        rows, cur_token, input_pos = last_tokens()
        left = min(ends - len(text[row]) for row in running)
        k = length.choose(left - 1)
        if k == 0 and not observe:  # a round would do the same, with more around it
            step_began = time.perf_counter()
            decode_n_tokens(model, cur_token, input_pos, min(length.plain_steps(), left), emit_plain, **sampling)
            continue
        try:
            new = speculative_decode(
                model, draft, cur_token, input_pos, k, text=rows, observe=observed.append, **sampling
            )
        except DraftError as error:
            draft, fallback = None, str(error)
            break
        round = observed.pop()
        if observe:
            observe(round.spelled_out(model.args.vocab_size))
        length.record(round, running)
        tally.record(round, running)
        k = round.drafts.shape[1]
        for row, ids in enumerate([new.tolist()] if batch_size == 1 else [row.tolist() for row in new]):
            kinds = ["accepted"] * (len(ids) - 1) + ["plain" if k == 0 else "bonus" if len(ids) > k else "corrected"]
            for id, kind in zip(ids, kinds, strict=True):
                if row in running:
                    emit(row, id, kind)
    if fallback:
        warnings.warn(f"the draft failed ({fallback}); decoding goes on without it", stacklevel=2)
    while running:
        _, cur_token, input_pos = last_tokens()
        steps = min(ends - len(text[row]) for row in running)
        decode_n_tokens(model, cur_token, input_pos, steps, emit_plain, **sampling)

    decode_s = time.perf_counter() - begin
    tokens = sum(len(row) - len(prompt) - 1 for row in text)  # the first came with the prompt
    read = tally.passes * weight_bytes(model) + tally.draft_steps * draft_bytes
    generated = [row[len(prompt) :] for row in text]
    stats = {
        "prompt_tokens": len(prompt),
        "generated_tokens": generated[0] if batch_size == 1 else generated,
        "ttft_s": begin - start,
        "decode_s": decode_s,
        "tokens_per_s": tokens / decode_s if tokens else None,
        "bytes_per_token": read / tokens if tokens else None,
        "bandwidth_gb_s": read / decode_s / 1e9 if tokens else None,
    }
    if draft is not None or fallback:
        stats |= tally.statistics(tokens, length) | {"measured_speedup": None, "fallback": fallback}
    longest = max(len(row) for row in text)
    return torch.tensor([row + row[-1:] * (longest - len(row)) for row in text], device=device), stats


# CPython keeps the frames of running functions in chunks of 16 KB. Where a loop happens to run at the end of one, each
# call it makes maps another and unmaps it again (python/cpython#142183), which interrupts the other cores, 200 times a
# step: up to 6 ms. A frame larger than a chunk gets one of its own, and what is called from there finds room in that.
generate.__code__ = generate.__code__.replace(co_stacksize=2**14)  # of 8 bytes: 128 KB, in a chunk of 256 KB


if __name__ == "__main__":
    import sys

    from cli import main

    sys.exit(main())
