"""The scheduler: a request in a reused batch slot decodes as if alone, and prefixes are shared."""

import dataclasses
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax._util.errors import OptionError
from specjax.core import loop
from specjax.runtime import prefix_cache, scheduler
from specjax.runtime.engine import Request
from specjax.runtime.generate import make_engine, make_rows
from specjax.runtime.prefill import Prefill
from specjax.runtime.prefix_cache import MIN_PREFIX, PrefixCache, common_prefix
from specjax.runtime.scheduler import Bounds, Scheduler
from specjax.runtime.warmup import warm_up_all_lengths, warm_up_in_background

RNG = np.random.Generator(np.random.Philox(4))
PROMPTS = [RNG.integers(0, 97, n).tolist() for n in (3, 12, 1, 9, 7, 14, 2, 11, 40)]
BUDGETS = [5, 21, 1, 30, 2, 9, 14, 3, 17]
SAMPLING = sj.Sampling(temperature=0.8, top_k=20, top_p=0.9)
FAST = ("autoregressive",)  # test_golden runs every method in reused batch slots
SLOW = ("speculative", "sdsat", "specinfer")


def run(target, draft, name, **kw):
    given = {"prompts": PROMPTS, "max_new_tokens": BUDGETS, "sampling": SAMPLING, "seed": 5}
    return sj.generate(target, method=name, draft=draft, **(given | kw))


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_a_request_in_a_reused_slot_is_the_request_alone(target, draft, name):
    """Tokens, log-probabilities and counters are those of batch size 1."""
    logprobs = name not in FAST  # compiles further programs
    for sampling in (sj.Sampling(), SAMPLING):
        batched, alone = (
            run(target, draft, name, sampling=sampling, batch_size=size, logprobs=logprobs)
            for size in (3, 1)
        )
        for i in range(len(PROMPTS)):
            np.testing.assert_array_equal(batched.tokens[i], alone.tokens[i])
            if logprobs:
                np.testing.assert_allclose(batched.logprobs[i], alone.logprobs[i], atol=1e-4)
        for counter, values in alone.stats.items():
            np.testing.assert_array_equal(batched.stats[counter], values, counter)
        assert batched.finish_reasons == alone.finish_reasons
        np.testing.assert_array_equal(batched.lengths, BUDGETS)
        assert batched.passes < alone.passes and batched.occupancy > 0.8


def test_nothing_is_traced_for_a_new_row(target):
    engine = make_engine(target, None, sj.method("autoregressive"), {})

    def num_traces():
        programs = [
            loop.run_rounds(engine.method),
            loop.fill_slots(engine.method),
            loop.begin_prefill(engine.method, False),
        ]
        return [program._cache_size() for program in programs]

    sj.generate(target, PROMPTS, max_new_tokens=BUDGETS, batch_size=3)
    before = num_traces()
    prompts, budgets = [PROMPTS[i % 9] for i in range(24)], [1 + 5 * (i % 7) for i in range(24)]
    sj.generate(target, prompts, max_new_tokens=budgets, batch_size=3, prefixes=0)
    assert num_traces() == before and min(before) > 0


LIMITS = Bounds(300, 400)


def traces(engine):
    """How often each program of a method has been traced."""
    kinds = [loop.empty_state, loop.begin_prefill, loop.prefill_chunks, loop.fill_slots]
    kinds += [loop.run_rounds, loop.prefill_prompts, loop.resize_state, loop.with_counts]
    kinds += [loop.with_grammar_states]
    counts = {}
    for kind in kinds:
        for key, program in kind.made.get(engine.method, {}).items():
            counts[kind.__name__, key] = program._cache_size()
    return counts


def decoded(running, *requests):
    """The numbers of new tokens, by request."""
    pieces = running.run(iter(requests), rounds=1)
    return {piece.index: len(piece.row.tokens[0]) for piece in pieces if piece.row}


def a_request(length, budget, number):
    tokens = RNG.integers(0, 97, length).astype(np.int32)
    return Request(tokens, budget, jax.random.key(number), number)


