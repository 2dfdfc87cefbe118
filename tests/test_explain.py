"""What --explain says, against numbers worked out by hand."""

import re

import pytest
import torch
from tiny import write_checkpoint

import cli
import explain as explain_module
from explain import expected_tokens, explain, read_bandwidth
from generate import DraftLength


def costs(plain: float = 0.1, draft: float = 0.02, **passes: float) -> DraftLength:
    """A DraftLength that has measured: seconds of a plain pass, of a draft step and (as k4=…) of verifying k drafts."""
    length = DraftLength(4)
    length.plain_s, length.c = plain, draft / plain
    length.pass_s = {int(name[1:]): [seconds] * 3 for name, seconds in passes.items()}
    return length


def figures(**changes) -> dict:
    """The statistics of ten rounds of k = 4 and a plain one."""
    return {
        "generated_tokens": list(range(31)),
        "tokens_per_s": 20.0,
        "bytes_per_token": 2e8,
        "bandwidth_gb_s": 4.0,
        "alpha": 0.5,
        "rounds": 10,
        "k_counts": [1, 0, 0, 0, 10],
        "accept_counts": [4, 2, 1, 1, 2],
        "predicted_speedup": 0.95,
        "measured_speedup": None,
        "fallback": None,
    } | changes


def line(text: str, label: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"  {label:<9}")]
    return found


def test_expected_tokens_of_a_round():
    assert expected_tokens(0.0, 4) == 1
    assert expected_tokens(0.5, 2) == 1 + 0.5 + 0.25
    assert expected_tokens(1.0, 4) == 5


def test_the_bound_is_the_bandwidth_over_the_bytes_of_a_token():
    plain = {"generated_tokens": [1, 2], "tokens_per_s": 20.0, "bytes_per_token": 2e8, "bandwidth_gb_s": 4.0}
    text = explain(plain, DraftLength(), 5e9, 200_000_000)
    assert "200.0 MB; memory gives 5.0 GB/s" in text and "would take at least 40.00 ms" in text
    assert "at most 25.0 tokens/s; this run made 20.0, 80% of that" in text
    assert len(text.splitlines()) == 2  # nothing on drafts


def test_rows_share_a_pass():
    text = explain(figures(generated_tokens=[[1, 2], [3, 4]]), costs(k4=0.15), 5e9, 200_000_000)
    assert "for 2 rows at once" in text


def test_only_a_draft_with_weights_is_included_in_the_reading():
    """31 tokens, the first with the prompt, by 11 passes: a lookup's run read the target 11 times."""
    for tokens in (list(range(31)), [list(range(16)), list(range(16))]):
        lookup = figures(generated_tokens=tokens, bytes_per_token=11 * 2e8 / 30)
        assert "of reading, so at most" in line(explain(lookup, costs(k4=0.15), 5e9, 200_000_000), "bound")
        model = figures(generated_tokens=tokens, bytes_per_token=(11 * 2e8 + 40 * 1e7) / 30)
        assert "the draft's included" in line(explain(model, costs(k4=0.15), 5e9, 200_000_000), "bound")


@pytest.mark.parametrize(("bandwidth", "word"), [(2e9, "cache"), (20e9, "arithmetic")])
def test_a_share_far_from_the_bound_is_explained(bandwidth, word):
    assert word in line(explain(figures(), costs(k4=0.15), bandwidth, 1), "bound")
    assert word not in line(explain(figures(), costs(k4=0.15), 5e9, 1), "bound")


def test_expected_and_seen_tokens_costs_and_speedup():
    text = explain(figures(measured_speedup=0.9), costs(k4=0.15), 5e9, 200_000_000)
    # (1 - 0.5^5) / 0.5 = 1.9375; seen (4·1 + 2·2 + 1·3 + 1·4 + 2·5) / 10 = 2.5; c = 0.2, v_4 = 1.5
    assert line(text, "α").split()[1] == "0.50:"
    assert "k = 4 a round should yield (1 - α^(k+1)) / (1 - α) = 1.94; it yielded 2.50" in text
    assert (
        "c = 0.20" in text
        and "100.0 ms" in text
        and "verifying 4 drafts v_4 = 1.50: k c + v_k = 0.80 + 1.50 = 2.30 a round" in text
    )
    assert "1.94 / 2.30 = 0.84" in text and "0.95 predicted, 0.90 measured" in text
    # free draft 1.9375 / 1.5, all accepted 5 / 2.3, verification at 1: 1.9375 / 1.8
    assert re.findall(r"\d\.\d\d", line(text, "limit")) == ["1.29", "2.17", "1.08"]


