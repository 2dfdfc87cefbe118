"""Sampling, plain decoding, `generate` without a draft, and compilation. Speculation: test_speculative.py."""

import math
import resource
import sys
from contextlib import nullcontext

import pytest
import torch
from tiny import VOCAB_SIZE, tiny_transformer
from torch._dynamo.utils import counters

import generate as generate_module
import kernels
from generate import (
    compile_model,
    decode_n_tokens,
    decode_one_token,
    draw,
    generate,
    logits_to_probs,
    prefill,
    sample,
    weight_bytes,
)

PROMPT = [5, 100, 7, 42, 9]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model():
    return tiny_transformer(seed=1)


# ---------------------------------------------------------------- the distribution


def of(*probs: float) -> torch.Tensor:
    return torch.tensor(probs).log()


def close(found: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=1e-6, rtol=0)
    assert [p == 0 for p in expected] == (found == 0).tolist()  # what is cut off is cut off exactly


def test_temperature():
    logits = torch.tensor([1.0, 2.0, -1.0, 0.5])
    close(logits_to_probs(logits), *logits.softmax(0).tolist())
    close(logits_to_probs(logits, temperature=0.5), *(2 * logits).softmax(0).tolist())
    close(logits_to_probs(logits, temperature=4.0), *(logits / 4).softmax(0).tolist())


@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9}], ids=str)
def test_temperature_0_is_argmax_exactly(more):
    logits = torch.tensor([[[1.0, 5.0, 5.0, 2.0], [-1e30, -2e30, -1e29, -1e38]]])
    probs = logits_to_probs(logits, temperature=0, **more)
    assert probs.tolist() == [[[0, 1, 0, 0], [0, 0, 1, 0]]]
    token, probs = sample(logits, temperature=0, **more)
    assert token.tolist() == [[1, 2]] and probs.sum() == 2


def test_top_k():
    logits = of(0.1, 0.4, 0.2, 0.3)
    close(logits_to_probs(logits, top_k=1), 0, 1, 0, 0)
    close(logits_to_probs(logits, top_k=2), 0, 4 / 7, 0, 3 / 7)
    close(logits_to_probs(logits, top_k=4), 0.1, 0.4, 0.2, 0.3)
    close(logits_to_probs(logits, top_k=1000), 0.1, 0.4, 0.2, 0.3)
    close(logits_to_probs(of(0.2, 0.4, 0.2, 0.2), top_k=2), 0.2, 0.4, 0.2, 0.2)  # ties with the last one kept


def test_top_p():
    logits = of(0.1, 0.4, 0.2, 0.3)
    close(logits_to_probs(logits, top_p=1e-9), 0, 1, 0, 0)
    close(logits_to_probs(logits, top_p=0.39), 0, 1, 0, 0)
    close(logits_to_probs(logits, top_p=0.41), 0, 4 / 7, 0, 3 / 7)
    close(logits_to_probs(logits, top_p=0.69), 0, 4 / 7, 0, 3 / 7)
    close(logits_to_probs(logits, top_p=0.71), 0, 4 / 9, 2 / 9, 3 / 9)
    close(logits_to_probs(logits, top_p=1.0), 0.1, 0.4, 0.2, 0.3)
    close(logits_to_probs(of(0.4, 0.3, 0.3), top_p=0.5), 0.4, 0.3, 0.3)  # a tie is kept


def test_temperature_then_top_k_then_top_p():
    logits = of(0.4, 0.3, 0.2, 0.1)
    close(logits_to_probs(logits, top_p=0.5), 4 / 7, 3 / 7, 0, 0)
    close(logits_to_probs(logits, top_k=2, top_p=0.5), 1, 0, 0, 0)  # of the two kept, the first has 4/7
    flat = [p**0.5 for p in (0.4, 0.3, 0.2, 0.1)]
    close(logits_to_probs(logits, temperature=2, top_p=0.65), *(p / sum(flat[:3]) for p in flat[:3]), 0)  # .607 < .65


