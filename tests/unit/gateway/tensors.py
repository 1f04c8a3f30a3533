"""Tensors of requests."""

import numpy as np

from tinsmith.v1 import types_pb2


def tensor(values: list, dtype: str) -> types_pb2.Tensor:
    kinds = {
        "<i4": types_pb2.DATA_TYPE_INT32,
        "<i8": types_pb2.DATA_TYPE_INT64,
        "<f4": types_pb2.DATA_TYPE_FLOAT32,
    }
    array = np.array(values, dtype)
    return types_pb2.Tensor(dtype=kinds[dtype], shape=array.shape, data=array.tobytes())
