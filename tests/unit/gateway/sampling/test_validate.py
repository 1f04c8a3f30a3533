"""What is refused of a sample request before it is accepted, and what the refusal says."""

import dataclasses

import pytest

from services.common.contract.errors import InvalidRequest
from services.common.contract.experts.routing import Routing
from services.gateway.access.limits import Limits
from services.gateway.cluster.base_models import BaseModel
from services.gateway.sampling import validate
from tests.unit.gateway.tensors import tensor
from tinsmith.v1 import sampling_pb2, types_pb2

LIMITS = Limits()
MODEL = BaseModel("org/name", "/models/name", "Qwen3ForCausalLM", vocab_size=100, context_length=16)


def sample(**changes: object) -> sampling_pb2.SampleRequest:
    params = sampling_pb2.SamplingParams(
        temperature=1.0, top_k=-1, top_p=1.0, stop=sampling_pb2.StopCondition()
    )
    params.stop.model_eos.SetInParent()
    fields: dict = {"prompt": tensor([1, 2], "<i4"), "num_samples": 1, "params": params}
    for name, value in changes.items():
        if name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name:
            if name == "stop":
                params.stop.CopyFrom(value)
            else:
                setattr(params, name, value)
        else:
            fields[name] = value
    return sampling_pb2.SampleRequest(**fields)


def refused(check, *args: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check(*args)
    return caught.value.message


def strings(*values: str) -> sampling_pb2.StopCondition:
    return sampling_pb2.StopCondition(strings=sampling_pb2.StopCondition.StopStrings(values=values))


def tokens(*ids: int) -> sampling_pb2.StopCondition:
    return sampling_pb2.StopCondition(tokens=sampling_pb2.StopCondition.StopTokens(ids=ids))


@pytest.mark.parametrize(
    "request_",
    [
        sample(),
        sample(temperature=0.0, top_k=5, top_p=0.5, max_tokens=1),
        sample(stop=strings("\n\nUser:")),
        sample(stop=tokens(99)),
        sample(prompt=tensor([0] * 15, "<i4"), num_samples=1024, topk_prompt_logprobs=64),
        sample(temperature=0.01),
        sample(temperature=2.0, top_k=2**31 - 1),
    ],
)
def test_a_good_sample_passes(request_: sampling_pb2.SampleRequest) -> None:
    validate.check_sample(request_, MODEL, LIMITS)


@pytest.mark.parametrize("field", ["prompt", "params"])
def test_what_was_left_out_is_named_and_not_something_in_it(field: str) -> None:
    request = sample()
    request.ClearField(field)
    with pytest.raises(InvalidRequest, match=f"^{field} is not set; ") as caught:
        validate.check_sample(request, MODEL, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize("wrong", [{"dtype": 0}, {"shape": []}, {"shape": [1]}, {"data": b"odd"}])
def test_a_prompt_that_is_no_tensor_of_tokens_is_the_field_at_fault(wrong: dict) -> None:
    whole = tensor([1, 2], "<i4")
    fields = {"dtype": whole.dtype, "shape": whole.shape, "data": whole.data} | wrong
    with pytest.raises(InvalidRequest, match=r"^prompt") as caught:
        validate.check_sample(sample(prompt=types_pb2.Tensor(**fields)), MODEL, LIMITS)
    assert caught.value.field == "prompt"


def test_a_constraint_that_says_nothing_is_refused() -> None:
    empty, regex = sample(), sample()
    empty.params.constraint.SetInParent()
    regex.params.constraint.regex = "[0-9]+"
    assert "set json_schema or regex" in refused(validate.check_sample, empty, MODEL, LIMITS)
    validate.check_sample(regex, MODEL, LIMITS)


@pytest.mark.parametrize("stop", [sampling_pb2.StopCondition(never={}), tokens(7)])
def test_a_constraint_beside_a_stop_condition_that_it_would_break_is_refused(
    stop: sampling_pb2.StopCondition,
) -> None:
    asked = sample(stop=stop)
    validate.check_sample(asked, MODEL, LIMITS)
    asked.params.constraint.regex = "[0-9]+"
    assert "choose model_eos, or strings" in refused(validate.check_sample, asked, MODEL, LIMITS)
    asked.params.stop.CopyFrom(strings("7"))
    validate.check_sample(asked, MODEL, LIMITS)


def test_what_steers_a_sample_is_checked_before_it_is_accepted() -> None:
    biased = sample()
    biased.params.logit_bias.add(token_id=MODEL.vocab_size, bias=1)
    assert "token 100" in refused(validate.check_sample, biased, MODEL, LIMITS)
    assert "min_p" in refused(validate.check_sample, sample(min_p=1.5), MODEL, LIMITS)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 1025}, "num_samples"),
        ({"topk_prompt_logprobs": 65}, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 65}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 1}, "ask for one of them"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 99}, "prompt_logprobs_last_n"),
        ({"target_prompt_logprobs": types_pb2.Matrix(shape=[1, 1])}, "target_prompt_logprobs"),
        ({"prompt": tensor([], "<i4")}, "empty"),
        ({"prompt": tensor([0] * 16, "<i4")}, "shorten"),
        ({"prompt": tensor([1, 100], "<i4")}, "position 1"),
        ({"prompt": tensor([1, -1], "<i4")}, "vocabulary"),
        ({"prompt": tensor([1, 2], "<i8")}, "int32"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 0.009}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"stop": strings("")}, "stop string"),
        ({"stop": strings(*["x"] * 257)}, "256 strings"),
        ({"stop": strings("x" * 1025)}, "1024 characters"),
        ({"stop": tokens(*[1] * 4097)}, "4096 tokens"),
        ({"stop": tokens(100)}, "stop token 100"),
        ({"stop": sampling_pb2.StopCondition()}, "stop is not set"),
        ({"seq_id": -1}, "seq_id"),
        ({"priority": 101}, "priority must be -100 to 100, not 101"),
        ({"priority": -101}, "priority"),
    ],
)
def test_a_sample_that_cannot_be_run_is_refused(changes: dict, says: str) -> None:
    assert says in refused(validate.check_sample, sample(**changes), MODEL, LIMITS)