def test_rows_are_cut_on_their_own():
    logits = torch.stack((of(0.4, 0.3, 0.2, 0.1), of(0.1, 0.1, 0.1, 0.7)))[None]
    probs = logits_to_probs(logits, top_p=0.5)
    close(probs[0, 0], 4 / 7, 3 / 7, 0, 0)
    close(probs[0, 1], 0, 0, 0, 1)


def test_narrow_logits_are_widened_and_impossible_tokens_stay_so():
    logits = torch.tensor([0.0, 10.0, -math.inf, 11.0], dtype=torch.bfloat16)
    probs = logits_to_probs(logits, top_k=3, top_p=0.99999)
    assert probs.dtype == torch.float32 and probs[2] == 0
    torch.testing.assert_close(probs.sum(), torch.tensor(1.0))


# ---------------------------------------------------------------- the draw


def test_tokens_are_drawn_as_often_as_the_distribution_says():
    torch.manual_seed(0)
    probs, count = torch.tensor([0.0, 0.02, 0.5, 0.0, 0.3, 0.08, 0.1, 0.0]), 50_000
    seen = draw(probs.expand(count, -1)).bincount(minlength=8)
    assert not seen[probs == 0].any()
    expected = count * probs[probs > 0]
    chi_squared = ((seen[probs > 0] - expected) ** 2 / expected).sum()
    assert chi_squared < 18.5  # 4 degrees of freedom: passed by chance with probability 0.999


def test_a_draw_need_not_be_normalized():
    torch.manual_seed(0)
    seen = draw(torch.tensor([0.003, 0.001]).expand(20_000, -1)).bincount(minlength=2)
    assert 14_600 < seen[0] < 15_400  # 15,000, and a standard deviation of 61


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.5, 1 - 2**-53])
def test_no_token_of_probability_0_is_drawn(monkeypatch, uniform):
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype=None, device=None: torch.full(shape, uniform, dtype=dtype))
    for scale in (1.0, 1e-30, 0.7, 3.0):
        probs = torch.tensor([[0.0, 0.3, 0.0, 0.0, 0.7, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]]) * scale
        tokens = draw(probs)
        assert (probs.gather(1, tokens[:, None]) > 0).all()
    assert draw(torch.eye(5)).tolist() == [0, 1, 2, 3, 4]


def test_rows_draw_with_random_numbers_of_their_own():
    torch.manual_seed(0)
    assert len(set(draw(torch.full((40, 1000), 1e-3)).tolist())) > 30


# ---------------------------------------------------------------- steps


def naive(model, ids: list[int], count: int) -> list[int]:
    """Greedy decoding that reads the whole text anew for each token."""
    for _ in range(count):
        ids = [*ids, int(model(torch.tensor([ids]), torch.arange(len(ids)))[0, -1].argmax())]
    return ids


def test_prefill_and_steps_continue_as_the_whole_text_does(model):
    model.setup_caches(1, 64)
    expected = naive(model, PROMPT, 20)
    token, probs = prefill(model, torch.tensor([PROMPT]), torch.arange(5), temperature=0)
    assert token.shape == (1, 1) and probs.shape == (1, 1, VOCAB_SIZE) and probs.max() == 1
    second, _ = decode_one_token(model, token, torch.tensor([5]), temperature=0)
    heard = []
    rest = decode_n_tokens(model, second, torch.tensor([6]), 18, lambda t: heard.append(t.item()), temperature=0)
    assert PROMPT + [token.item(), second.item()] + rest[0].tolist() == expected
    assert heard == rest[0].tolist()


def test_a_callback_may_end_the_steps(model):
    model.setup_caches(1, 64)
    heard = []

    def callback(token) -> bool:
        heard.append(token.item())
        return len(heard) == 3

    tokens = decode_n_tokens(model, torch.tensor([[5]]), torch.tensor([0]), 10, callback, temperature=0)
    assert tokens[0].tolist() == heard and len(heard) == 3
    assert decode_n_tokens(model, torch.tensor([[5]]), torch.tensor([0]), 0).shape == (1, 0)


