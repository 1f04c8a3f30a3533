"""forward_backward bodies, made by the SDK's own encoder."""

import numpy as np
import pytest
import tinker
import torch
import zstandard
from tinker.proto import request_conv, tinker_public_pb2
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest
from tinker.types.tensor_data import TensorData

from services.common.contract.errors import InvalidRequest, TooLarge
from services.gateway.access.limits import Limits
from services.gateway.edge.http import body
from services.gateway.edge.http.codec import forward_backward_in
from tests.peak_memory import peak_bytes
from tinsmith.internal.v1 import tinker_pb2
from tinsmith.v1 import training_pb2, types_pb2

MIB = 1024 * 1024
LIMITS = Limits(inflated_body_bytes=MIB)
VOCAB = 100


def datum(tokens: list[list[int]], **inputs: torch.Tensor) -> tinker.Datum:
    chunks = [tinker.EncodedTextChunk(tokens=part) for part in tokens]
    return tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def sdk_message(data: list[tinker.Datum], config: dict[str, float | str] | None = None):
    return request_conv.forward_backward_request_to_proto(
        ForwardBackwardRequest(
            forward_backward_input=ForwardBackwardInput(
                data=data, loss_fn="cross_entropy", loss_fn_config=config
            ),
            model_id="s:train:0",
            seq_id=7,
        )
    )


def decoded(message, limits: Limits = LIMITS) -> training_pb2.ForwardBackward:
    """What the edge makes of a message, in its order."""
    parsed = forward_backward_in.parse_request(message.SerializeToString(), limits)
    forward_backward_in.sparse_bytes(parsed, limits)
    return forward_backward_in.forward_backward(parsed, VOCAB)


def ids(tensor: types_pb2.Tensor, dtype: str) -> list:
    return np.frombuffer(tensor.data, dtype).reshape(list(tensor.shape)).tolist()


def simple() -> tinker.Datum:
    return datum([[1, 2, 3]], target_tokens=torch.tensor([2, 3, 4]), weights=torch.tensor([0.0, 1.0, -0.5]))


@pytest.mark.parametrize(
    "ours",
    [
        tinker_pb2.TinkerForwardBackwardRequest,
        tinker_pb2.TinkerDatum,
        tinker_pb2.TinkerChunk,
        tinker_pb2.TinkerTensor,
        tinker_pb2.TinkerSparseCsr,
        tinker_pb2.TinkerForwardBackwardOutput,
        tinker_pb2.TinkerArrayRecord,
        tinker_pb2.TinkerBatchedTensor,
        tinker_pb2.TinkerSampleResponse,
        tinker_pb2.TinkerSampledSequence,
        tinker_pb2.TinkerTopkLogprobs,
    ],
)
def test_fields_are_numbered_as_in_the_sdk(ours: type) -> None:
    theirs = getattr(tinker_public_pb2, ours.DESCRIPTOR.name.removeprefix("Tinker")).DESCRIPTOR
    for field in ours.DESCRIPTOR.fields:
        match = theirs.fields_by_number[field.number]
        assert (match.name, match.type, match.is_repeated) == (field.name, field.type, field.is_repeated)


def test_a_batch_arrives_as_the_sdk_made_it() -> None:
    message = sdk_message([simple(), datum([[9]], target_tokens=torch.tensor([5]))])
    message.forward_only = True
    operation = decoded(message)
    assert operation.loss_fn == "cross_entropy"
    assert operation.forward_only
    assert ids(operation.data[0].tokens, "<i4") == [1, 2, 3]
    assert ids(operation.data[0].loss_inputs["target_tokens"], "<i8") == [2, 3, 4]
    assert ids(operation.data[0].loss_inputs["weights"], "<f4") == [0.0, 1.0, -0.5]
    assert operation.data[0].loss_inputs["weights"].dtype == types_pb2.DATA_TYPE_FLOAT32
    assert ids(operation.data[1].tokens, "<i4") == [9]


def test_text_chunks_are_joined() -> None:
    operation = decoded(sdk_message([datum([[1, 2], [], [3]], target_tokens=torch.tensor([2, 3, 4]))]))
    assert ids(operation.data[0].tokens, "<i4") == [1, 2, 3]


def test_a_tensor_the_sdk_made_sparse_becomes_dense_again() -> None:
    weights = torch.zeros(8, 16)
    weights[2, 3], weights[7, 15] = 0.25, -1.0
    message = sdk_message([datum([list(range(8))], weights=weights)])
    assert message.data[0].loss_fn_inputs["weights"].HasField("sparse_csr")
    tensor = decoded(message).data[0].loss_inputs["weights"]
    assert ids(tensor, "<f4") == weights.tolist()