@pytest.mark.parametrize("length", [1, 64, 65, 5000])
@pytest.mark.parametrize("wrong", [MODEL.vocab_size, -1, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_found_wherever_it_is(length: int, wrong: int) -> None:
    model = dataclasses.replace(MODEL, context_length=length + 1)
    last = model.vocab_size - 1
    validate.check_sample(sample(prompt=tensor([last] * length, "<i4")), model, LIMITS)
    for place in {0, length // 2, length - 1}:
        ids = [last] * length
        ids[place] = wrong
        said = refused(validate.check_sample, sample(prompt=tensor(ids, "<i4")), model, LIMITS)
        assert f"token {wrong} at position {place} " in said


CONTINUE = sampling_pb2.ON_UPDATE_CONTINUE
KEEP_KV = sampling_pb2.ON_UPDATE_CONTINUE_KEEP_KV


def test_a_sample_goes_on_with_newer_weights_when_it_asks_to_and_its_session_follows_its_model() -> None:
    def update(**session: bool) -> validate.OnUpdate:
        on_update = session.pop("on_update", 0)
        return validate.check_on_update(sample(on_update=on_update), **session)

    assert update(inflight=True, constrained=False) == (False, False)
    finish = {"on_update": sampling_pb2.ON_UPDATE_FINISH}
    assert update(**finish, inflight=False, constrained=True) == (False, False)
    assert update(on_update=CONTINUE, inflight=True, constrained=False) == (True, False)
    assert update(on_update=KEEP_KV, inflight=True, constrained=True) == (True, True)


def test_what_looks_back_at_what_was_sampled_goes_on_where_keys_and_values_are_kept() -> None:
    asked = sample(on_update=KEEP_KV, stop=strings("a"), frequency_penalty=1.0, presence_penalty=1.0)
    asked.params.bad_words.append("no")
    assert validate.check_on_update(asked, inflight=True, constrained=True).keeps_kv


@pytest.mark.parametrize(
    ("changes", "inflight", "constrained", "says"),
    [
        ({"on_update": CONTINUE}, False, False, "CONTINUE, but the sampling session answers from one"),
        ({"on_update": KEEP_KV}, False, False, "CONTINUE_KEEP_KV, but the sampling session answers from"),
        ({"on_update": 7}, True, False, "on_update 7 is not one of OnUpdate"),
        ({"on_update": CONTINUE, "stop": strings("a")}, True, False, "stop strings"),
        ({"on_update": CONTINUE, "frequency_penalty": 1.0}, True, False, "frequency_penalty"),
        ({"on_update": CONTINUE}, True, True, "constraint"),
    ],
)
def test_what_cannot_go_on_with_newer_weights_is_refused(
    changes: dict, inflight: bool, constrained: bool, says: str
) -> None:
    assert says in refused(validate.check_on_update, sample(**changes), inflight, constrained)


@pytest.mark.parametrize(
    "on_update", [sampling_pb2.ON_UPDATE_CONTINUE, sampling_pb2.ON_UPDATE_CONTINUE_KEEP_KV]
)
def test_the_room_of_an_answer_holds_a_version_of_every_token_of_a_sample_that_moves(on_update: int) -> None:
    still = validate.check_sample(sample(max_tokens=10), MODEL, LIMITS)
    moving = validate.check_sample(sample(max_tokens=10, on_update=on_update), MODEL, LIMITS)
    spans = sampling_pb2.SampledSequence(
        versions=[
            sampling_pb2.VersionSpan(version=2**62 + each, tokens=1, kv_kept=True) for each in range(10)
        ]
    )
    assert moving - still >= spans.ByteSize()


def test_what_a_request_may_sample_in_all_is_bounded_by_what_its_context_leaves() -> None:
    large = dataclasses.replace(MODEL, context_length=2**15)
    for max_tokens in (2**14, None):
        wanted = sample(num_samples=1024)
        if max_tokens:
            wanted.params.max_tokens = max_tokens
            validate.check_sample(wanted, large, LIMITS)
        else:
            assert "tokens; lower max_tokens" in refused(validate.check_sample, wanted, large, LIMITS)
    # No more than the context leaves is sampled, whatever max_tokens says.
    validate.check_sample(sample(num_samples=1024, max_tokens=2**31 - 1), MODEL, LIMITS)


def test_log_probabilities_are_the_models_own_unless_those_of_what_was_drawn_from_are_asked_for() -> None:
    assert not validate.check_logprobs_of(sample())
    assert not validate.check_logprobs_of(sample(logprobs_of=sampling_pb2.LOGPROBS_OF_MODEL))
    assert validate.check_logprobs_of(sample(logprobs_of=sampling_pb2.LOGPROBS_OF_SAMPLED))
    assert "not one of LogprobsOf" in refused(validate.check_logprobs_of, sample(logprobs_of=3))


ROUTING = Routing(layers=2, top_k=2, experts=8)
ROUTED = dataclasses.replace(MODEL, sampled_routing=ROUTING)


def test_the_room_of_an_answer_holds_the_experts_of_every_token() -> None:
    wanted = sample(num_samples=3, max_tokens=10)
    without = validate.check_sample(wanted, ROUTED, LIMITS)
    wanted.routed_experts = True
    assert validate.check_sample(wanted, ROUTED, LIMITS) - without == ROUTING.nbytes(3 * 12)


def test_experts_that_no_sampler_tells_are_refused() -> None:
    wanted = sample(routed_experts=True)
    with pytest.raises(InvalidRequest, match="no sampler of this model tells") as caught:
        validate.check_sample(wanted, MODEL, LIMITS)
    assert (caught.value.code, caught.value.field) == ("routed_experts_not_supported", "routed_experts")


@pytest.mark.parametrize("full", [False, True])
def test_experts_that_are_told_by_samplers_alone_that_cannot_run_the_weights_are_refused(full: bool) -> None:
    either = dataclasses.replace(ROUTED, tells_of_adapters=not full, tells_of_full_models=full)
    validate.check_told(either, full=full)
    with pytest.raises(InvalidRequest, match="that tell routed_experts run no ") as caught:
        validate.check_told(either, full=not full)
    assert (caught.value.code, caught.value.field) == ("routed_experts_not_supported", "routed_experts")


@pytest.mark.parametrize("on_update", [CONTINUE, KEEP_KV])
def test_experts_are_those_of_one_version_of_the_weights(
    on_update: sampling_pb2.OnUpdate.ValueType,
) -> None:
    wanted = sample(routed_experts=True, on_update=on_update)
    said = refused(validate.check_sample, wanted, ROUTED, LIMITS)
    assert "leave one of them out, or let on_update be FINISH" in said
    # It may have been either.
    assert "on_update is CONTINUE" not in said


def test_more_experts_than_one_message_holds_are_refused() -> None:
    wide = dataclasses.replace(ROUTED, sampled_routing=Routing(64, 8, 256), context_length=2**15)
    wanted = sample(num_samples=8, max_tokens=2**14 - 2, routed_experts=True)
    validate.check_sample(wanted, wide, LIMITS)
    wanted.params.max_tokens += 1
    assert "lower max_tokens or num_samples" in refused(validate.check_sample, wanted, wide, LIMITS)