def test_a_prompt_longer_than_a_piece_is_read_in_pieces(model, monkeypatch):
    expected, _ = generate(model, PROMPT * 6, 10, temperature=0)
    monkeypatch.setattr(generate_module, "PREFILL_CHUNK", 7)
    found, _ = generate(model, PROMPT * 6, 10, temperature=0)
    assert found.tolist() == expected.tolist()


# ---------------------------------------------------------------- generate


def test_greedy_text_is_that_of_the_whole_model(model):
    sequences, stats = generate(model, PROMPT, 40, temperature=0)
    assert sequences.dtype == torch.int64
    assert sequences.tolist() == [naive(model, PROMPT, 40)]
    assert stats["generated_tokens"] == sequences[0, 5:].tolist() and stats["prompt_tokens"] == 5


def test_a_prompt_may_be_a_tensor(model):
    assert torch.equal(
        generate(model, torch.tensor(PROMPT), 10, temperature=0)[0], generate(model, PROMPT, 10, temperature=0)[0]
    )


def test_one_new_token(model):
    sequences, stats = generate(model, PROMPT, 1, temperature=0)
    assert sequences.tolist() == [naive(model, PROMPT, 1)]
    assert stats["tokens_per_s"] is None and stats["bytes_per_token"] is None  # nothing was decoded
    sequences, _ = generate(model, [7], 1, temperature=0, batch_size=3)
    assert sequences.shape == (3, 2)


def test_generation_stops_at_the_first_of_the_end_tokens(model):
    whole = generate(model, PROMPT, 40, temperature=0)[0][0].tolist()
    new = whole[5:]
    later, sooner = new[20], new[8]
    cut = min(new.index(later), new.index(sooner))
    heard = []
    sequences, stats = generate(
        model, PROMPT, 40, temperature=0, stop_ids=[later, sooner, 271], callback=lambda *token: heard.append(token)
    )
    assert 0 < cut < 20
    assert sequences.tolist() == [whole[: 5 + cut + 1]] and stats["generated_tokens"] == new[: cut + 1]
    assert heard == [(0, id, "plain") for id in new[: cut + 1]]


def test_generation_may_end_with_its_first_token(model):
    first = naive(model, PROMPT, 1)[-1]
    sequences, stats = generate(model, PROMPT, 40, temperature=0, stop_ids=[first], batch_size=2)
    assert sequences.tolist() == [PROMPT + [first]] * 2 and stats["tokens_per_s"] is None


def test_an_end_token_in_the_prompt_ends_nothing(model):
    sequences, _ = generate(model, PROMPT, 10, temperature=0, stop_ids=[PROMPT[-1]])
    assert sequences[0, :6].tolist() == naive(model, PROMPT, 1)


def test_each_row_stops_at_its_own_end(model):
    """A row that has ended changes nothing for the others: each is the unstopped run, cut at its own first end."""
    torch.manual_seed(0)
    whole = generate(model, PROMPT, 60, batch_size=4, temperature=1.0)[0][:, 5:].tolist()
    assert len({tuple(row) for row in whole}) == 4
    stop_ids = set(whole[0][10:14]) | set(whole[1][25:26]) | set(whole[2][50:52])
    expected = [row[: next((i for i, id in enumerate(row) if id in stop_ids), 59) + 1] for row in whole]
    assert len({len(row) for row in expected}) > 2
    heard = [[] for _ in whole]
    torch.manual_seed(0)
    sequences, stats = generate(
        model, PROMPT, 60, batch_size=4, temperature=1.0, stop_ids=tuple(stop_ids),
        callback=lambda row, token, kind: heard[row].append(token),
    )  # fmt: skip
    assert stats["generated_tokens"] == heard == expected
    longest = max(map(len, expected))
    assert sequences.tolist() == [PROMPT + row + row[-1:] * (longest - len(row)) for row in expected]


def test_rows_at_temperature_0_are_the_one_row(model):
    one = generate(model, PROMPT, 30, temperature=0)[0]
    assert torch.equal(generate(model, PROMPT, 30, temperature=0, batch_size=3)[0], one.expand(3, -1))


