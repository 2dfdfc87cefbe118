"""Speculative decoding: it changes no token, no distribution and no cache, whatever the draft does, and `auto` pays.

Most tests run on random models with a few thousand parameters. Those on SmolLM2 take the golden prompts; the full
matrix of them is marked `slow`, and the others take a rotating part of it.
"""

import copy
import inspect
import itertools
import os
import random
import re
import sys
import types
import warnings
from collections import Counter

import pytest
import tiny
import torch
from torch import Tensor

import checkpoint
import cli
import generate as program
import kernels
from generate import (
    DraftError,
    DraftLength,
    ModelDraft,
    NgramDraft,
    Round,
    compile_model,
    fix_shape,
    generate,
    prompt_logits,
    speculative_decode,
)
from model import Transformer
from quantize import Int4Linear, Int8Linear, quantize_int4, quantize_int8, replace_linears

GREEDY = {"temperature": 0.0}
PROMPT = [3, 17, 42, 17, 42, 99, 17]


@pytest.fixture(autouse=True)
def inference():
    """As the program runs: without autograd, and from one seed."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def tokens(model: Transformer, prompt: list[int], count: int, **how) -> list[int]:
    return generate(model, prompt, count, **GREEDY | how)[1]["generated_tokens"]


class RandomLength(DraftLength):
    """Another k each round, 0 included."""

    def __init__(self, seed: int, largest: int = 6):
        super().__init__(largest)
        self.random = random.Random(seed)

    def choose(self, limit: int) -> int:
        return min(limit, self.random.randint(0, self.fixed))


class Scripted:
    """A draft that proposes what a function of (row's text, k) says, as certain."""

    def __init__(self, guess):
        self.guess = guess

    def propose(self, text: list[list[int]], k: int, **sampling) -> tuple[Tensor, None]:
        return torch.tensor([self.guess(row, k) for row in text]), None


def knowing(continuation: list[int], start: int, right: int = 99, vocab_size: int = tiny.VOCAB_SIZE) -> Scripted:
    """A draft that knows how the text goes on, and gets the first `right` tokens of each round right, no others."""

    def guess(row: list[int], k: int) -> list[int]:
        true = continuation[len(row) - start :][:k]
        true += [0] * (k - len(true))
        return [token if i < right else (token + 1) % vocab_size for i, token in enumerate(true)]

    return Scripted(guess)


@pytest.fixture(scope="module")
def target() -> Transformer:
    return tiny.tiny_transformer(1)


def a_draft(noise: float = 0.02, **overrides) -> Transformer:
    return tiny.tiny_transformer(1, noise=noise, **overrides)


# ---------------------------------------------------------------- 1. temperature 0


DRAFTS = {"model": lambda: a_draft(), "ngram": NgramDraft, "int4": lambda: quantized(tiny.tiny_transformer(1))}


def quantized(model: Transformer, mode: str = "int4", groupsize: int = 64) -> Transformer:
    """The model with the layers of quantize.py's `mode`. The embedding is shared."""
    with torch.device("meta"):
        new_model = Transformer(model.args)
        replace_linears(new_model, mode, groupsize)
    for name, new in new_model.named_modules():
        old = model.get_submodule(name)
        if isinstance(new, Int4Linear):
            new.weight, new.scales, new.mins = quantize_int4(old.weight, groupsize)
        elif isinstance(new, Int8Linear):
            new.weight, new.scales = quantize_int8(old.weight)
        else:
            for key, parameter in old._parameters.items():
                new._parameters[key] = parameter
    return checkpoint.packed(new_model)


@pytest.mark.parametrize("k", [1, 2, 5, 8, "auto"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_temperature_0_gives_the_tokens_of_plain_decoding(target, draft, k):
    for prompt in (PROMPT, [5], list(range(40))):
        plain = tokens(target, prompt, 32)
        assert tokens(target, prompt, 32, draft=DRAFTS[draft](), speculate_k=k) == plain


def test_the_drafts_of_these_tests_agree_now_and_then(target):
    """Else the tests above would show nothing."""
    for draft in (a_draft(), quantized(target)):
        stats = generate(target, PROMPT, 100, draft=draft, speculate_k=4, **GREEDY)[1]
        assert 0.1 < stats["acceptance_rate"] < 0.9


def test_the_comparison_of_argmaxes_is_the_rule_at_temperature_0():
    """Whatever the drafts were drawn from."""
    rows, k, vocab = 500, 3, 5
    drafts, likeliest = torch.randint(vocab, (rows, k)), torch.randint(vocab, (rows, k + 1))
    q, p = torch.rand(rows, k, vocab).softmax(-1), program.one_hot(likeliest, vocab)
    expected = program.accept_or_resample(drafts, q, p, torch.rand(rows, k))
    found = program.accept_or_correct(drafts, likeliest)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert set(found[0].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("right, least, most", [(0, 2, 12), (99, 10, 100)])
def test_auto_decodes_plainly_between_tries_and_drafts_where_it_pays(monkeypatch, target, right, least, most):
    """Steps between tries are plain decoding's own. The first two plain steps, which measure, do not start a pause."""
    plain, rounds, real = tokens(target, PROMPT, 150), [], program.speculative_decode
    clock = itertools.count()
    monkeypatch.setattr(program.time, "perf_counter", lambda: next(clock) * 1e-3)  # every pass takes as long

    def counted(*args, **more):
        rounds.append(args[4])
        return real(*args, **more)

    monkeypatch.setattr(program, "speculative_decode", counted)
    draft = knowing(plain, len(PROMPT), right)
    stats = generate(target, PROMPT, 150, draft=draft, speculate_k="auto", **GREEDY)[1]
    assert stats["generated_tokens"] == plain and min(rounds) > 0
    assert least <= len(rounds) == stats["rounds"] <= most
    assert sum(stats["k_counts"]) == len(rounds) + stats["k_counts"][0] and (right or stats["k_counts"][0] > 100)
    if right:
        assert stats["k_counts"][0] <= 4 and stats["tokens_per_pass"] > 3
    observed = []
    again = generate(target, PROMPT, 150, draft=draft, speculate_k="auto", observe=observed.append, **GREEDY)[1]
    assert again["generated_tokens"] == plain and len(observed) == sum(again["k_counts"])


@pytest.mark.parametrize(
    "old, new",
    [
        ("(drafts == likeliest[:, :-1])", "(drafts >= 0)"),
        ("likeliest.gather(1, accepted[:, None])", "likeliest.gather(1, accepted[:, None] * 0)"),
        (
            "likeliest.gather(1, accepted[:, None])",
            "likeliest.roll(-1, 1).gather(1, accepted[:, None])",
        ),
    ],
)
def test_a_broken_rule_gives_other_tokens_at_temperature_0(target, old, new):
    for module, same in ((program, True), (mutated(old, new), False)):
        found = module.generate(target, PROMPT, 40, draft=a_draft(), speculate_k=3, **GREEDY)[1]
        assert (found["generated_tokens"] == tokens(target, PROMPT, 40)) is same


def verify_difference(model: Transformer, text: list[int], start: int, rows: int) -> float:
    """The largest difference between logits of passes of `rows` tokens and of one, over text[start:]."""
    model.setup_caches(1, len(text))
    ids, places = torch.tensor([text]), torch.arange(len(text))
    prompt_logits(model, ids[:, :start], places[:start])
    single = [model(ids[:, i : i + 1], places[i : i + 1]) for i in range(start, len(text))]
    passes = [
        model(ids[:, i : min(i + rows, len(text))], places[i : min(i + rows, len(text))])
        for i in range(start, len(text), rows)
    ]
    return (torch.cat(single, dim=1) - torch.cat(passes, dim=1)).abs().max().item()


@pytest.mark.parametrize("rows", [2, 3, 6, 9])
def test_verified_logits_have_the_bits_of_single_steps(target, rows):
    if not kernels.load():
        pytest.skip("the C++ operators cannot be built here")
    text = [i * 37 % tiny.VOCAB_SIZE for i in range(60)]
    assert verify_difference(target, text, 7, rows) == 0
    with kernels.disabled():
        assert verify_difference(target, text, 7, rows) < 1e-4


@pytest.fixture(scope="module")
def compiled() -> tuple[Transformer, Transformer]:
    """A target and a draft, both compiled, as cli.py does it."""
    pair = tiny.tiny_transformer(1), a_draft()
    compile_model(pair[0], 9)
    compile_model(pair[1], 2)
    return pair


@pytest.mark.parametrize("k", [1, 5, 8, "auto"])
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_compiled_passes_give_the_tokens_of_plain_decoding(target, compiled, kind, k):
    plain = tokens(target, PROMPT, 40)
    assert tokens(compiled[0], PROMPT, 40) == plain
    draft = compiled[1] if kind == "model" else NgramDraft()
    assert tokens(compiled[0], PROMPT, 40, draft=draft, speculate_k=k) == plain


@pytest.fixture(scope="module")
def quantized_models() -> tuple[dict, dict]:
    """Targets by (mode, compiled) and drafts by (kind, compiled), the latter of weights with some noise."""
    targets, drafts = {}, {}
    for compiled in (False, True):
        for mode in ("int8", "int4"):
            targets[mode, compiled] = quantized(tiny.tiny_transformer(1), mode)
            drafts[mode, compiled] = quantized(a_draft(), mode)
        drafts["float", compiled] = a_draft()
    for models, largest_pass in ((targets, 9), (drafts, 2)):
        for (_, compiled), model in models.items():
            if compiled:
                compile_model(model, largest_pass)
    return targets, drafts


@pytest.mark.parametrize("kind", ["ngram", "float", "int8", "int4"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_quantized_target_gives_the_tokens_of_its_plain_decoding(quantized_models, mode, compiled, kind):
    """Whatever the draft, of which some tokens are accepted and some are not; compiled too, uncompiled decoding's."""
    targets, drafts = quantized_models
    prompt = [5] * 8  # each mode's continuation repeats enough of itself
    plain, counts = tokens(targets[mode, False], prompt, 48), Counter()
    assert tokens(targets[mode, compiled], prompt, 48) == plain
    for k in (1, 5, "auto"):
        draft = NgramDraft() if kind == "ngram" else drafts[kind, compiled]
        stats = generate(targets[mode, compiled], prompt, 48, draft=draft, speculate_k=k, **GREEDY)[1]
        assert stats["generated_tokens"] == plain and stats["fallback"] is None, k
        counts["accepted"] += sum(n * rounds for n, rounds in enumerate(stats["accept_counts"]))
        counts["proposed"] += sum(n * rounds for n, rounds in enumerate(stats["k_counts"]))
    assert 0 < counts["accepted"] < counts["proposed"]


@pytest.fixture(scope="module")
def smollm2(smollm2_dir) -> Transformer:
    from checkpoint import load_model

    return load_model(smollm2_dir)


@pytest.fixture(scope="module")
def smollm2_int4(smollm2) -> Transformer:
    return quantized(smollm2)


KS = [1, 2, 5, 8, "auto"]


@pytest.mark.parametrize("i", range(8))
def test_smollm2_at_temperature_0(smollm2, smollm2_int4, golden, i):
    """Each prompt with both drafts, each with another k."""
    prompt, expected = golden[i]["ids"], golden[i]["greedy"][:20]
    for draft, k in ((NgramDraft(), KS[i % 5]), (smollm2_int4, KS[(i + 2) % 5])):
        assert tokens(smollm2, prompt, len(expected), draft=draft, speculate_k=k) == expected


@pytest.mark.slow
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("i", range(8))
def test_smollm2_at_temperature_0_full_matrix(smollm2, smollm2_int4, golden, i, k):
    prompt, expected = golden[i]["ids"], golden[i]["greedy"]
    for draft in (NgramDraft(), smollm2_int4):
        assert tokens(smollm2, prompt, len(expected), draft=draft, speculate_k=k) == expected


def test_smollm2_verified_logits_have_the_bits_of_single_steps(smollm2, golden):
    if not kernels.load():
        pytest.skip("the C++ operators cannot be built here")
    text = golden[2]["ids"] + golden[2]["greedy"][:12]
    for rows in (2, 6):
        assert verify_difference(smollm2, text, len(golden[2]["ids"]), rows) == 0
    with kernels.disabled():
        assert verify_difference(smollm2, text, len(golden[2]["ids"]), 6) < 1e-3


@pytest.mark.slow
def test_smollm2_compiled(smollm2, smollm2_int4, golden):
    target, draft = copy.copy(smollm2), copy.copy(smollm2_int4)
    compile_model(target, 9)
    compile_model(draft, 2)
    for i, k in ((1, 5), (2, 8), (7, "auto")):
        prompt, expected = golden[i]["ids"], golden[i]["greedy"][:24]
        assert tokens(target, prompt, len(expected)) == expected
        for proposer in (NgramDraft(), draft):
            assert tokens(target, prompt, len(expected), draft=proposer, speculate_k=k) == expected


# ---------------------------------------------------------------- --exact


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exact_passes_of_one_shape_are_bit_equal(compile):
    """Without the C++ operators, decoding one token and verifying nine give the same bits."""
    text = [i * 37 % tiny.VOCAB_SIZE for i in range(60)]
    with kernels.disabled():
        model = tiny.tiny_transformer(1, dim=192, intermediate_size=512)
        if verify_difference(model, text, 7, 9) == 0:
            pytest.skip("this machine's matrix products do not differ by the number of rows")
        if compile:
            compile_model(model, 16)
        fix_shape(model, 16)
        for rows in (2, 5, 9):
            assert verify_difference(model, text, 7, rows) == 0


def test_exact_works_with_both_drafts_and_batches(target):
    with kernels.disabled():
        model = copy.copy(target)
        fix_shape(model, 16)
        plain = tokens(model, PROMPT, 50)
        for draft in (NgramDraft(), a_draft()):
            assert tokens(model, PROMPT, 50, draft=draft, speculate_k=8) == plain
            assert tokens(model, PROMPT, 50, draft=draft, batch_size=2) == tokens(model, PROMPT, 50, batch_size=2)


# ---------------------------------------------------------------- 2. the distribution

V = 6  # tokens of the vocabulary: the joint distribution of three has 216 values
ROWS = 2048
START = [1, 4, 2]
SIZES = {"vocab_size": V, "n_layer": 1, "n_head": 2, "n_local_heads": 1, "dim": 16, "intermediate_size": 32}


def small(noise: float = 0.0) -> Transformer:
    return tiny.tiny_transformer(2, noise=noise, **SIZES)


def opposed() -> Transformer:
    """What the target finds likely, this draft does not, and the other way round."""
    model = small()
    model.output.weight.neg_()
    return model


class Fixed:
    """One-hot: proposes the same tokens always."""

    def propose(self, text: object, k: int, **sampling) -> tuple[Tensor, None]:
        return torch.tensor([2, 0, 3, 1, 5, 4])[:k].expand(ROWS, -1), None


PROPOSERS = {"agrees": lambda: small(0.3), "never agrees": opposed, "one-hot": Fixed}
TRUNCATIONS = {"whole": {}, "top-k": {"top_k": 3}, "top-p": {"top_p": 0.8}, "both": {"top_k": 4, "top_p": 0.7}}


def truncated(logits: Tensor, temperature: float, top_k: int = V, top_p: float = 1.0) -> Tensor:
    """`logits_to_probs`, said another way: token by token, by rank."""
    p = (logits.double() / temperature).softmax(-1)
    out = torch.zeros_like(p)
    for row, kept in zip(p.flatten(0, -2), out.flatten(0, -2), strict=True):
        order = sorted(range(V), key=lambda i: -row[i])[:top_k]
        total, before = sum(row[i] for i in order), 0.0
        for i in order:
            if before < top_p * total:
                kept[i] = row[i]
            before += row[i]
    return out / out.sum(-1, keepdim=True)


def exact_joint(model: Transformer, count: int, **sampling) -> Tensor:
    """The probability of every continuation of START by `count` tokens, [V ** count], by enumeration."""
    contexts = list(itertools.product(range(V), repeat=count - 1))
    ids = torch.tensor([START + list(context) for context in contexts])
    model.setup_caches(len(ids), 64)
    logits = model(ids, torch.arange(ids.shape[1]))[:, -count:]
    probs = truncated(logits, **sampling)
    joint = torch.ones(len(ids), dtype=torch.float64)
    for i in range(count - 1):
        joint = joint * probs[:, i].gather(-1, ids[:, len(START) + i, None])[:, 0]
    return (joint[:, None] * probs[:, -1]).flatten()


def p_value(samples: Tensor, joint: Tensor) -> float:
    """Pearson's chi-squared test of tokens [N, count] against their exact distribution. Rare values are pooled."""
    codes = torch.zeros(len(samples), dtype=torch.int64)
    for column in samples.T:
        codes = codes * V + column
    counts, expected = torch.bincount(codes, minlength=len(joint)).double(), joint * len(samples)
    if counts[expected == 0].any():
        return 0.0  # what cannot happen did
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    if expected[-1] < 5:
        counts[-2], expected[-2] = counts[-2:].sum(), expected[-2:].sum()
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2).item()


def speculated(module: types.ModuleType, model: Transformer, draft: object, k: int, count: int, **sampling) -> Tensor:
    """`count` tokens after START for ROWS independent rows, by rounds of `speculative_decode`: int64 [ROWS, count]."""
    start = torch.tensor([START]).expand(ROWS, -1)
    for each in (model, draft):
        if isinstance(each, Transformer):
            each.setup_caches(ROWS, 64)
            prompt_logits(each, start[:, :-1], torch.arange(len(START) - 1))
    text = torch.cat((start, torch.zeros(ROWS, count + k + 1, dtype=torch.int64)), dim=1)
    made, rows = torch.zeros(ROWS, dtype=torch.int64), torch.arange(ROWS)
    while made.min() < count:
        last = len(START) + made - 1
        new = module.speculative_decode(model, draft, text[rows, last], last, k, **sampling)
        lengths = torch.tensor([len(ids) for ids in new])
        new = torch.nn.utils.rnn.pad_sequence(new, batch_first=True)
        row, i = (torch.arange(new.shape[1]) < lengths[:, None]).nonzero(as_tuple=True)
        text[row, last[row] + 1 + i] = new[row, i]
        made = (made + lengths).clamp(max=count)  # a row that has enough waits
    return text[:, len(START) :][:, :count]


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_joint_distribution_of_three_tokens(proposer, temperature, truncation):
    sampling = {"temperature": temperature, **TRUNCATIONS[truncation]}
    model = small()
    joint = exact_joint(model, 3, **sampling)
    for k in (1, 3, 5):
        assert p_value(speculated(program, model, PROPOSERS[proposer](), k, 3, **sampling), joint) > 1e-4


def test_the_chi_squared_test_is_one():
    """Uniform p-values under the hypothesis, and none left a little beside it."""
    joint = exact_joint(small(), 3, temperature=1.0)
    draws = [torch.multinomial(joint, ROWS, replacement=True) for _ in range(200)]
    values = [p_value(torch.stack((x // 36, x // 6 % 6, x % 6), dim=1), joint) for x in draws]
    assert 0.4 < sum(values) / len(values) < 0.6 and min(values) > 1e-4
    x = torch.multinomial(joint**0.8, ROWS, replacement=True)
    assert p_value(torch.stack((x // 36, x // 6 % 6, x % 6), dim=1), joint) < 1e-6


# Each replacement breaks the rule in one way, and must be found out by the test above in the setting given.
MUTATIONS = {
    "accept everything": (
        "accept = uniform < p_drafts / q_drafts",
        "accept = uniform < 2",
        ("agrees", 1.0, "whole", 3),
    ),
    "reject by p instead of p / q": (
        "accept = uniform < p_drafts / q_drafts",
        "accept = uniform < p_drafts",
        ("agrees", 1.0, "whole", 3),
    ),
    "resample from p": (
        "left = (p_next - q_next).clamp(min=0)",
        "left = p_next",
        ("agrees", 1.0, "whole", 3),
    ),
    "resample from |p - q|": (
        "left = (p_next - q_next).clamp(min=0)",
        "left = (p_next - q_next).abs()",
        ("agrees", 1.0, "whole", 3),
    ),
    "the target's probabilities before top-k": (
        "            p = logits_to_probs(logits, **sampling)\n",
        "            p = logits_to_probs(logits, temperature=sampling['temperature'])\n",
        ("agrees", 1.5, "top-k", 3),
    ),
    "the draft's probabilities before top-k": (
        "        probs.append(q)\n",
        "        probs.append(logits_to_probs(logits[..., :vocab_size], temperature=sampling['temperature']))\n",
        ("agrees", 1.5, "top-k", 3),
    ),
    "q from another position": (
        "accept_or_resample(drafts, q, p, uniform)\n",
        "accept_or_resample(drafts, q.roll(1, dims=1), p, uniform)\n",
        ("agrees", 1.0, "whole", 3),
    ),
    "p from another position": (
        "p_next = p[row, accepted]",
        "p_next = p[row, (accepted - 1).clamp(min=0)]",
        ("agrees", 1.0, "whole", 3),
    ),
    "the residual of a full round is not p": (
        "q_next = q[row, accepted.clamp(max=k - 1)] * (accepted < k)[:, None] if k else 0.0",
        "q_next = q[row, accepted.clamp(max=k - 1)]",
        ("agrees", 1.0, "whole", 1),
    ),
}


def mutated(old: str, new: str) -> types.ModuleType:
    """generate.py with one place in its text replaced."""
    source = inspect.getsource(program)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in generate.py"
    module = types.ModuleType("mutated_generate")
    sys.modules[module.__name__] = module  # dataclasses look themselves up there
    exec(compile(source.replace(old, new), "mutated_generate.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_rule_fails_the_distribution_test(mutation):
    old, new, (proposer, temperature, truncation, k) = MUTATIONS[mutation]
    sampling = {"temperature": temperature, **TRUNCATIONS[truncation]}
    joint = exact_joint(small(), 3, **sampling)
    values = []
    for module in (program, mutated(old, new)):
        torch.manual_seed(1)
        values.append(p_value(speculated(module, small(), PROPOSERS[proposer](), k, 3, **sampling), joint))
    assert values[0] > 1e-3 and values[1] < 1e-6


def started(k: int) -> DraftLength:
    """A fixed draft length whose first, plain round is over."""
    length = DraftLength(k)
    length.record(Round(torch.empty(1, 0), None, None, None, [0], 0.0, 1.0), [0])
    return length


@pytest.mark.parametrize("kind", ["model", "ngram", "none"])
def test_the_distribution_of_a_batch_of_generate(kind):
    """The whole loop: caches of drafts that are rolled back, rows that run apart."""
    sampling = {"temperature": 1.0, "top_k": 4}
    model = small()
    joint = exact_joint(model, 3, **sampling)
    draft = {"model": small(0.3), "ngram": NgramDraft(), "none": None}[kind]
    if kind == "ngram":
        draft.lookup = lambda row, k, lookup=draft.lookup: lookup(row, k) or row[-1:] * k
    sequences, stats = generate(model, START, 6, batch_size=1024, draft=draft, speculate_k=started(3), **sampling)
    assert kind == "none" or (stats["fallback"] is None and stats["rounds"] > 0)
    assert p_value(sequences[:, len(START) :][:, :3], joint) > 1e-4


def test_the_distribution_of_single_rows():
    sampling = {"temperature": 1.0}
    model = small()
    joint = exact_joint(model, 2, **sampling)
    draft, samples = small(0.3), []
    for _ in range(500):
        made = generate(model, START, 3, draft=draft, speculate_k=started(1), **sampling)[1]["generated_tokens"]
        samples.append(
            made[:2]
        )  # the first comes with the prompt, the second is drafted, the third is a bonus or plain
    assert p_value(torch.tensor(samples), joint) > 1e-4


# ---------------------------------------------------------------- 3. caches


def check_cache(model: Transformer, row: int, text: list[int], length: int) -> None:
    """The first `length` positions of a row's cache are those of a cache that was filled with `text` in one pass."""
    other = tiny.Transformer(model.args)
    other.load_state_dict(model.state_dict())
    other.setup_caches(1, max(1, length))
    if length:
        prompt_logits(other, torch.tensor([text[:length]]), torch.arange(length))
    for layer, rebuilt in zip(model.layers, other.layers, strict=True):
        for cache in ("k", "v"):
            seen = getattr(layer.attention.kv_cache, cache)[row, :, :length]
            true = getattr(rebuilt.attention.kv_cache, cache)[0, :, :length]
            assert torch.equal(seen, true) if kernels.load() else torch.allclose(seen, true, atol=1e-5)


class CheckedDraft:
    """Passes proposals on, and before each looks into the caches of target and draft."""

    def __init__(self, draft: object, target: Transformer):
        self.draft, self.target = draft, target
        self.checks, self.shortfalls = 0, []

    def propose(self, text: list[list[int]], k: int, **sampling) -> tuple[Tensor, Tensor | None]:
        for b, row in enumerate(text):
            check_cache(self.target, b, row, len(row) - 1)
            self.checks += 1
        if isinstance(self.draft, ModelDraft) and self.draft.cached:
            added = self.draft.drafted.tolist() if self.draft.drafted is not None else [[] for _ in text]
            for b, row in enumerate(text):
                claimed = self.draft.cached[b] + added[b]
                common = len(os.path.commonprefix([claimed, row]))
                check_cache(self.draft.model, b, row, common)
                self.shortfalls.append(len(row) - common)
        return self.draft.propose(text, k, **sampling)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_caches_are_those_of_the_emitted_text_after_every_round(kind, temperature, batch_size):
    """Random k, 0 among them. The draft's is read before it is fed; rows that have ended wait at their prompt's end."""
    target = tiny.tiny_transformer(1, n_layer=1)
    draft = ModelDraft(a_draft(n_layer=1), tiny.VOCAB_SIZE) if kind == "model" else NgramDraft()
    checked = CheckedDraft(draft, target)
    if kind == "model":
        draft.setup_caches(batch_size, 80)
    ends = tuple(range(0, tiny.VOCAB_SIZE, 60)) if batch_size > 1 and temperature else ()
    stats = generate(
        target, PROMPT, 60, batch_size=batch_size, draft=checked, speculate_k=RandomLength(3), stop_ids=ends,
        temperature=temperature, top_k=3,
    )[1]  # fmt: skip
    assert stats["fallback"] is None and checked.checks > 5
    if kind == "model" and batch_size == 1:
        assert sum(n for n in stats["accept_counts"][1:]) > 3


def test_no_hole_after_a_fully_accepted_round(target):
    """The draft lacks two tokens then: its last one, never fed, and the one that the target added; else one."""
    draft = ModelDraft(tiny.tiny_transformer(1), tiny.VOCAB_SIZE)  # the target itself: all is accepted
    draft.setup_caches(1, 80)
    checked = CheckedDraft(draft, target)
    stats = generate(target, PROMPT, 40, draft=checked, speculate_k=4, **GREEDY)[1]
    assert stats["acceptance_rate"] == 1 and stats["fallback"] is None
    assert set(checked.shortfalls) == {2}
    opposite = ModelDraft(tiny.tiny_transformer(2), tiny.VOCAB_SIZE)
    opposite.setup_caches(1, 80)
    checked = CheckedDraft(opposite, target)
    stats = generate(target, PROMPT, 40, draft=checked, speculate_k=4, **GREEDY)[1]
    assert stats["acceptance_rate"] == 0 and set(checked.shortfalls) == {1}


def test_rounds_without_drafting_leave_no_hole(target):
    draft = ModelDraft(tiny.tiny_transformer(1), tiny.VOCAB_SIZE)
    draft.setup_caches(1, 80)
    checked = CheckedDraft(draft, target)
    length = RandomLength(0)
    ks = itertools.cycle([3, 0, 0, 2, 0])
    length.choose = lambda limit: min(limit, next(ks))
    stats = generate(target, PROMPT, 40, draft=checked, speculate_k=length, **GREEDY)[1]
    assert stats["acceptance_rate"] == 1 and stats["fallback"] is None and max(checked.shortfalls) >= 4


def fed(model: Transformer) -> list[int]:
    """How many tokens each pass of `model` takes from now on."""
    passes: list[int] = []
    forward = model.forward
    model.forward = lambda idx, *rest, **more: passes.append(idx.shape[1]) or forward(idx, *rest, **more)
    return passes


def test_a_draft_that_is_used_again_reads_only_what_changed(target):
    """A conversation: each prompt begins like the text before, and goes on otherwise."""
    draft = ModelDraft(a_draft(), tiny.VOCAB_SIZE)
    draft.setup_caches(1, 200)
    first = generate(target, PROMPT * 5, 20, draft=draft, speculate_k=3, **GREEDY)[1]["generated_tokens"]
    for prompt in (PROMPT * 5 + first[:10] + [7, 8, 9], PROMPT * 3 + [7, 8], PROMPT * 3, [9, *PROMPT]):
        known = len(os.path.commonprefix([draft.cached[0], prompt]))
        passes = fed(draft.model)
        checked = CheckedDraft(draft, target)
        checked.prepare = draft.prepare
        plain = tokens(target, prompt, 20)
        stats = generate(target, prompt, 20, draft=checked, speculate_k=3, **GREEDY)[1]
        assert stats["generated_tokens"] == plain and stats["fallback"] is None
        assert passes[0] == max(1, len(prompt) - known)


def test_a_larger_cache_is_an_empty_one(target):
    draft = ModelDraft(tiny.tiny_transformer(1), tiny.VOCAB_SIZE)
    for count in (10, 60):  # the second call needs larger caches
        model = tiny.tiny_transformer(1)
        text = generate(model, PROMPT, count, draft=draft, speculate_k=3, **GREEDY)[1]
        assert text["acceptance_rate"] == 1 and text["generated_tokens"] == tokens(target, PROMPT, count)


@pytest.mark.parametrize("rows", [1, 3])
def test_speculative_decode_with_a_bare_model_as_draft(target, rows):
    """The library's form: the caller keeps position and text; the draft's cache has no hole either."""
    draft = a_draft(0.01)
    plain = [tokens(target, PROMPT[: 3 + b], 40) for b in range(rows)]
    target.setup_caches(rows, 80)
    draft.setup_caches(rows, 80)
    texts = [PROMPT[: 3 + b] for b in range(rows)]
    for model in (target, draft):
        for b, row in enumerate(texts):
            scratch = tiny.Transformer(model.args)
            scratch.load_state_dict(model.state_dict())
            scratch.setup_caches(1, 80)
            prompt_logits(scratch, torch.tensor([row]), torch.arange(len(row)))
            for layer, other in zip(model.layers, scratch.layers, strict=True):
                layer.attention.kv_cache.k[b, :, :80] = other.attention.kv_cache.k[0]
                layer.attention.kv_cache.v[b, :, :80] = other.attention.kv_cache.v[0]
    choose, full = random.Random(1), 0
    for _ in range(12):
        k = choose.randint(0, 4)
        lengths = [len(row) for row in texts]
        new = speculative_decode(
            target, draft, torch.tensor([[row[-1]] for row in texts]), torch.tensor(lengths) - 1, k, **GREEDY
        )
        for row, ids in zip(texts, [new] if rows == 1 else new, strict=True):
            assert 1 <= len(ids) <= k + 1
            full += len(ids) == k + 1 > 1
            row += ids.tolist()
        for b, row in enumerate(texts):
            check_cache(target, b, row, len(row) - 1)
            if k:
                check_cache(draft, b, row, len(row) - 1)
        if not k:  # the draft is the caller's to feed where no draft is asked for
            draft(torch.tensor([[row[-2]] for row in texts]), torch.tensor([[n - 1] for n in lengths]))
    assert full
    for b, row in enumerate(texts):
        assert row[3 + b :][:40] == plain[b][: len(row) - 3 - b]


# ---------------------------------------------------------------- 4. drafts that fail


class Breaking(ModelDraft):
    """Behaves until its round `at`, and then does what `how` says."""

    def __init__(self, how, at: int):
        super().__init__(a_draft(), tiny.VOCAB_SIZE)
        self.how, self.at, self.round = how, at, 0

    def propose(self, text: list[list[int]], k: int, **sampling) -> tuple[Tensor, Tensor]:
        self.round += 1
        if self.round == self.at and self.how in POISONS:
            POISONS[self.how](self.model)
        drafts, q = super().propose(text, k, **sampling)
        return WRONGS[self.how](drafts, q) if self.round == self.at and self.how in WRONGS else (drafts, q)


def fail(*_: object) -> None:
    raise RuntimeError("the draft is out of luck\nand says so at length")


POISONS = {
    "NaN weights": lambda model: model.norm.weight.mul_(torch.nan),
    "infinite weights": lambda model: model.norm.weight.mul_(torch.inf),
    "one NaN logit": lambda model: model.output.weight[0].mul_(torch.nan),
}
WRONGS = {
    "raises": fail,
    "ids beyond the vocabulary": lambda drafts, q: (drafts + tiny.VOCAB_SIZE, q),
    "ids beyond the vocabulary, one-hot": lambda drafts, q: (drafts + tiny.VOCAB_SIZE, None),
    "negative ids": lambda drafts, q: (drafts - tiny.VOCAB_SIZE, None),
    "no token dimension": lambda drafts, q: (drafts[:, 0], q),
    "too many tokens": lambda drafts, q: (drafts.repeat(1, 9), None),
    "other rows": lambda drafts, q: (drafts.repeat(2, 1), q),
    "q of another shape": lambda drafts, q: (drafts, q[:, :, None]),
    "q of fewer positions": lambda drafts, q: (drafts, q[:, :0]),
    "floats": lambda drafts, q: (drafts.float(), q),
    "no tensor": lambda drafts, q: (drafts.tolist(), q),
    "None": lambda drafts, q: None,
    "logits for probabilities": lambda drafts, q: (drafts, q.log()),
    "negative probabilities": lambda drafts, q: (drafts, 2 * q - 1 / tiny.VOCAB_SIZE),
    "probabilities that add up to 2": lambda drafts, q: (drafts, 2 * q),
    "a token that q rules out": lambda drafts, q: (drafts, torch.ones_like(q).scatter(-1, drafts[..., None], 0) / 271),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [*POISONS, *WRONGS])
def test_a_draft_that_fails_costs_no_token(target, how, temperature):
    draft = Breaking(how, random.Random(how).randint(2, 6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = generate(target, PROMPT, 40, draft=draft, speculate_k=3, temperature=temperature)[1]
    assert len(made["generated_tokens"]) == 40 and made["rounds"] == draft.at - 1
    if temperature == 0:
        assert made["generated_tokens"] == tokens(target, PROMPT, 40)
    (warning,) = [w for w in caught if issubclass(w.category, UserWarning)]
    assert made["fallback"] and made["fallback"] in str(warning.message) and "\n" not in made["fallback"]
    if how == "raises":
        assert made["fallback"] == "RuntimeError: the draft is out of luck"


def test_a_draft_that_fails_on_the_prompt(target):
    draft = NgramDraft()
    draft.prepare = fail
    with pytest.warns(UserWarning, match="out of luck"):
        stats = generate(target, PROMPT, 20, draft=draft, **GREEDY)[1]
    assert stats["generated_tokens"] == tokens(target, PROMPT, 20) and "out of luck" in stats["fallback"]


def test_a_draft_that_fails_in_a_batch(target):
    draft = Breaking("NaN weights", 4)
    with pytest.warns(UserWarning, match="distribution"):
        stats = generate(target, PROMPT, 30, batch_size=3, draft=draft, **GREEDY)[1]
    assert stats["generated_tokens"] == [tokens(target, PROMPT, 30)] * 3


def test_speculative_decode_says_that_the_draft_failed(target):
    target.setup_caches(1, 20)
    prompt_logits(target, torch.tensor([[1, 2]]), torch.arange(2))
    with pytest.raises(DraftError, match="luck"):
        speculative_decode(target, Scripted(fail), torch.tensor([[3]]), 2, 3, text=[[1, 2, 3]], **GREEDY)


def test_a_target_whose_logits_turn_to_nan_is_an_error_in_one_line():
    model = tiny.tiny_transformer(1)

    def poison(row: int, token: int, kind: str) -> None:
        model.norm.weight.mul_(torch.nan)

    for draft, temperature in itertools.product((None, NgramDraft(), Scripted(lambda row, k: [1] * k)), (0.0, 1.0)):
        model.norm.weight.fill_(1.0)
        with pytest.raises(ValueError, match="not finite"):
            generate(model, PROMPT, 20, draft=draft, callback=poison, temperature=temperature, speculate_k=started(3))


# ---------------------------------------------------------------- 5. ends


@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_end_token_inside_an_accepted_run_ends_the_text_there(target, batch_size):
    plain = tokens(target, PROMPT, 40)
    where = next(i for i in range(9, 30) if plain[i] not in plain[:i])
    draft = knowing(PROMPT + plain, 0)
    got = []
    stats = generate(
        target, PROMPT, 40, draft=draft, speculate_k=6, stop_ids=(plain[where],), batch_size=batch_size,
        callback=lambda row, token, kind: got.append((row, token)), **GREEDY,
    )[1]  # fmt: skip
    rows = [stats["generated_tokens"]] if batch_size == 1 else stats["generated_tokens"]
    assert rows == [plain[: where + 1]] * batch_size
    assert [token for row, token in got if row == 0] == plain[: where + 1] and stats["fallback"] is None


def test_plain_decoding_stops_at_an_end_token(target):
    plain = tokens(target, PROMPT, 40)
    where = next(i for i in range(9, 30) if plain[i] not in plain[:i])
    assert tokens(target, PROMPT, 40, stop_ids=(plain[where],)) == plain[: where + 1]
    assert tokens(target, PROMPT, 40, stop_ids=(plain[0],), draft=NgramDraft()) == plain[:1]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10, 11, 12])
def test_the_last_rounds_draft_fewer_and_the_cache_is_just_large_enough(count):
    model, draft = tiny.tiny_transformer(1), ModelDraft(a_draft(0.01), tiny.VOCAB_SIZE)
    lengths = []
    tokens(model, PROMPT, count, draft=draft, speculate_k=4)
    assert model.max_seq_length == draft.model.max_seq_length == len(PROMPT) + count
    stats = generate(
        model, PROMPT, count, draft=knowing(PROMPT + tokens(model, PROMPT, count), 0), speculate_k=4,
        observe=lambda round: lengths.append(round.drafts.shape[1]), **GREEDY,
    )[1]  # fmt: skip
    assert len(stats["generated_tokens"]) == count and stats["fallback"] is None
    assert sum(k + 1 for k in lengths) == count - 1  # all accepted: no round drafted past the end


def test_prompts_of_different_lengths_after_each_other():
    """A cache that is just large enough for each, or left over from a longer one."""
    model, draft = tiny.tiny_transformer(1), ModelDraft(a_draft(0.01), tiny.VOCAB_SIZE)
    for length in (3, 120, 1, 60, 200):
        prompt = [i * 31 % tiny.VOCAB_SIZE for i in range(length)]
        plain = tokens(tiny.tiny_transformer(1), prompt, 30)
        assert tokens(model, prompt, 30, draft=draft, speculate_k=8) == plain
        assert tokens(model, prompt, 30, draft=NgramDraft(), speculate_k=8) == plain


@pytest.mark.parametrize("kind", ["model", "ngram", "none"])
def test_rows_of_a_batch_are_what_they_would_be_alone(target, kind):
    """At temperature 0 all rows agree, so the rows are made to differ: each begins with another token."""
    draft = {"model": a_draft, "ngram": NgramDraft, "none": lambda: None}[kind]
    starts = [11, 60, 99]
    forced, original = iter(starts), program.sample
    alone = [[start, *tokens(target, [*PROMPT, start], 39)] for start in starts]
    ends = (alone[0][12], alone[1][25])
    for row in alone:
        at = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        del row[at + 1 :]

    def sample(logits: Tensor, **sampling) -> tuple[Tensor, Tensor]:
        token, probs = original(logits, **sampling)
        if logits.shape[0] == 3 and logits.shape[-1] == tiny.VOCAB_SIZE and next(forced, None) is not None:
            token = torch.tensor(starts)[:, None]
            for _ in forced:
                pass
        return token, probs

    program.sample = sample
    try:
        sequences, stats = generate(
            target, PROMPT, 40, batch_size=3, draft=draft(), speculate_k=4, stop_ids=ends, **GREEDY
        )
    finally:
        program.sample = original
    assert stats["generated_tokens"] == alone and len({len(row) for row in alone}) > 1
    for row, sequence in zip(alone, sequences.tolist(), strict=True):
        filled = PROMPT + row + row[-1:] * (sequences.shape[1] - len(PROMPT) - len(row))
        assert sequence == filled


# ---------------------------------------------------------------- 6. which drafts are taken


@pytest.mark.parametrize(("of_target", "of_draft"), [(272, 320), (320, 272), (300, 288)])
def test_heads_padded_to_different_sizes(of_target, of_draft):
    """The rows of padding are zeros, as in checkpoints that have them: their ids are never the likeliest."""
    models = []
    for size in (of_target, of_draft):
        model, wide = tiny.tiny_transformer(1), tiny.tiny_transformer(1, vocab_size=size)
        for name, parameter in wide.named_parameters():
            parameter.zero_()
            source = model.get_parameter(name)
            parameter[: len(source)] = source
        models.append(wide)
    model, draft = models
    plain = tokens(model, PROMPT, 30)
    stats = generate(model, PROMPT, 30, draft=draft, speculate_k=4, **GREEDY)[1]
    assert stats["generated_tokens"] == plain and stats["acceptance_rate"] == 1 and stats["fallback"] is None
    sampled = generate(model, PROMPT, 30, draft=draft, speculate_k=4, temperature=0.7, top_k=20)[1]
    assert sampled["fallback"] is None and sampled["acceptance_rate"] > 0.5
    # The bare form draws from the same ids.
    for each in models:
        each.setup_caches(1, 40)
        prompt_logits(each, torch.tensor([PROMPT]), torch.arange(len(PROMPT)))
    assert len(speculative_decode(model, draft, torch.tensor([[5]]), len(PROMPT), 4, temperature=5.0)) >= 1


@pytest.fixture
def no_weights(monkeypatch):
    """Loading any is a failure."""
    monkeypatch.setattr(cli, "load_model", lambda *a, **k: pytest.fail("weights were loaded"))


def refused(capsys, *flags: object) -> str:
    code = cli.main([str(flag) for flag in flags])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def test_a_draft_with_another_tokenizer_is_refused(tmp_path, no_weights, capsys):
    one, other = tiny.write_checkpoint(tmp_path / "one"), tiny.write_checkpoint(tmp_path / "other")
    file = other / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    swapped = text.replace('"Q": ', '"QQ": ').replace('"R": ', '"Q": ').replace('"QQ": ', '"R": ')
    file.write_text(swapped, encoding="utf-8")
    message = refused(capsys, "--checkpoint_path", one, "--draft_checkpoint_path", other)
    assert "tokenizer" in message and str(other) in message


def test_a_draft_with_too_short_a_context_is_refused(tmp_path, no_weights, capsys):
    one = tiny.write_checkpoint(tmp_path / "one")
    other = tiny.write_checkpoint(tmp_path / "other", max_position_embeddings=32)
    message = refused(capsys, "--checkpoint_path", one, "--draft_checkpoint_path", other, "--max_new_tokens", 50)
    assert "32" in message and str(other) in message
    with pytest.raises(ValueError, match="context has 32"):
        generate(tiny.tiny_transformer(1), PROMPT, 40, draft=tiny.tiny_transformer(1, block_size=32), **GREEDY)


def test_exact_refuses_more_drafts_than_its_shape_holds(tmp_path, no_weights, capsys):
    one = tiny.write_checkpoint(tmp_path / "one")
    assert "15" in refused(capsys, "--checkpoint_path", one, "--exact", "--draft", "ngram", "--speculate_k", 16)


def run(capsys, *flags: object) -> tuple[str, str]:
    assert cli.main([str(flag) for flag in flags]) == 0
    return capsys.readouterr()


def test_the_program_with_a_draft_whose_head_is_padded(tmp_path, capsys):
    common = ("--prompt", "hello world, hello world", "--temperature", 0, "--max_new_tokens", 24)
    one = tiny.write_checkpoint(tmp_path / "one")
    plain = run(capsys, "--checkpoint_path", one, *common)[0]
    for size in (288, 512):
        draft = tiny.write_checkpoint(tmp_path / f"draft{size}", vocab_size=size, seed=3)
        for more in ((), ("--speculate_k", 3), ("--exact",), ("--compare",)):
            out, err = run(capsys, "--checkpoint_path", one, "--draft_checkpoint_path", draft, *common, *more)
            assert out == plain and "warning" not in err


# ---------------------------------------------------------------- 7. statistics


def test_statistics_of_a_draft_whose_behaviour_is_known(target):
    """Two of each round are right, so it makes three tokens; the prompt and the first, plain round have made two."""
    count = 2 + 10 * 3 + 1
    draft = knowing(PROMPT + tokens(target, PROMPT, count), 0, right=2)
    kinds = []
    stats = generate(
        target, PROMPT, count, draft=draft, speculate_k=4, callback=lambda row, id, kind: kinds.append(kind), **GREEDY
    )[1]
    # The last token is left for a round that drafts nothing.
    assert kinds == ["plain", "plain"] + ["accepted", "accepted", "corrected"] * 10 + ["plain"]
    assert stats["accept_counts"] == [0, 0, 10, 0, 0] and stats["rounds"] == 10
    assert stats["acceptance_rate"] == pytest.approx(20 / 39)  # near the end a round drafts 3
    assert stats["alpha"] == pytest.approx(20 / 30)  # the fourth of each round was never tested
    assert stats["tokens_per_pass"] == pytest.approx(32 / 12)


def test_statistics_when_all_are_accepted_and_when_none_are(target):
    text = PROMPT + tokens(target, PROMPT, 32)
    stats = generate(target, PROMPT, 32, draft=knowing(text, 0), speculate_k=4, **GREEDY)[1]
    assert stats["acceptance_rate"] == stats["alpha"] == 1 and stats["accept_counts"] == [0, 0, 0, 0, 6]
    stats = generate(target, PROMPT, 32, draft=knowing(text, 0, right=0), speculate_k=4, **GREEDY)[1]
    assert stats["acceptance_rate"] == stats["alpha"] == 0 and sum(stats["accept_counts"][1:]) == 0
    stats = generate(target, PROMPT, 32, draft=knowing(text, 0, right=3), speculate_k=4, **GREEDY)[1]
    assert stats["acceptance_rate"] < 1 and stats["alpha"] == pytest.approx((7 * 3 + 1) / (7 * 4 + 1))


def test_predicted_speedup_is_the_formula():
    """Against the sum that the closed form stands for: 1 + α + … + α^k tokens for k c + v_k plain steps."""
    length, tally = DraftLength(3), program.Tally(3)
    rounds = [(0, 0, 0.0, 1.0)] * 3 + [(3, 2, 0.6, 1.5)] * 4 + [(3, 0, 0.6, 1.5)] * 2 + [(1, 1, 0.2, 1.2)] * 3
    for k, n, draft_s, verify_s in rounds:
        round = Round(torch.empty(1, k), None, None, None, [n], draft_s, verify_s)
        length.record(round, [0])
        tally.record(round, [0])
    stats = tally.statistics(tokens=20, length=length)
    accepted, tested = 4 * 2 + 3 * 1, 4 * 3 + 2 * 1 + 3 * 1
    alpha = accepted / tested
    gained = 6 * sum(alpha**i for i in range(4)) + 3 * (1 + alpha)
    spent = 6 * (3 * 0.2 + 1.5) + 3 * (0.2 + 1.2)
    assert stats["alpha"] == pytest.approx(alpha)
    assert stats["predicted_speedup"] == pytest.approx((gained + 3) / (spent + 3))
    assert stats["acceptance_rate"] == pytest.approx(accepted / (6 * 3 + 3))
    assert stats["draft_s"] == pytest.approx((6 * 0.6 + 3 * 0.2) / 9) and stats["tokens_per_pass"] == 20 / 12
    assert stats["accept_counts"] == [2, 3, 4, 0]


# ---------------------------------------------------------------- 8. auto


def simulate(
    length: DraftLength, alpha, c: float, growth: float, count: int, seed: int = 0, noise: float = 0.0
) -> tuple[float, list[int]]:
    """Decode `count` tokens by a clock that runs on paper: (plain steps spent, each round's k).

    A draft is accepted with chance alpha(its place); drafting costs c plain steps each, verifying k of them
    1 + growth k; after plain rounds the draft first reads what it missed, which costs c growth a token.
    """
    chance = random.Random(seed)
    made = missed = 0
    spent, ks = 0.0, []
    while made < count:
        k = length.choose(count - made - 1)
        assert 0 <= k <= count - made - 1
        accepted = 0
        while accepted < k and chance.random() < alpha(made + accepted):
            accepted += 1
        draft_s = c * (k + growth * missed) * chance.lognormvariate(0, noise) if k else 0.0
        verify_s = (1 + growth * k) * chance.lognormvariate(0, noise)
        missed = 0 if k else missed + 1
        length.record(Round(torch.empty(1, k), None, None, None, [accepted], draft_s / 50, verify_s / 50), [0])
        made, spent = made + accepted + 1, spent + draft_s + verify_s
        ks.append(k)
    return spent, ks


COSTS = list(itertools.product([0.0, 0.1, 0.5], [0.1, 0.2, 0.5]))


@pytest.mark.parametrize("count", [128, 1000])
@pytest.mark.parametrize(("c", "growth"), COSTS)
def test_auto_loses_at_most_5_percent_to_a_useless_draft(c, growth, count):
    for told in {c, 0.0}:  # its cost is known beforehand, or is a surprise
        spent, ks = simulate(DraftLength("auto", told), lambda place: 0.0, c, growth, count)
        assert count <= spent <= 1.05 * count
        assert any(ks) and ks[-1] == 0
    noisy = [simulate(DraftLength("auto", c), lambda place: 0.02, c, growth, count, seed, 0.1)[0] for seed in range(10)]
    assert sum(noisy) / len(noisy) <= 1.05 * count


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize(("c", "growth"), COSTS)
def test_auto_reaches_90_percent_of_the_best_fixed_length_within_128_tokens(alpha, c, growth):
    def speed(length_of, seeds=range(20)) -> float:
        return 20 * 128 / sum(simulate(length_of(), lambda place: alpha, c, growth, 128, seed)[0] for seed in seeds)

    best = max(speed(lambda k=k: DraftLength(k)) for k in (0, 1, 2, 3, 4, 5, 6, 8))
    assert speed(lambda: DraftLength("auto", c)) >= 0.9 * best


@pytest.mark.parametrize(("c", "growth"), [(0.0, 0.1), (0.0, 0.2), (0.1, 0.1), (0.1, 0.2)])
def test_auto_comes_back_when_the_draft_turns_good(c, growth):
    spent, ks = simulate(DraftLength("auto", c), lambda place: 0.0 if place < 400 else 0.9, c, growth, 1000)
    assert spent < 1000 - 0.6 * (600 - 600 * (4 * c + 1 + 4 * growth) / 4.1)
    assert Counter(ks[-30:-5]).most_common(1)[0][0] >= 3


def test_auto_recovers_from_a_slow_first_step():
    """A first step that takes ten times as long (cold caches) must not make drafting look cheap for good."""
    length = DraftLength("auto")
    length.record(Round(torch.empty(1, 0), None, None, None, [0], 0.0, 10.0 / 50), [0])
    assert simulate(length, lambda place: 0.0, 0.0, 0.5, 128)[0] < 1.06 * 128


def test_auto_takes_the_length_that_maximizes_the_formula():
    """Brute force over all k, with costs and acceptance that were measured."""
    for alpha, c, growth in itertools.product([0.3, 0.6, 0.8, 0.95], [0.0, 0.05, 0.2], [0.02, 0.1, 0.3]):
        length = DraftLength("auto", c)
        for k in [0, 0, *range(1, 9)] * 4:
            length.record(Round(torch.empty(1, k), None, None, None, [k], k * c, 1 + growth * k), [0])
        length.accepted, length.tested = 20 * alpha, 20.0
        length.lost = -100.0  # what has been gained by now
        length.draft_rounds, length.wait = 0, 16  # it is not time to try again, or to measure a plain step

        def speedup(k: int, alpha: float = alpha, c: float = c, growth: float = growth) -> float:
            return sum(alpha**i for i in range(k + 1)) / (k * c + 1 + growth * k)

        for limit in (0, 1, 3, 20):
            chosen = length.choose(limit)
            assert chosen <= min(limit, DraftLength.LARGEST)
            assert speedup(chosen) == pytest.approx(max(speedup(k) for k in range(min(limit, 8) + 1)))


def test_auto_never_drafts_past_the_limit_even_when_trying_again():
    length = DraftLength("auto")
    simulate(length, lambda place: 0.0, 0.0, 0.5, 300)
    length.wait = 0
    assert length.choose(0) == 0 and length.choose(1) <= 1


# ---------------------------------------------------------------- 9. prompt lookup


@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        ([1, 2, 3, 9, 9, 1, 2, 3], 2, [9, 9]),
        ([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, [8]),  # the latest match
        ([5, 2, 3, 7, 1, 2, 3, 8, 5, 2, 3], 1, [7]),  # a longer one before a later one
        ([1, 6, 4, 6], 2, [4, 6]),  # down to one token
        ([4, 4, 4], 5, [4, 4, 4, 4, 4]),  # a match that overlaps the end
        ([8, 1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # goes on into its own copy
        ([1, 2], 4, []),  # shorter than n, no match
        ([1], 4, []),
        ([7, 7], 3, [7, 7, 7]),
        ([1, 2, 3, 4], 3, []),
    ],
)
def test_lookup(row, k, expected):
    assert NgramDraft().lookup(row, k) == expected


def brute_lookup(row: list[int], k: int, longest: int, shortest: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for start in range(len(row) - n - 1, -1, -1):
            if len(row) > n and row[start : start + n] == row[-n:]:
                out = list(row)
                for i in range(k):
                    out.append(out[start + n + i])
                return out[len(row) :]
    return []


def test_lookup_against_a_search_by_hand():
    """Ids of repeated bytes among them, whose pattern is found across two ids first."""
    chance = random.Random(0)
    for ids in ([1, 2, 3], [0, 1, 256, 65536, 1 << 24], [0x01010101, 0x00010101, 0x01010100, 0x101]):
        for _ in range(400):
            row = [chance.choice(ids) for _ in range(chance.randint(1, 24))]
            longest = chance.randint(1, 4)
            shortest = chance.randint(1, longest)
            assert NgramDraft(longest, shortest).lookup(row, 5) == brute_lookup(row, 5, longest, shortest)


def test_lookup_is_not_misled_by_bytes_across_two_ids():
    row = [0x00000100, 0x00000100 << 8, 5, 0x00010000]
    assert bytes(row[-1].to_bytes(4, "little")) in b"".join(i.to_bytes(4, "little") for i in row[:-1])
    assert row[-1] in row[:-1] or NgramDraft().lookup(row, 2) == []
    row = [0x00000001, 0x00000002, 9, 0x00000100, 0x00000200]
    assert NgramDraft(1, 1).lookup(row, 2) == []


def test_lookup_for_rows_of_which_some_match():
    drafts, q = NgramDraft().propose([[1, 2, 1], [4, 5, 6]], 2)
    assert q is None and drafts.tolist() == [[2, 1], [6, 6]]
    assert NgramDraft().propose([[1, 2], [3, 4]], 2)[0].shape == (2, 0)


# ---------------------------------------------------------------- 10. --show_draft


@pytest.fixture
def speculating(tmp_path):
    path = tiny.write_checkpoint(tmp_path / "model")
    return ["--checkpoint_path", path, "--draft", "ngram", "--speculate_k", 2, "--show_draft", "--prompt",
            "hello hello hello hello", "--temperature", 0, "--max_new_tokens", 40, "--ignore_eos"]  # fmt: skip


def on_terminal(monkeypatch, flags: list) -> str:
    """Standard output when it is a terminal."""
    master, slave = os.openpty()
    with open(slave, "w", encoding="utf-8", errors="surrogateescape", closefd=True) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main([str(flag) for flag in flags]) == 0
        stream.flush()
        out = os.read(master, 1 << 16)
    monkeypatch.undo()
    os.close(master)
    return out.decode("utf-8", "replace").replace("\r\n", "\n")


def test_show_draft_colours_a_terminal_and_nothing_else(speculating, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = run(capsys, *speculating)[0]
    assert "\033" not in plain
    shown = on_terminal(monkeypatch, speculating)
    assert "\033[32m" in shown or "\033[31m" in shown
    uncoloured = re.sub(r"\033\[\d+m", "", shown)
    assert uncoloured.split() == plain.encode("utf-8", "replace").decode().split()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in on_terminal(monkeypatch, speculating)
