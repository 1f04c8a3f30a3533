"""What the log says of files of a certificate that are not there, or do not belong together."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import trustme

from services.common.tls.files import KeyFiles


@pytest.fixture
def files(tmp_path: Path) -> KeyFiles:
    """Each question is a look at them."""
    write(tmp_path, trustme.CA())
    return KeyFiles(tmp_path / "tls.crt", tmp_path / "tls.key", clock=itertools.count(step=2).__next__)


def write(directory: Path, authority: trustme.CA) -> None:
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(directory / "tls.key")
    issued.cert_chain_pems[0].write_to_path(directory / "tls.crt")


def errors(caplog: pytest.LogCaptureFixture) -> int:
    return len([one for one in caplog.records if one.levelname == "ERROR"])


def test_files_that_are_gone_are_one_line_however_often_they_are_looked_for_and_one_more_the_next_time(
    files: KeyFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = files.material
    for outage in (1, 2):
        (tmp_path / "tls.crt").rename(tmp_path / "away")
        assert [files.material for _ in range(5)] == [before] * 5
        assert errors(caplog) == outage
        (tmp_path / "away").rename(tmp_path / "tls.crt")
        assert files.material is before


def test_a_key_that_does_not_belong_to_the_certificate_is_one_line_and_another_one_is_one_more(
    files: KeyFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = files.material
    for wrong in (1, 2):
        (tmp_path / "tls.key").write_text("no key" * wrong)
        assert [files.material for _ in range(3)] == [before] * 3
        assert errors(caplog) == wrong
    write(tmp_path, trustme.CA())
    assert files.material.number == 1