def test_the_same_seed_gives_the_same_text(model):
    def text(seed: int, **more) -> list:
        torch.manual_seed(seed)
        return generate(model, PROMPT, 30, **more)[0].tolist()

    assert text(1) == text(1) != text(2)
    assert text(1, batch_size=2, top_k=9, top_p=0.8) == text(1, batch_size=2, top_k=9, top_p=0.8)


def test_sampling_reaches_every_step(model):
    torch.manual_seed(0)
    assert generate(model, PROMPT, 30, temperature=1.0, top_k=1)[0].tolist() == [naive(model, PROMPT, 30)]
    assert generate(model, PROMPT, 30, temperature=1.0, top_p=1e-6)[0].tolist() == [naive(model, PROMPT, 30)]


def test_a_cached_prefix_is_not_read_again_and_changes_nothing(model):
    model.setup_caches(1, 100)
    text = generate(model, PROMPT, 20, temperature=0)[0][0].tolist()
    prompt = text[:-1] + [77, 78]
    expected = naive(model, prompt, 20)
    generate(model, PROMPT, 20, temperature=0)
    read = []
    hook = model.tok_embeddings.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0].shape[1]))
    found, stats = generate(model, prompt, 20, temperature=0, cached=24)
    hook.remove()
    assert found.tolist() == [expected]
    assert read[0] == 2 and set(read[1:]) == {1} and stats["prompt_tokens"] == len(prompt)
    assert generate(model, prompt, 20, temperature=0, cached=len(prompt))[0].tolist() == [expected]


