"""What roles and scopes may do."""

import pytest

from services.common.contract.errors import PermissionDenied
from services.gateway.identity.key import Caller
from services.gateway.identity.rights import NEEDS, check


def may(caller: Caller, method: str) -> bool:
    try:
        check(caller, method)
    except PermissionDenied:
        return False
    return True


def test_role_read_may_do_what_changes_nothing_and_nothing_else() -> None:
    reader = Caller("alice", "read")
    for method, need in NEEDS.items():
        assert may(reader, method) == (not need.writes), method
    assert may(reader, "GetModelInfo")
    assert not may(reader, "OptimStep")
    assert not may(reader, "POST asample")


def test_only_role_admin_may_administer() -> None:
    for method in ("CreateKey", "ListKeys", "RevokeKey", "RotateKey"):
        assert may(Caller("root", "admin"), method)
        assert not may(Caller("alice", "user"), method)
        assert not may(Caller("alice", "read"), method)


def test_a_key_of_one_scope_has_no_other_one_and_all_that_needs_none() -> None:
    sampler = Caller("alice", "user", ("sample",))
    assert may(sampler, "Sample")
    assert may(sampler, "CreateSession")
    assert not may(sampler, "ForwardBackward")
    assert not may(sampler, "POST save_weights")
    assert not may(sampler, "ReadExternalWeights")
    with pytest.raises(
        PermissionDenied, match=r"takes an API key with the scope train, .* limited to sample"
    ):
        check(sampler, "OptimStep")