def test_a_longer_request_compiles_nothing_that_was_compiled_aside(target):
    """After a warmup in another thread, it joins a running batch, and starts one, untraced."""
    engine = make_engine(target, None, sj.method("autoregressive"), {})
    running = Scheduler(engine, 3, SAMPLING, LIMITS, prefixes=2)
    short = a_request(3, 40, 0)
    decoded(running, short)
    before = traces(engine)
    long = [a_request(230, 3, number) for number in (1, 2)]
    with ThreadPoolExecutor(1) as other:
        arguments = (engine, 3, LIMITS, long[0])
        other.submit(warm_up_in_background, *arguments, logprobs=False, prefixes=2).result()
    warm = traces(engine)
    assert warm != before
    assert decoded(running, short, long[0]) == {0: 40, 1: 3}
    assert decoded(running, *long) == {1: 3, 2: 3}
    assert traces(engine) == warm


PENALTY = sj.Sampling(presence_penalty=0.5)
MIN_P = sj.Sampling(min_p=0.1)
LONG_LIST = sj.Sampling(bad_words=tuple((token,) for token in range(20)))


@pytest.mark.parametrize(
    ("before", "settings"),
    [
        ([], PENALTY),
        ([], MIN_P),
        ([PENALTY], MIN_P),
        ([MIN_P], sj.Sampling(min_p=0.2, min_tokens=1)),
        ([PENALTY], LONG_LIST),
        ([LONG_LIST], PENALTY),
        ([PENALTY], sj.Sampling()),
    ],
    ids=[
        "penalty",
        "min_p",
        "min_p beside a penalty",
        "a minimum beside min_p",
        "many words beside a penalty",
        "a penalty beside many words",
        "nothing beside a penalty",
    ],
)
def test_a_request_of_other_settings_compiles_nothing_that_was_compiled_aside(
    target, before, settings
):
    """Nor do the requests beside it, whose rounds change with it."""
    engine = make_engine(target, None, sj.method("autoregressive"), {})
    loop.forget(engine.method)
    running = Scheduler(engine, 3, sj.Sampling(), LIMITS, prefixes=2)

    def of(sampling, length, budget, number):
        return dataclasses.replace(a_request(length, budget, number), sampling=sampling)

    batch = [of(sampling, 3, 40, i) for i, sampling in enumerate([sj.Sampling(), *before])]
    decoded(running, of(sj.Sampling(), 130, 4, 9), *batch)  # a capacity above the new one's
    known = running.inputs, running.capacity
    new = of(settings, 4, 30, 5)
    warm_up_in_background(engine, 3, LIMITS, new, *known, logprobs=False, prefixes=2)
    warm = traces(engine)
    assert decoded(running, batch[0], new) == {0: 40, 5: 30}
    assert traces(engine) == warm


@pytest.mark.slow
def test_nothing_compiles_after_a_warmup_for_all_lengths(target):
    engine = make_engine(target, None, sj.method("lookup"), {})
    limits = Bounds(260, 300)
    running = Scheduler(engine, 2, SAMPLING, limits, prefixes=2)
    warm_up_all_lengths(engine, 2, limits, SAMPLING, logprobs=False, prefixes=2)
    warm = traces(engine)
    for lengths in ((1, 260), (260, 17), (140,), (60, 9, 250), (30, 2)):
        requests = [a_request(length, 40, number) for number, length in enumerate(lengths)]
        assert set(decoded(running, *requests).values()) == {40}
    assert traces(engine) == warm


@pytest.mark.parametrize("part", ["_runner", "_prefill"])
def test_a_new_state_takes_the_place_of_the_last(target, monkeypatch, part):
    """The last batch, and the last prefilled prompt, are free before the next takes memory."""
    engine = make_engine(target, None, sj.method("autoregressive"), {})
    running = Scheduler(engine, 2, SAMPLING, LIMITS)
    requests = [a_request(3, 2 + number, number) for number in range(3)]  # the last one joins
    decoded(running, *requests)
    last = weakref.ref(jax.tree.leaves(getattr(running, part).state.cache)[0])
    was_free = []

    def noting(function):
        return lambda *args, **named: was_free.append(last() is None) or function(*args, **named)

    if part == "_runner":
        monkeypatch.setattr(loop, "start", noting(loop.start))
    else:
        begin = noting(loop.begin_prefill(engine.method, False))
        monkeypatch.setattr(loop, "begin_prefill", lambda *_: begin)
    decoded(running, *[a_request(3, 2, number) for number in range(3)])
    assert was_free == [True]