def test_a_cached_prefix_is_read_again_where_the_cache_has_to_grow():
    """A larger cache is a new one: what the old one held is gone."""
    model = tiny_transformer(seed=1)
    text = generate(model, PROMPT, 20, temperature=0)[0][0].tolist()
    for batch_size, count in ((1, 40), (3, 40)):
        found, _ = generate(model, text, count, temperature=0, cached=len(text) - 1, batch_size=batch_size)
        assert found.tolist() == [naive(model, text, 40)] * batch_size


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}], ids=str
)
def test_a_damaged_model_is_an_error(value, sampling):
    model = tiny_transformer()
    model.output.weight[3, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        generate(model, PROMPT, 5, **sampling)


def test_what_cannot_be_generated_is_refused(model):
    for prompt, count, rows in (([], 1, 1), (PROMPT, 0, 1), (PROMPT, -1, 1), (PROMPT, 1, 0)):
        with pytest.raises(ValueError):
            generate(model, prompt, count, batch_size=rows)
    for id in (-1, VOCAB_SIZE):
        with pytest.raises(ValueError, match=str(VOCAB_SIZE)):
            generate(model, [id], 1)
    with pytest.raises(ValueError, match="257 .* 256"):
        generate(model, PROMPT, 252)
    assert generate(model, PROMPT, 251, temperature=0)[0].shape == (1, 256)


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
def test_no_call_inside_generate_crosses_the_end_of_a_stack_chunk(model):
    """CPython maps and unmaps memory at each that does (python/cpython#142183): one page fault a call, or more."""

    def nested(depth: int) -> None:
        if depth:
            nested(depth - 1)
        else:
            for _ in range(50):
                leaf()

    def leaf(*, a=0, b=0, c=0, d=0, e=0, f=0, g=0, h=0, i=0) -> None:
        pass  # its frame is larger than those of `nested`, so one of the depths leaves no room for it

    def faults_by_depth(*_: object) -> None:
        for depth in range(150):
            nested(depth)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            nested(depth)
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    counts: list[int] = []
    generate(model, PROMPT, 1, callback=faults_by_depth)
    assert len(counts) == 150 and max(counts) < 40


# ---------------------------------------------------------------- statistics


def test_tokens_per_second_count_neither_the_prompt_nor_what_follows_the_end(model):
    """What decoding made is all but the first token, which came with the prompt."""
    new = generate(model, PROMPT * 10, 40, temperature=0)[0][0, 50:].tolist()
    stop = new[20]
    stats = generate(model, PROMPT * 10, 40, temperature=0, stop_ids=[stop])[1]
    count = new.index(stop) + 1
    assert len(stats["generated_tokens"]) == count > 5 and stats["prompt_tokens"] == 50
    assert stats["tokens_per_s"] * stats["decode_s"] == pytest.approx(count - 1)
    assert stats["bytes_per_token"] == weight_bytes(model)
    assert stats["bandwidth_gb_s"] == pytest.approx((count - 1) * weight_bytes(model) / stats["decode_s"] / 1e9)
    assert stats["ttft_s"] > 0 and "rounds" not in stats


def test_tokens_per_second_of_a_batch_count_each_row_to_its_end(model):
    torch.manual_seed(0)
    whole = generate(model, PROMPT, 60, batch_size=3, temperature=1.0)[0][:, 5:].tolist()
    stop_ids = tuple(set(whole[0][10:14]))
    torch.manual_seed(0)
    stats = generate(model, PROMPT, 60, batch_size=3, temperature=1.0, stop_ids=stop_ids)[1]
    lengths = [len(row) for row in stats["generated_tokens"]]
    assert len(set(lengths)) > 1
    tokens = sum(lengths) - 3
    assert stats["tokens_per_s"] * stats["decode_s"] == pytest.approx(tokens)
    # A pass reads the weights once for all rows.
    assert stats["bytes_per_token"] == pytest.approx((max(lengths) - 1) * weight_bytes(model) / tokens)


def test_weights_are_counted_once():
    sizes = {"vocab_size": 300, "dim": 64}
    tied, untied = tiny_transformer(tie_embeddings=True, **sizes), tiny_transformer(**sizes)
    untied.setup_caches(1, 200)
    assert weight_bytes(tied) == sum(p.numel() * 4 for p in tied.parameters())
    assert weight_bytes(untied) == weight_bytes(tied)  # of the embedding table a pass reads a row


# ---------------------------------------------------------------- compilation


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("arithmetic, compile_prefill", [("kernels", False), ("reference", True)])
def test_other_prompt_lengths_samples_and_turns_never_compile_again(monkeypatch, arithmetic, compile_prefill):
    """Compilations are counted as Dynamo's graphs; what each is made into does not matter here."""
    if arithmetic == "kernels" and not kernels.load():
        pytest.skip("no C++ compiler here")
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **more: real(f, backend="aot_eager", **more))
    torch._dynamo.reset()
    with kernels.disabled() if arithmetic == "reference" else nullcontext():
        model, plain = tiny_transformer(seed=1), tiny_transformer(seed=1)
        for each in (model, plain):
            each.setup_caches(2, 200)
        compile_model(model, compile_prefill=compile_prefill)
        before = compiled_graphs()
        found, expected = [], []
        for transformer, texts in ((plain, expected), (model, found)):
            for length in (3, 17, 4, 60, 3, 2):  # prompts, and samples of each
                for _ in range(2):
                    texts.append(generate(transformer, PROMPT * 12 + PROMPT[:length], 6, temperature=0)[0].tolist())
                if transformer is model and len(texts) == 2:
                    after_first = compiled_graphs()
            turn = texts[-1][0]
            texts.append(generate(transformer, turn + [3, 4, 5], 9, temperature=0, cached=len(turn) - 1)[0].tolist())
    assert 0 < after_first - before <= (4 if compile_prefill else 2)  # the layer is a graph inside the graph
    assert compiled_graphs() == after_first
    assert found == expected


@pytest.mark.parametrize("arithmetic", ["kernels", "reference"])
def test_compiled_code_makes_the_same_tokens(arithmetic):
    if arithmetic == "kernels" and not kernels.load():
        pytest.skip("no C++ compiler here")
    torch._dynamo.reset()
    with kernels.disabled() if arithmetic == "reference" else nullcontext():
        model = tiny_transformer(seed=2, qk_norm=True, qkv_bias=True)
        expected = generate(model, PROMPT, 40, temperature=0)[0]
        model = tiny_transformer(seed=2, qk_norm=True, qkv_bias=True)
        compile_model(model)
        assert torch.equal(generate(model, PROMPT, 40, temperature=0)[0], expected)