@pytest.mark.parametrize(
    ("alpha", "length", "verdict"),
    [
        (0.9, costs(draft=0.09, k4=0.11), "the draft's cost held it back most"),
        (0.3, costs(draft=0.01, k4=0.11), "acceptance held it back most"),
        (0.9, costs(draft=0.001, k4=0.4), "the cost of verification held it back most"),
        (0.99, costs(draft=0.0, k4=0.1), "nothing held it back much"),
    ],
)
def test_what_held_it_back(alpha, length, verdict):
    assert verdict in line(explain(figures(alpha=alpha), length, 5e9, 1), "limit")


def test_rounds_of_several_k_are_averaged():
    text = explain(figures(k_counts=[31, 0, 5, 0, 5]), costs(k2=0.12, k4=0.15), 5e9, 1)
    # k = 2: 1.75, k = 4: 1.9375; costs 2·0.2 + 1.2 and 4·0.2 + 1.5
    assert "with k = 3.0 on average, most often 2, a round should yield" in text and "= 1.84; it yielded 2.50" in text
    assert "verifying k drafts v_k = 1.35 on average (v_2 = 1.20): k c + v_k = 0.60 + 1.35 = 1.95 a round" in text


def test_only_auto_decides_against_drafting():
    idle = figures(k_counts=[31, 0, 0, 0, 10])
    length = costs(k4=0.15)
    assert line(explain(idle, length, 5e9, 1), "tokens").endswith(
        "; 31 of 41 rounds drafted nothing: nothing was proposed"
    )
    length.fixed = None
    assert "drafted nothing: it did not promise to pay, or nothing was" in line(explain(idle, length, 5e9, 1), "tokens")


def test_a_run_that_drafted_nothing():
    nothing = figures(alpha=None, rounds=0, k_counts=[30, 0], accept_counts=[0, 0], predicted_speedup=None)
    assert "nothing was drafted: it did not promise to pay" in explain(nothing, DraftLength(), 5e9, 1)
    assert "nothing was drafted: nothing was proposed" in explain(nothing, DraftLength(4), 5e9, 1)


def test_a_failed_draft_is_named():
    assert "RuntimeError: boom" in explain(figures(fallback="RuntimeError: boom"), costs(k4=0.15), 5e9, 1)


def test_a_run_of_one_token():
    assert "nothing was decoded" in explain({"tokens_per_s": None, "generated_tokens": [1]}, DraftLength(), 5e9, 1)


def test_the_bandwidth_is_measured():
    assert 1e8 < read_bandwidth(torch.device("cpu"), seconds=0.05) < 1e13


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("explain") / "tiny", max_position_embeddings=500)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--draft", "ngram", "--compare"],
        ["--draft", "ngram", "--batch_size", "3"],
        ["--draft_checkpoint_path", "itself", "--speculate_k", "3", "--compare", "--num_samples", "2"],
        ["--max_new_tokens", "1"],
    ],
    ids=" ".join,
)
def test_explain_goes_with_every_kind_of_run(checkpoint, flags, capsys, monkeypatch):
    monkeypatch.setattr(explain_module, "PROBE_BYTES", 2**20)
    flags = [str(checkpoint) if flag == "itself" else flag for flag in flags]
    flags = ["--checkpoint_path", str(checkpoint), "--prompt", "hello", "--max_new_tokens", "40", "--explain", *flags]
    assert cli.main(flags) == 0
    out, err = capsys.readouterr()
    assert "explain" not in out and "bound" not in out
    times = 2 if "--num_samples" in flags else 1
    if flags[-2:] == ["--max_new_tokens", "1"]:
        assert "nothing was decoded" in err
        return
    assert err.count("tokens/s; this run made") == times
    if "--draft_checkpoint_path" in flags:  # a draft that is the target: all is accepted
        assert err.count("α        1.00:") == times and err.count("held it back") == times


def test_explain_refuses_a_conversation(checkpoint, capsys):
    assert cli.main(["--checkpoint_path", str(checkpoint), "--interactive", "--explain"]) == 2
    assert "--explain" in capsys.readouterr().err
