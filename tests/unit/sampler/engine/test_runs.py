"""Which sequences are in the engine: what is asked of one looks at no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.sampler.engine.runs import Run, Runs

LATE_AT = 5.0


class Counted(dict[str, Any]):
    """A mapping that counts what is read of it."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += 1
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.reads += 1
        return super().__getitem__(key)

    def values(self) -> Any:
        self.reads += len(self)
        return super().values()


class Processor:
    """What vLLM's output processor keeps: its own ids end in something that it adds."""

    def __init__(self) -> None:
        self.request_states: Counted = Counted()
        self.external_req_ids: Counted = Counted()

    def take_on(self, name: str, tokens: int) -> None:
        detokenizer = SimpleNamespace(num_output_tokens=lambda: tokens)
        state = SimpleNamespace(is_prefilling=not tokens, detokenizer=detokenizer)
        self.request_states[f"{name}-x"] = state
        self.external_req_ids[name] = [f"{name}-x"]

    def reads(self) -> int:
        done = self.request_states.reads + self.external_req_ids.reads
        self.request_states.reads = self.external_req_ids.reads = 0
        return done


def filled(count: int, tokens: int = 7) -> tuple[Runs, Processor]:
    """An engine with so many sequences, of requests "0", "1" and so on, that have so many tokens."""
    processor = Processor()
    runs = Runs(processor)
    for number in range(count):
        enter(runs, processor, str(number), [f"{number}-0"], tokens)
    return runs, processor


def enter(runs: Runs, processor: Processor, request: str, names: list[str], tokens: int) -> Run:
    run = runs.begin(request)
    for name in names:
        runs.enter(run, name, now=0.0)
        processor.take_on(name, tokens)
    return run


def test_what_has_begun_and_how_far_it_is_are_those_of_the_request() -> None:
    runs, processor = filled(3)
    run = enter(runs, processor, "mine", ["a", "b"], 2)
    processor.take_on("b", 0)
    assert runs.begun(run) == ["a"]
    assert (runs.tokens_of("mine"), runs.tokens_of("1"), runs.tokens_of("nobody's")) == (2, 7, 0)
    runs.leave(run, "a", 2)
    assert runs.begun(run) == []
    runs.end("mine", run)
    assert runs.tokens_of("mine") == 0


def test_a_request_never_has_fewer_tokens_than_it_had_when_one_of_its_sequences_ends() -> None:
    runs, processor = filled(0)
    run = enter(runs, processor, "mine", ["a", "b"], 5)
    assert runs.tokens_of("mine") == 10
    # vLLM has let go of it, and nobody has taken it yet.
    del processor.request_states["a-x"]
    assert runs.tokens_of("mine") == 10
    runs.leave(run, "a", 5)
    assert runs.tokens_of("mine") == 10
    processor.take_on("b", 9)
    assert runs.tokens_of("mine") == 14


def test_a_sequence_that_vllm_has_not_taken_on_or_has_finished_has_not_begun() -> None:
    runs, processor = filled(1)
    run = runs.begin("mine")
    runs.enter(run, "mine-0", now=0.0)
    assert (runs.begun(run), runs.tokens_of("mine"), runs.late(LATE_AT)) == ([], 0, 0)
    # Looking has left nothing behind.
    assert list(processor.external_req_ids) == ["0-0"]


def test_an_interrupted_request_looks_at_its_own_sequences_however_many_run() -> None:
    looked = []
    for others in (10, 1000):
        runs, processor = filled(others)
        run = enter(runs, processor, "mine", ["a", "b"], 2)
        processor.reads()
        assert sorted(runs.begun(run)) == ["a", "b"]
        assert runs.tokens_of("mine") == 4
        looked.append(processor.reads())
    assert looked[0] == looked[1] <= 8


def test_late_ones_are_counted_without_looking_again_at_those_that_generate() -> None:
    runs, processor = filled(1000)
    waiting = enter(runs, processor, "mine", ["a", "b"], 0)
    assert runs.late(LATE_AT) == 2
    processor.reads()
    assert runs.late(LATE_AT) == 2
    assert processor.reads() <= 4
    # Those that came later are not late.
    runs.enter(waiting, "c", now=LATE_AT + 1)
    processor.take_on("c", 0)
    processor.take_on("a", 1)
    assert runs.late(LATE_AT) == 1
    runs.leave(waiting, "b", 0)
    assert runs.late(LATE_AT) == 0


def test_of_two_jobs_with_one_id_the_later_one_is_meant() -> None:
    runs, processor = filled(0)
    first = enter(runs, processor, "mine", ["a"], 1)
    second = enter(runs, processor, "mine", ["b"], 2)
    runs.end("mine", first)
    assert (runs.find("mine"), runs.tokens_of("mine")) == (second, 2)
