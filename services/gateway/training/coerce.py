"""Loss inputs of another numeric type than their loss takes: integers where floats belong, or the other way.

Invariant: what changes its type keeps its value, every one of them.
"""

from __future__ import annotations

import numpy as np

from services.common.contract import tensors
from services.common.contract.errors import InvalidRequest
from services.common.contract.loss_schema import LOSS_SCHEMAS
from services.common.contract.tensors import DTYPES, HostTensor
from tinsmith.v1 import training_pb2

_NUMERIC = frozenset(("float32", "int64", "int32"))
_FAR = 2**62


def coerce(operation: training_pb2.ForwardBackward) -> None:
    """Gives every loss input the type that its loss takes. Proportional to the data: run in a thread.

    Raises:
        InvalidRequest: a number has no value of that type.
    """
    schema = LOSS_SCHEMAS.get(operation.loss_fn)
    if schema is None:
        return
    for index, datum in enumerate(operation.data):
        for name, pb in datum.loss_inputs.items():
            spec = schema.inputs.get(name)
            if spec is None or pb.dtype == DTYPES[spec.dtype].pb:
                continue
            tensor = tensors.from_pb(pb, f"data[{index}]: {name}")
            if tensor.dtype in _NUMERIC:
                pb.CopyFrom(tensors.to_pb(_exactly(tensor, spec.dtype, f"data[{index}]: {name}")))


def _exactly(tensor: HostTensor, dtype: str, label: str) -> HostTensor:
    values = tensor.values()
    wanted = DTYPES[dtype].numpy
    assert wanted is not None
    with np.errstate(invalid="ignore"):
        cast = values.astype(wanted)
        # What a number becomes that is out of the other type's range depends on the machine.
        same = (values > -_FAR) & (values < _FAR) & (cast.astype(values.dtype) == values)
    if not same.all():
        wrong = values.ravel()[int(np.argmin(same.ravel()))]
        raise InvalidRequest(
            f"{label} must be {dtype}, got {tensor.dtype} with {wrong}, which is no {dtype}", "wrong_dtype"
        )
    return HostTensor(dtype, tensor.shape, cast.tobytes())