def test_kept_prompts_have_no_counts_of_tokens(target):
    """They have an entry per token of the vocabulary, and each request has its own."""
    engine = make_engine(target, None, sj.method("autoregressive"), {})
    prefill = Prefill(engine, sj.Sampling(), 128, False, prefixes=1)
    first = a_request(40, 4, 0)
    first = dataclasses.replace(first, sampling=sj.Sampling(presence_penalty=1.0))
    prefill.begin([first])
    while not prefill.done:
        prefill.run_chunk()
    kept, _ = prefill.prefix_cache.lookup([first.tokens])
    assert kept.counts is None and prefill.state.counts is not None
    tokens = np.append(first.tokens, first.tokens[:20])
    prefill.begin([dataclasses.replace(first, tokens=tokens)])
    assert prefill.cached == 39 and prefill.state.counts is not None


def test_slots_are_filled_in_place(target):
    engine = make_engine(target, None, sj.method("autoregressive"), {})
    inputs, keys = engine.inputs(SAMPLING, 3), jax.random.split(jax.random.key(0), 3)
    prompts, budget = [np.array(p) for p in PROMPTS[:3]], np.full(3, 4, np.int32)
    state = loop.start(engine.method, inputs, prompts, budget, keys, chunk=16)
    one = engine.inputs(SAMPLING, 1)
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, :9] = PROMPTS[3]
    begin = loop.begin_prefill(engine.method, False)
    request = begin(one, tokens, np.array([9]), np.array([12]), keys[:1], None)
    prefilled = loop.prefill_chunks(engine.method, 16)(one, request, np.array([0]))
    filled = loop.fill_slots(engine.method)(one, state, prefilled, np.array([1]))
    assert all(buffer.is_deleted() for buffer in state.cache.k + request.cache.k)
    # Another sample of the prompt may need the prefilled state, so it is not donated.
    assert not any(buffer.is_deleted() for buffer in prefilled.cache.k)
    assert np.asarray(filled.length).tolist() == [3, 9, 1]
    np.testing.assert_array_equal(filled.cache.k[0][1], prefilled.cache.k[0][0])
    compiled = loop.fill_slots(engine.method).lower(one, filled, prefilled, np.array([1])).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes > 0.99 * sum(
        x.nbytes for x in jax.tree.leaves(filled.replace(keys=()))
    )


def test_occupancy_of_a_job_by_hand(target):
    """One request takes six rounds, eight take one round each, in the two other batch slots.

    After four rounds the eight are done: the one runs alone for two.
    """
    budgets = [1, 1, 6, 1, 1, 1, 1, 1, 1]
    out = sj.generate(target, PROMPTS, max_new_tokens=budgets, batch_size=3)
    assert out.occupancy == 14 / 18 and out.passes == 6


def test_a_long_prompt_is_prefilled_in_chunks_between_rounds(target, monkeypatch):
    """If every round is polled, at most one chunk runs between two rounds of running requests.

    If polls come only when a request ends, a prompt's chunks follow each other.
    """
    events = []

    def spy(name):
        real = getattr(loop, name)

        def make_recorded(*static_arguments):
            program = real(*static_arguments)

            def run(*arguments):
                events.append(name)
                return program(*arguments)

            return run

        monkeypatch.setattr(loop, name, make_recorded)

    spy("prefill_chunks")
    spy("run_rounds")
    long = RNG.integers(0, 97, 140).tolist()
    prompts, budgets = [*PROMPTS[:3], long], [60, 55, 58, 2]
    for rounds, between in ((1, ["run_rounds"]), (100, [])):
        events.clear()
        kw = {"max_new_tokens": budgets, "batch_size": 3, "rounds_per_piece": rounds}
        *_, last = sj.stream(target, prompts, **kw)
        np.testing.assert_array_equal(last.generation.lengths, budgets)
        first, end = (
            events.index("prefill_chunks"),
            len(events) - events[::-1].index("prefill_chunks"),
        )
        assert events[first:end] == ["prefill_chunks", *between, "prefill_chunks"]


