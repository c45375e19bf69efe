"""The second judge on made-up states: another session's, a lost pool and a NaN must show, rounding must not."""

import math
import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import exchange
import state_judge
from judge import NOISY_READINGS, Answer, Scored
from probes import PLAIN_DECODED, Probe, choose
from sessions import Edges
from state_judge import ROW, Bench, bars, errors, largest, measure, verdict, worst_row
from states import CONV, LATENT, POOLS, RECURRENT, TAIL

KDA, MLA = "model.layers.0.self_attn", "model.layers.3.self_attn.attn"
TOKENS = list(range(100))


def state(seed=0, **changes):
    random = torch.Generator().manual_seed(seed)
    values = {RECURRENT: (2, 16, 16), CONV: (3, 48), LATENT: (100, 64), POOLS: (25, 32), TAIL: (2, 64)}
    made = {kind: torch.randn(shape, generator=random) for kind, shape in values.items()}
    return {KDA: {kind: made[kind] for kind in (RECURRENT, CONV)},
            MLA: {kind: made[kind] for kind in (LATENT, POOLS, TAIL)}}  # fmt: skip


def rounded(one, dtype=torch.bfloat16):
    return {layer: {kind: value.to(dtype).float() for kind, value in kinds.items()} for layer, kinds in one.items()}


def probe(warm, cached=64, session="s1"):
    return Probe(session, "prompt", TOKENS, cached, warm)


def judged(warm, cached=64, floor=None):
    measured = measure(lambda tokens, *number: state(), [probe(warm, cached)])
    return verdict(measured, bars(floor or {}, "auto"))


def changed(kind, change):
    warm = state()
    layer = KDA if kind in (RECURRENT, CONV) else MLA
    change(warm[layer][kind])
    return warm


def test_a_state_that_was_only_rounded_is_right():
    for dtype in (torch.float32, torch.bfloat16):
        said = judged(rounded(state(), dtype))
        assert said["findings"] == [] and (said["states"], said["hits"]) == (1, 1)
    assert set(said["largest"]) == {RECURRENT, CONV, LATENT, POOLS, TAIL, LATENT + ROW, POOLS + ROW}
    assert all(0 < error < 2**-8 for error in said["largest"].values())


@pytest.mark.parametrize("kind", [RECURRENT, CONV, LATENT, POOLS, TAIL])
def test_another_sessions_state_is_found_under_any_floor(kind):
    layer = KDA if kind in (RECURRENT, CONV) else MLA
    warm = changed(kind, lambda value: value.copy_(state(seed=1)[layer][kind]))
    found = judged(warm, floor={kind: 9.0, kind + ROW: 9.0})["findings"]
    assert found and {(one["session"], one["layer"]) for one in found} == {("s1", layer)}
    assert all(one["kind"].startswith(kind) and one["error"] > 1 for one in found)


@pytest.mark.parametrize(("kind", "row"), [(LATENT, 64), (POOLS, 17)])
def test_one_lost_row_of_many_is_found_by_its_number(kind, row):
    found = judged(changed(kind, lambda value: value[row].zero_()))["findings"]
    assert (kind + ROW, row) in {(one["kind"], one["row"]) for one in found}


def tied(row, readings):
    """A judge whose reading `number` has `row` of the latents as it is in readings[number], else as in the cold one."""

    def read(tokens, number=None):
        read.numbers.append(number)
        made = state()
        if number is not None and number < len(readings):
            made[MLA][LATENT][row] = readings[number]
        return made

    read.numbers = []
    return read


def test_a_row_that_noise_explains_is_right():
    other = state(seed=1)[MLA][LATENT][7]
    warm = changed(LATENT, lambda value: value[7].copy_(other))
    read = tied(7, [state()[MLA][LATENT][7], other * 1.01])
    (row,) = [one for one in measure(read, [probe(warm)]) if one.kind == LATENT + ROW]
    assert row.error < 0.02 and read.numbers == [None, 0, 1]
    read = tied(8, [other, other])  # another row went that way: that explains nothing
    (row,) = [one for one in measure(read, [probe(warm)]) if one.kind == LATENT + ROW]
    assert row.error > 1 and row.row == 7 and len(read.numbers) == 1 + NOISY_READINGS


def test_many_far_rows_are_no_ties_and_no_number_is_never_one():
    other = state(seed=1)[MLA][LATENT]
    read = tied(slice(0, 20), [other[:20]])
    measured = measure(read, [probe(changed(LATENT, lambda value: value[:20].copy_(other[:20])))])
    assert verdict(measured, bars({}, "auto"))["findings"] and read.numbers == [None]
    read = tied(3, [other[3]] * NOISY_READINGS)
    (row,) = [one for one in measure(read, [probe(changed(LATENT, lambda value: value[3].fill_(float("nan"))))])
              if one.kind == LATENT + ROW]  # fmt: skip
    assert math.isnan(row.error) and row.row == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [RECURRENT, CONV, LATENT, POOLS, TAIL])
def test_what_is_no_number_is_found(kind, bad):
    found = judged(changed(kind, lambda value: value.view(-1)[-1:].fill_(bad)), floor={kind: 9.0})["findings"]
    assert found and all(one["error"] is None and "not finite numbers" in one["text"] for one in found)


def test_a_finding_says_where_it_is():
    (one,) = judged(changed(RECURRENT, lambda value: value.mul_(1.1)))["findings"]
    assert one["text"] == (
        "session s1, after the prompt, 100 tokens, 64 of them from the cache: "
        f"KDA recurrent of {KDA}: 0.1000 away, bar 0.0469"
    )
    text = judged(changed(POOLS, lambda value: value[3].neg_()), cached=0)["findings"][-1]["text"]
    assert "none of them from the cache: indexer pools, worst row 3 of " in text and "2.0000 away, bar 0.1500" in text