def test_a_tensor_without_a_shape_is_one_dimensional() -> None:
    given = TensorData(data=[1, 2, 3], dtype="int64")
    message = sdk_message([simple()])
    message.data[0].loss_fn_inputs["target_tokens"].CopyFrom(request_conv._tensor_data_to_proto(given))
    message.data[0].loss_fn_inputs["target_tokens"].ClearField("shape")
    assert list(decoded(message).data[0].loss_inputs["target_tokens"].shape) == [3]


def test_numeric_settings_come_from_either_map() -> None:
    message = sdk_message([simple()], {"clip": 0.5})
    assert dict(decoded(message).loss_config) == {"clip": 0.5}
    message.ClearField("loss_fn_config_v2")
    assert dict(decoded(message).loss_config) == {"clip": 0.5}


def test_a_text_setting_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="loss_id"):
        decoded(sdk_message([simple()], {"loss_id": "abc"}))


def test_an_image_is_refused() -> None:
    image = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=3)
    given = tinker.Datum(model_input=tinker.ModelInput(chunks=[image]), loss_fn_inputs={})
    with pytest.raises(InvalidRequest, match="images"):
        decoded(sdk_message([given]))


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    message = sdk_message([simple()])
    message.data[0].loss_fn_inputs["weights"].shape[:] = [4]
    with pytest.raises(InvalidRequest, match=r"data\[0\].weights"):
        decoded(message)


def test_torn_token_bytes_are_refused() -> None:
    message = sdk_message([simple()])
    message.data[0].model_input[0].encoded_text.tokens = b"\1\0\0"
    with pytest.raises(InvalidRequest, match="multiple of 4"):
        decoded(message)