@pytest.mark.parametrize(
    ("lengths", "size", "together"),
    [
        ((300, 20, 20, 20), 4, (1, 2, 3)),  # all four would run to the end of the long one
        ((20, 300, 20, 290), 4, ()),  # two slots would be prefilled for nothing
        ((300, 290, 280, 300), 4, (0, 1, 2, 3)),
        ((20, 20, 20, 20), 4, (0, 1, 2, 3)),
        ((20,), 4, ()),
    ],
)
def test_prompts_of_unequal_lengths_are_prefilled_apart(target, lengths, size, together):
    prompts = [RNG.integers(0, 97, n).tolist() for n in lengths]
    engine = make_engine(target, None, sj.method("autoregressive"), {})
    rows = make_rows(target, prompts, [{}] * len(prompts), None, 0, 1, [4] * len(prompts))
    bounds = scheduler.Bounds.of(rows)
    work = scheduler.Scheduler(engine, size, sj.Sampling(), bounds)
    started = []
    work._start_batch = started.extend
    work._prefill_waiting = lambda budget: None
    work._source = iter(rows)
    work._admit()
    apart = [number for number in range(len(lengths)) if number not in together]
    for requests, numbers in ((started, together), (work._waiting, apart)):
        assert [list(r.tokens) for r in requests] == [prompts[n] for n in numbers]


@pytest.mark.parametrize(("pass_width", "size", "apart"), [(8, 4, True), (8, 64, False)])
def test_a_prompt_is_prefilled_alone_where_bits_must_not_depend_on_others(
    target, pass_width, size, apart
):
    """Otherwise a batch that ends at the same time would be prefilled in passes of other shapes.

    With many rows passes are not padded, and nothing is promised.
    """
    wide = dataclasses.replace(target, pass_width=pass_width)
    engine = make_engine(wide, None, sj.method("autoregressive"), {})
    rows = make_rows(wide, [[1, 2, 3]] * size, [{}] * size, None, 0, 1, [4] * size)
    work = scheduler.Scheduler(engine, size, sj.Sampling(), scheduler.Bounds.of(rows))
    started = []
    work._start_batch = lambda requests: started.append(len(requests))
    work._prefill_waiting = lambda budget: started.append(0)
    work._source = iter(rows)
    work._admit()
    assert started == [0 if apart else size]


def test_tokens_do_not_depend_on_how_a_mixed_batch_is_prefilled(target):
    prompts = [RNG.integers(0, 97, n).tolist() for n in (200, 5, 7, 9)]
    together = sj.generate(target, prompts, max_new_tokens=12, batch_size=4)
    for number, prompt in enumerate(prompts):
        alone = sj.generate(target, [prompt], max_new_tokens=12)
        np.testing.assert_array_equal(together.tokens[number], alone.tokens[0])


