"""Long lists of integers come out of a JSON body as they are in it, and cost what they are worth."""

import json
import random
import tracemalloc

import pytest

from services.common.contract.errors import InvalidRequest
from services.gateway.edge.http.codec.long_lists import LongLists
from services.gateway.edge.http.sampling import sample_request

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
    body = sample_body(",".join([token] * count))
    tracemalloc.start()
    try:
        request = sample_request(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert list(request.prompt.shape) == [count]
    assert request.prompt.data == int(token).to_bytes(4, "little") * count
    # As parsed, joined and serialized, each 4 bytes a token. Objects took 28 and 8 more.
    assert peak < 4 * 4 * count + len(body) // 2 + MIB // 2


def test_a_list_where_none_belongs_is_refused() -> None:
    body = sample_body("1").replace(b'"s:sample:1"', json.dumps([1] * 400).encode())
    with pytest.raises(InvalidRequest, match="none belongs"):
        sample_request(body)