def with_sparse_weights(rows: int, columns: int, crow: list[int], col: list[int], tokens: int):
    """A message of one datum with so many tokens, whose weights have these rows and columns."""
    message = sdk_message([datum([[1] * tokens], weights=torch.zeros(tokens))])
    tensor = message.data[0].loss_fn_inputs["weights"]
    tensor.shape[:] = [rows, columns]
    tensor.sparse_csr.values = np.ones(len(col), "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.array(crow, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(col, "<i8").tobytes()
    return message


@pytest.mark.parametrize(
    ("crow", "col"), [([0, 1], [0]), ([0, 1, 1], [2]), ([0, 1, 0], [0]), ([1, 1, 1], [0]), ([0, 1, 1], [-1])]
)
def test_sparse_indices_outside_the_shape_are_refused(crow: list[int], col: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="indices"):
        decoded(with_sparse_weights(2, 2, crow, col, tokens=2))


def test_a_sparse_tensor_has_a_row_for_each_token() -> None:
    for rows in (2, 4):
        with pytest.raises(InvalidRequest, match=f"{rows} rows but model_input has 3 tokens"):
            decoded(with_sparse_weights(rows, 2, [0] * (rows + 1), [], tokens=3))


def test_a_sparse_tensor_has_no_more_columns_than_there_are_tokens_to_predict() -> None:
    assert len(decoded(with_sparse_weights(1, VOCAB, [0, 0], [], tokens=1)).data) == 1
    with pytest.raises(InvalidRequest, match="send at most 100"):
        decoded(with_sparse_weights(1, VOCAB + 1, [0, 0], [], tokens=1))


@pytest.mark.parametrize(("columns", "error"), [(2**30, TooLarge), (2**40, InvalidRequest)])
def test_a_tiny_sparse_tensor_of_enormous_shape_is_refused_by_its_size(columns: int, error: type) -> None:
    message = with_sparse_weights(1, columns, [0, 0], [], tokens=1)
    with pytest.raises(error):
        forward_backward_in.sparse_bytes(
            forward_backward_in.parse_request(message.SerializeToString(), LIMITS), LIMITS
        )


def test_a_sparse_tensor_that_the_vocabulary_cannot_have_is_not_allocated() -> None:
    peak = peak_bytes(
        f"""
import pytest
from services.common.contract.errors import InvalidRequest
from services.gateway.access.limits import Limits
from {__name__} import decoded, with_sparse_weights
def refuse(columns):
    with pytest.raises(InvalidRequest, match="send at most 100"):
        decoded(with_sparse_weights(1, columns, [0, 0], [], tokens=1), Limits())
refuse(101)
""",
        "refuse(25_000_000)",
    )
    assert peak < MIB


def test_the_bytes_of_sparse_tensors_add_up_before_they_are_dense() -> None:
    message = with_sparse_weights(3, 7, [0] * 4, [], tokens=3)
    message.data[0].loss_fn_inputs["target_tokens"].CopyFrom(message.data[0].loss_fn_inputs["weights"])
    message.data[0].loss_fn_inputs["target_tokens"].dtype = tinker_pb2.TINKER_DATA_TYPE_INT64
    parsed = forward_backward_in.parse_request(message.SerializeToString(), LIMITS)
    assert forward_backward_in.sparse_bytes(parsed, LIMITS) == 3 * 7 * (4 + 8)
    with pytest.raises(TooLarge):
        forward_backward_in.sparse_bytes(parsed, Limits(inflated_body_bytes=3 * 7 * 12 - 1))


def test_a_shape_of_many_dimensions_is_refused_whatever_they_are() -> None:
    for layout in ("dense", "sparse"):
        message = with_sparse_weights(1, 1, [0, 0], [], tokens=1)
        tensor = message.data[0].loss_fn_inputs["weights"]
        if layout == "dense":
            tensor.dense = bytes(4)
        tensor.shape[:] = [2**62] * 400
        with pytest.raises(InvalidRequest, match="400 dimensions"):
            decoded(message)


def test_a_field_of_a_later_protocol_is_refused_and_not_ignored() -> None:
    data = sdk_message([simple()]).SerializeToString() + bytes([0xFA, 0x06, 0x01, 0x41])  # field 111, "A"
    with pytest.raises(InvalidRequest, match="111"):
        forward_backward_in.parse_request(data, LIMITS)


def test_spans_that_tile_the_datum_are_taken_with_any_loss() -> None:
    spans = [
        tinker.types.PromptProvenanceSpan(sequence_id="q", length=2),
        tinker.types.SampledProvenanceSpan(sequence_id="q", length=1),
    ]
    given = simple().with_provenance(model_input=spans, loss_fn_inputs=spans)
    assert len(decoded(sdk_message([given])).data) == 1
    message = sdk_message([given])
    message.data[0].model_input_spans[0].prompt_tokens.length = 5
    with pytest.raises(InvalidRequest, match="model_input_spans"):
        decoded(message)


def test_bytes_that_are_no_protobuf_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        forward_backward_in.parse_request(b"\xff\xff\xff", LIMITS)


def test_a_zstd_body_is_inflated_to_what_it_announces() -> None:
    raw = b"tokens" * 1000
    packed = zstandard.compress(raw)
    size = body.inflated_size(packed, "zstd", MIB)
    assert size == len(raw)
    assert body.inflate(packed, size) == raw


def test_a_zstd_bomb_is_refused_by_its_announced_size() -> None:
    packed = zstandard.compress(bytes(64 * MIB))
    assert len(packed) < 10_000
    with pytest.raises(TooLarge):
        body.inflated_size(packed, "zstd", MIB)


def test_a_zstd_frame_without_a_size_is_refused() -> None:
    packer = zstandard.ZstdCompressor(write_content_size=False)
    with pytest.raises(InvalidRequest, match="size"):
        body.inflated_size(packer.compress(b"abc" * 100), "zstd", MIB)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-3], lambda data: data + b"more", lambda data: b"zstd"]
)
def test_a_damaged_zstd_body_is_refused(damage) -> None:
    packed = damage(zstandard.compress(bytes(range(256)) * 10))
    with pytest.raises(InvalidRequest):
        body.inflate(packed, body.inflated_size(packed, "zstd", MIB))


def test_a_field_that_this_service_does_not_know_is_refused_wherever_it_is() -> None:
    unknown = b"\xf8\x07\x01"  # Field 127, the number 1.
    for place in ("request", "datum", "chunk", "text", "tensor"):
        message = tinker_pb2.TinkerForwardBackwardRequest(model_id="s:train:0", seq_id=1)
        datum = message.data.add()
        chunk = datum.model_input.add()
        chunk.encoded_text.tokens = bytes(4)
        tensor = datum.loss_fn_inputs["weights"]
        tensor.dense, tensor.dtype = bytes(4), tinker_pb2.TINKER_DATA_TYPE_FLOAT32
        decoded(message)
        places = {
            "request": message,
            "datum": datum,
            "chunk": chunk,
            "text": chunk.encoded_text,
            "tensor": tensor,
        }
        places[place].MergeFromString(unknown)
        with pytest.raises(InvalidRequest, match="127"):
            decoded(message)


def test_an_encoding_other_than_zstd_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="gzip"):
        body.inflated_size(b"", "gzip", MIB)