def test_samples_of_a_prompt_share_its_prefill(target):
    prompt = PROMPTS[-1]
    shared, separate = (
        sj.generate(
            target,
            [prompt],
            num_samples=5,
            batch_size=3,
            max_new_tokens=9,
            sampling=SAMPLING,
            prefixes=prefixes,
        )
        for prefixes in (2, 0)
    )
    assert shared.cached_tokens == [0, 39, 39, 39, 39] and separate.cached_tokens[0] == 0
    for a, b in zip(shared.tokens, separate.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len({tuple(row) for row in shared.tokens}) > 1


def test_prompts_with_a_common_prefix_share_its_cache(target, draft, monkeypatch):
    """Tokens equal those without a prefix cache. Sharing one token too many would change them."""
    prompts = [PROMPTS[-1][:30] + tail for tail in PROMPTS[:8]]
    kw = {"prompts": prompts, "max_new_tokens": 12, "batch_size": 3}
    shared, separate = (run(target, draft, "speculative", prefixes=n, **kw) for n in (1, 0))
    for a, b in zip(shared.tokens, separate.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert sorted(shared.cached_tokens)[:2] == [0, 30] and max(shared.cached_tokens) == 30
    assert max(separate.cached_tokens) == 0
    monkeypatch.setattr(
        prefix_cache, "common_prefix", lambda a, b: 31 if common_prefix(a, b) else 0
    )
    wrong = run(target, draft, "speculative", prefixes=1, **kw)
    assert any((a != b).any() for a, b in zip(wrong.tokens, separate.tokens, strict=True))


def test_a_prompt_that_extends_a_cached_one_prefills_the_last_token_of_that(target):
    """A prompt's last token is in no cache. Here the prefill chunk ends right before it."""
    first = RNG.integers(0, 97, 17).tolist()
    kw = {"max_new_tokens": [20, 6], "batch_size": 2, "logprobs": True}
    prompts = [first, [*first, 5]]
    shared, separate = (sj.generate(target, prompts, prefixes=n, **kw) for n in (1, 0))
    assert shared.cached_tokens == [0, 16] and separate.cached_tokens == [0, 0]
    for a, b in zip(shared.logprobs, separate.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_prefix_cache_drops_the_least_recently_used_entry():
    a, b, c = (np.full(40, token) for token in (1, 2, 3))
    store, none = PrefixCache(2), np.zeros(1, np.int32)
    for name, prompt in (("a", a), ("b", b)):
        store.insert([prompt], none, name)
    assert store.lookup([a])[0] == "a"  # b is now the least recently used
    store.insert([c], none, "c")
    assert len(store) == 2 and store.lookup([b])[0] is None
    assert store.lookup([a]) == ("a", [39]) and store.lookup([np.append(a, 5)]) == ("a", [39])
    store.insert([np.append(a, 5)], np.array([40]), "hardly new")
    assert len(store) == 2 and store.lookup([c])[0] == "c"
    empty = PrefixCache(0)
    empty.insert([a], none, "a")
    assert len(empty) == 0


def test_the_common_prefix_of_prompts():
    a = np.arange(50)
    assert (
        common_prefix(a, a) == 49
        and common_prefix(a, a[:30]) == 29
        and common_prefix(a[:30], a) == 29
    )
    assert common_prefix(a, np.append(a[:MIN_PREFIX], [0, 0])) == MIN_PREFIX
    assert common_prefix(a, np.append(a[: MIN_PREFIX - 1], [0, 0])) == 0
    fresh, kept = PrefixCache(1), PrefixCache(1)
    kept.insert([a], np.zeros(1, np.int32), "a")
    assert (
        fresh.saves_a_third([a, a])
        and not fresh.saves_a_third([a])
        and not fresh.saves_a_third([a, a + 1])
    )
    assert kept.saves_a_third([a]) and not PrefixCache(0).saves_a_third([a, a])


def test_requests_may_come_late(target):
    """While the source has no request for now, the running ones go on."""
    engine = make_engine(target, None, sj.method("autoregressive"), {})
    key = jax.random.key(0)
    rows = [Request(np.array(PROMPTS[i], np.int32), 6, key, request_id=i) for i in (0, 1, 3)]
    seen = []

    def requests():
        yield rows[0]
        yield None
        while len(seen) < 2:  # rounds of the first row
            yield None
        yield from rows[1:]

    running = scheduler.Scheduler(engine, 3, sj.Sampling(), scheduler.Bounds.of(rows))
    for piece in running.run(requests(), rounds=1):
        seen.append(piece)
    ends = [piece.index for piece in seen if piece.row]
    assert ends == [0, 1, 3]
    want = sj.generate(target, [PROMPTS[i] for i in ends], max_new_tokens=6)
    for tokens, index in zip(want.tokens, ends, strict=True):
        own = np.concatenate([piece.tokens for piece in seen if piece.index == index])
        np.testing.assert_array_equal(tokens, own)


def test_requests_may_have_their_own_sampling(target, draft):
    """Greedy and sampled requests in one scheduler; each decodes as if alone."""
    engine = make_engine(target, draft, sj.method("speculative"), {})
    samplings = [sj.Sampling(), SAMPLING, sj.Sampling(1.2), sj.Sampling(0.5, top_k=3), None]
    prompts, size = [np.array(p, np.int32) for p in PROMPTS[:5]], 2
    made = make_rows(target, prompts, [{}] * 5, None, 5, 1, BUDGETS[:5])
    rows = [dataclasses.replace(r, sampling=s) for r, s in zip(made, samplings, strict=True)]
    bounds = scheduler.Bounds.of(rows)
    running = scheduler.Scheduler(engine, size, sj.Sampling(0.7), bounds, logprobs=True, prefixes=2)
    pieces = list(running.run(rows, rounds=1))
    for i, sampling in enumerate(samplings):
        alone = sj.generate(
            target,
            prompts[i],
            method="speculative",
            draft=draft,
            sampling=sampling or sj.Sampling(0.7),
            max_new_tokens=BUDGETS[i],
            seed=5,
            indices=[i],
            logprobs=True,
        )
        mine = [piece for piece in pieces if piece.index == i]
        np.testing.assert_array_equal(mine[-1].row.tokens[0], alone.tokens[0])
        logprobs = np.concatenate([piece.logprobs for piece in mine])
        np.testing.assert_allclose(logprobs, alone.logprobs[0], atol=1e-4)


def test_samples_of_a_prompt_with_another_sampling_are_no_repeats():
    row = Request(np.arange(3), 5, jax.random.key(0))
    other = dataclasses.replace(row, sampling=sj.Sampling(0.5))
    assert row.differs_only_in_key(dataclasses.replace(row, key=jax.random.key(1)))
    assert not row.differs_only_in_key(other) and other.differs_only_in_key(
        dataclasses.replace(other, request_id=3)
    )


def test_dropped_requests_free_their_slots(target):
    """The next requests take the slots, and the tokens of the others do not change."""
    engine = make_engine(target, None, sj.method("autoregressive"), {})
    budgets = [30, 12, 25, 9, 40, 7]
    prompts = [np.array(prompt, np.int32) for prompt in PROMPTS[:6]]
    rows = make_rows(target, prompts, [{}] * 6, None, 0, 1, budgets)
    running = scheduler.Scheduler(engine, 2, sj.Sampling(), scheduler.Bounds.of(rows), prefixes=1)
    dropped, ended, polls = {0, 2, 4}, {}, []
    for pieces in running.polls(iter(rows), rounds=1):
        polls.append({piece.index for piece in pieces})
        ended |= {piece.index: piece.row for piece in pieces if piece.row}
        seen = set().union(*polls) & dropped
        running.drop(seen if len(polls) > 2 else ())
    assert sorted(ended) == [1, 3, 5]
    assert not any(0 in indices for indices in polls[3:])
    # The others are dropped after their first poll.
    assert [sum(i in indices for indices in polls) for i in (2, 4)] == [1, 1]
    want = sj.generate(target, PROMPTS[:6], max_new_tokens=budgets)
    for i, row in ended.items():
        np.testing.assert_array_equal(row.tokens[0], want.tokens[i])


def test_budgets_are_one_per_prompt(target):
    with pytest.raises(OptionError, match="2 max_new_tokens for 3 prompts"):
        sj.generate(target, PROMPTS[:3], max_new_tokens=[1, 2])
    with pytest.raises(OptionError, match="max_new_tokens"):
        sj.generate(target, PROMPTS[:2], max_new_tokens=[1, 0])


def test_a_reused_slot_keeps_nothing_of_its_last_request(target):
    """Every array is overwritten or never read. Stale cache positions may hold any finite value."""
    engine = make_engine(target, None, sj.method("autoregressive"), {})
    inputs, keys = engine.inputs(sj.Sampling(), 1), jax.random.split(jax.random.key(0), 1)
    start = loop.begin_prefill(engine.method, False)
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, :9] = PROMPTS[3]
    ends = np.array([20], np.int32)
    request = start(inputs, tokens, np.array([9], np.int32), ends, keys, None)
    request = loop.prefill_chunks(engine.method, 16)(inputs, request, np.array([0]))
    outputs = []
    for stale in (0.0, 1e3):
        empty = loop.empty_state(engine.method, False)(inputs, np.zeros((1, 128), np.int32), keys)
        empty = empty.replace(cache=jax.tree.map(lambda x: jnp.full_like(x, stale), empty.cache))
        filled = loop.fill_slots(engine.method)(inputs, empty, request, np.array([0]))
        outputs.append(np.asarray(loop.advance(engine.method, inputs, filled, 99).tokens[:, :20]))
    np.testing.assert_array_equal(*outputs)