def test_the_judges_own_nan_and_other_shapes_are_no_verdict():
    bad = changed(LATENT, lambda value: value[0].fill_(float("nan")))
    with pytest.raises(ValueError, match="no finite numbers in the judging engine"):
        errors(bad, state())
    short = state()
    short[MLA][POOLS] = short[MLA][POOLS][:-1]
    with pytest.raises(ValueError, match=r"indexer pools is \(24, 32\), alone and cold it is \(25, 32\)"):
        errors(state(), short)
    with pytest.raises(ValueError, match="latent is None"):
        errors(state(), {KDA: state()[KDA]})
    assert errors({KDA: state()[KDA]}, state()), "layers of a draft are nobody's business"


def test_bars_follow_the_plain_arm_between_rounding_and_what_would_hide_an_error():
    floors = ({}, {RECURRENT: 0.05, LATENT + ROW: 0.2}, {RECURRENT: 5.0})
    least, lifted, most = (bars(floor, "auto") for floor in floors)
    assert least[RECURRENT] == 3 * 2**-6 and lifted[RECURRENT] == pytest.approx(0.15)
    assert lifted[LATENT + ROW] == pytest.approx(0.6) and lifted[LATENT] == least[LATENT]
    assert most[RECURRENT] == pytest.approx(0.3)
    assert bars({}, "fp8")[LATENT] == least[POOLS] == 3 * 2**-5


def test_rows_of_next_to_nothing_do_not_count_as_far():
    right = torch.ones(10, 4)
    right[3] = 0
    got = right.clone()
    got[3] += 1e-4
    assert worst_row(got, right)[0] < 0.01
    assert worst_row(torch.zeros(0, 4), torch.zeros(0, 4)) == (0.0, None)


def test_equal_tokens_are_read_once():
    read = []
    measure(lambda tokens: read.append(list(tokens)) or state(), [probe(state()), probe(state(), 0, "s2")])
    assert read == [TOKENS]


# Through files


def served(tmp_path, monkeypatch, bench):
    monkeypatch.setattr(exchange, "POLL_S", 0.005)
    score = lambda answers: [Scored(one, [0.0]) for one in answers]
    thread = threading.Thread(target=exchange.serve, args=(tmp_path, "auto", score, None, bench))
    thread.start()
    return thread


def test_an_arm_is_told_what_its_states_are_by_the_plain_arms_floor(tmp_path, monkeypatch):
    answers, file = [Answer("s1", 0, [1], [2], cached=0)], tmp_path / "arm.states.pt"
    thread = served(tmp_path, monkeypatch, Bench("auto", lambda tokens, *number: state()))
    state_judge.save(tmp_path / "plain.states.pt", [probe(changed(RECURRENT, lambda value: value.mul_(1.03)), 0)])
    plain = exchange.ask(tmp_path, "plain", "auto", True, answers, "plain.states.pt")
    assert plain["states"]["bars"][RECURRENT] == pytest.approx(0.09, rel=1e-3) and not plain["states"]["findings"]
    state_judge.save(file, [probe(changed(RECURRENT, lambda value: value.mul_(1.08))), probe(state(seed=1))])
    said = exchange.ask(tmp_path, "arm", "auto", False, answers, file.name)["states"]
    assert (said["states"], said["hits"]) == (1, 1) and {one["layer"] for one in said["findings"]} == {KDA, MLA}
    assert "states" not in exchange.ask(tmp_path, "arm", "auto", False, answers)
    lost = exchange.ask(tmp_path, "arm", "auto", False, answers, "gone.pt")
    assert "could not compare states" in lost["states"]["error"] and lost["findings"] == []
    (tmp_path / exchange.DONE).touch()
    thread.join(5)


def test_without_a_floor_nothing_is_said_to_be_right():
    bench = Bench("auto", lambda tokens, *number: state())
    measured = measure(bench.read, [probe(state())])
    assert "gave no floor" in bench.verdict(measured)["error"]
    bench.take_floor("the judge could not compare states: x")
    assert bench.verdict(measured) == {"error": "the judge could not compare states: x"}
    assert largest(measured)[RECURRENT] == 0


# Which probes


def test_probes_are_cut_to_where_hits_end_and_where_selection_begins():
    edges = Edges(block=256, chunk=509, longest=9216)
    answers = [Answer(f"s{i:02}", 0, list(range(n)), [1] * 9)
               for i, n in enumerate((9200, 100, 2900, 1500, 700, 3000, 4000, 600, 5000, 2500))]  # fmt: skip
    answers.append(replace(answers[3], turn=1, prompt=list(range(1600))))
    chosen = choose(answers, edges, 0, 8, PLAIN_DECODED + 1)
    assert chosen == choose(answers, edges, 0, 8, PLAIN_DECODED + 1) and len(chosen) == 8
    lengths = {name: len(tokens) for name, tokens in chosen}
    assert "s01" not in lengths and lengths["s00"] == 9216 - 49
    assert sum(1 <= n % 256 <= 8 for n in lengths.values()) >= 3
    assert sum(n > 2048 for n in lengths.values()) >= 2
    wholes = {answer.session: answer.whole for answer in answers}
    assert all(tokens == wholes[name][: len(tokens)] for name, tokens in chosen)
    short = [Answer("s1", 0, [1, 2], [3], cached=0)]
    assert choose(short, edges, 0, 8, 13) == [("s1", [1, 2, 3])] and choose([], edges, 0, 8, 13) == []