@pytest.mark.parametrize("arithmetic", ["kernels", "reference"])
@pytest.mark.parametrize("grown", [(1, 90), (3, 30)])
def test_a_cache_that_grows_is_noticed_when_compiled(monkeypatch, arithmetic, grown):
    """Conditions of compiled code are checked for the first layer only; see `but_of_later_layers`."""
    if arithmetic == "kernels" and not kernels.load():
        pytest.skip("no C++ compiler here")
    real = torch.compile

    def quickly(f, options, **more):
        return real(f, backend="aot_eager", options={"guard_filter_fn": options["guard_filter_fn"]}, **more)

    torch._dynamo.reset()
    with kernels.disabled() if arithmetic == "reference" else nullcontext():
        model, compiled = tiny_transformer(seed=1, n_layer=12), tiny_transformer(seed=1, n_layer=12)
        monkeypatch.setattr(
            torch, "compile", lambda f, options=None, **more: quickly(f, options, **more) if options else f
        )
        compile_model(compiled, 3)
        before = compiled_graphs()
        for batch, end in ((1, 30), grown):
            for each in (model, compiled):
                each.setup_caches(batch, end)
            for start, count in ((0, 3), (3, 1), (end - 3, 2), (end - 1, 1)):
                idx = torch.arange(1, count * batch + 1).view(batch, count)
                input_pos = torch.arange(start, start + count)
                assert torch.allclose(compiled(idx, input_pos), model(idx, input_pos), atol=1e-4)
        assert compiled_graphs() > before


def test_positions_in_another_layout_are_not_compiled_anew(monkeypatch):
    torch._dynamo.reset()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **more: real(f, backend="eager", **more))
    model = tiny_transformer(seed=1)
    model.setup_caches(2, 40)
    compile_model(model, 4)
    for count in (1, 2, 4):
        idx, shared = torch.ones(2, count, dtype=torch.int64), torch.arange(count)
        for input_pos in (shared, shared.repeat(2, 1), shared.expand(2, -1), torch.stack((shared, shared + 3))):
            model(idx, input_pos)
        if count == 2:
            before = compiled_graphs()
    assert compiled_graphs() == before


def test_many_compiled_models_and_batch_sizes_in_one_process(monkeypatch):
    """torch.compile refuses more than eight graphs of one code object."""
    torch._dynamo.reset()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **more: real(f, backend="eager", **more))
    for seed in range(5):
        model = tiny_transformer(seed=seed, n_layer=1)
        model.setup_caches(4, 20)
        expected = [model(torch.full((rows, 1), 5), torch.arange(1)) for rows in range(1, 5)]
        compile_model(model)
        for rows in range(1, 5):
            assert torch.equal(model(torch.full((rows, 1), 5), torch.arange(1)), expected[rows - 1])


def test_a_position_outside_the_cache_is_an_error_when_compiled():
    with kernels.disabled():
        model = tiny_transformer()
        model.setup_caches(1, 20)
        compile_model(model)
        with pytest.raises(IndexError, match="position 20 .* 20"):
            model(torch.tensor([[3]]), torch.tensor([20]))


@pytest.mark.parametrize("spread", [0.0, 3.0])  # a nucleus of nearly all tokens, and one of a few
def test_a_nucleus_of_a_large_vocabulary_is_that_of_its_sorted_probabilities(spread):
    torch.manual_seed(0)
    logits = torch.randn(2, 5000) * spread + torch.linspace(0, 1, 5000)
    probs = logits.softmax(-1)
    kept = logits_to_probs(logits, top_p=0.9) > 0
    for row in range(2):
        mass, nucleus = 0.0, set()
        for token in probs[row].argsort(descending=True).tolist():
            if mass >= 0.9:
                break
            nucleus.add(token)
            mass += probs[row, token].item()
        assert len(nucleus.symmetric_difference(kept[row].nonzero().flatten().tolist())) <= 1  # rounding at the edge
