"""Long lists of integers come out of a JSON body as they are in it, and cost what they are worth."""

import json
import random
from array import array
from typing import Any

import msgspec
import pytest

from services.common.contract.errors import InvalidRequest
from services.gateway.access.limits import Limits
from services.gateway.edge.http.codec import long_lists
from services.gateway.edge.http.codec.long_lists import LongLists, widened
from services.gateway.edge.http.sampling import sample_request
from tests.peak_memory import peak_bytes

MIB = 1024 * 1024


def found(body: bytes) -> object:
    """The body as it is read, every string that stands for a list replaced by the list."""
    lists = LongLists(body)

    def put_back(value: object) -> object:
        if isinstance(value, str) and lists.is_mark(value):
            return lists.take(value).tolist()
        if isinstance(value, dict):
            return {key: put_back(each) for key, each in value.items()}
        return [put_back(each) for each in value] if isinstance(value, list) else value

    whole = put_back(json.loads(lists.rest))
    lists.check_all_taken()
    return whole


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\n ", " : ")])
@pytest.mark.parametrize("seed", range(10))
def test_a_body_says_the_same_with_its_long_lists_taken_out(seed: int, separators: tuple[str, str]) -> None:
    rng = random.Random(seed)
    widths = [1, 100, 250, 300, 20_000]
    body = {
        f"field {number}": rng.choice(
            [
                [rng.randrange(-9, 10 ** rng.randrange(1, 7)) for _ in range(rng.choice(widths))],
                [0] * rng.choice(widths),
                [-(2**63), 2**63 - 1] * 200,
                "text [1, 2, 3]",
                [],
                {"inner": [[1] * 700, [2] * 3, "x" * 600, [3] * 700]},
            ]
        )
        for number in range(8)
    }
    assert found(json.dumps(body, separators=separators).encode()) == body


def test_long_lists_leave_little_of_a_body() -> None:
    body = json.dumps({"chunks": [{"tokens": list(range(10_000))} for _ in range(50)]}).encode()
    assert len(LongLists(body).rest) < 5_000 < len(body)


@pytest.mark.parametrize(
    "inside",
    [
        "1," * 400,
        "," + "1," * 400 + "1",
        "1," * 400 + ",1",
        "1 " * 400,
        "1-" * 400 + "1",
        "01," * 400 + "1",
        "-," * 400,
    ],
)
def test_a_long_list_that_is_no_json_cannot_be_read(inside: str) -> None:
    for times in (1, 100):
        with pytest.raises(InvalidRequest):
            found(f'{{"tokens": [{inside * times}]}}'.encode())


@pytest.mark.parametrize(
    "body",
    ["[" + "1," * 9000, "1," * 9000 + "]", "]" * 9000, " " * 9000, "[" + "1" * 99_999 + "]"],
)
def test_what_is_no_body_at_all_is_not_taken_for_one(body: str) -> None:
    with pytest.raises((InvalidRequest, ValueError)):
        found(body.encode())


def test_an_integer_beyond_64_bits_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="64-bit"):
        LongLists(json.dumps({"tokens": [1] * 400 + [2**63]}).encode())


def test_a_text_is_no_list_and_names_none() -> None:
    lists = LongLists(json.dumps({"tokens": [1] * 400}).encode())
    for text in ("0", "", ":0", "tokens"):
        with pytest.raises(InvalidRequest):
            lists.take(text)
    with pytest.raises(InvalidRequest, match="none belongs"):
        lists.check_all_taken()


def test_a_body_of_many_short_lists_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(InvalidRequest, match="fewer and longer chunks"):
        LongLists(b"[" + b"[1]," * MIB + b"[1]]")


def sample_body(tokens: str) -> bytes:
    return (
        f'{{"prompt":{{"chunks":[{{"type":"encoded_text","tokens":[{tokens}]}}]}},'
        '"sampling_params":{},"seq_id":1,"sampling_session_id":"s:sample:1"}'
    ).encode()


@pytest.mark.parametrize("token", ["1", "257", "100000"])
def test_reading_a_sample_takes_memory_in_proportion_to_its_body(token: str) -> None:
    count = MIB // 4 // (len(token) + 1)
    peak = peak_bytes(
        f"""
from services.gateway.access.limits import Limits
from services.gateway.edge.http.sampling import sample_request
from tests.peak_memory import peak_bytes
from {__name__} import sample_body
body = sample_body(",".join(["{token}"] * {count}))
sample_request(sample_body("1"), Limits())
""",
        "request = sample_request(body, Limits())",
        f"""
assert list(request.prompt.shape) == [{count}]
assert request.prompt.data == int("{token}").to_bytes(4, "little") * {count}
""",
    )
    # As parsed, joined and serialized, each 4 bytes a token. Objects took 28 and 8 more.
    assert peak < 4 * 4 * count + (len(token) + 1) * count // 2 + MIB // 2


def test_a_list_where_none_belongs_is_refused() -> None:
    body = sample_body("1").replace(b'"s:sample:1"', json.dumps([1] * 400).encode())
    with pytest.raises(InvalidRequest, match="none belongs"):
        sample_request(body, Limits())


class Steps:
    """How many integers, or bytes of JSON, each call of the interpreter's own code is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.integers: list[int] = []
        self.parsed: list[int] = []
        steps, decode = self, msgspec.json.decode

        class Counted(array):  # type: ignore[type-arg]
            def __new__(cls, code: str, given: Any = ()) -> Any:
                steps.integers.append(len(given))
                return super().__new__(cls, code, given)

        def counted(body: bytes, **options: Any) -> Any:
            steps.parsed.append(len(body))
            return decode(body, **options)

        monkeypatch.setattr(long_lists, "array", Counted)
        monkeypatch.setattr(long_lists.msgspec.json, "decode", counted)


@pytest.mark.parametrize("last", [0, 2**40], ids=["32 bits", "64 bits, told at the end"])
def test_no_step_of_reading_a_long_list_is_long(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter changes threads between calls of its own code, never within one."""
    steps = Steps(monkeypatch)
    count = 2 * MIB
    lists = LongLists(b"[" + b"1," * (count - 1) + b"%d]" % last)
    assert lists.nbytes == count * (8 if last else 4)
    assert max(steps.parsed) <= 33_000
    assert max(steps.integers) <= 2**16
    assert len(steps.integers) >= count / 2**16


def test_integers_are_the_same_in_8_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    values = array("i", [-(2**31), 0, 2**31 - 1] * 100_000)
    steps = Steps(monkeypatch)
    wide = widened(values)
    assert (wide.typecode, wide.tolist()) == ("q", values.tolist())
    assert max(steps.integers) <= 2**16


@pytest.mark.parametrize(
    ("tokens", "stop", "said"),
    [("1," * 2**22 + "1", "[]", "more than 4194304 tokens"), ("1", "[%s1]" % ("1," * 4096), "at most 4096")],
)
def test_lists_that_nothing_can_use_are_refused_before_they_are_copied(
    tokens: str, stop: str, said: str
) -> None:
    body = sample_body(tokens).replace(
        b'"sampling_params":{}', b'"sampling_params":{"stop":%s}' % stop.encode()
    )
    with pytest.raises(InvalidRequest, match=said):
        sample_request(body, Limits())
