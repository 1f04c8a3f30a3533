"""What `tinsmith up` makes before it starts anything: the API key, and the data directory."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from services.common.contract.errors import Unavailable
from services.common.storage.data_dir import DataDir
from services.launcher import plan, up


def test_the_api_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    file = tmp_path / "api_key"
    key = up.api_key(file)
    assert key.startswith("tml-")
    assert len(key) > 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert up.api_key(file) == key
    # Its owner has a name, which a new key in its place keeps.
    assert file.read_text().split()[1:] == ["operator", "role=admin"]
    file.unlink()
    assert up.api_key(file) != key
    assert file.read_text().split()[1:] == ["operator", "role=admin"]


def test_a_file_of_keys_with_a_mistake_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "api_key").write_text("tml-one alice bob\n")
    with pytest.raises(Unavailable, match="line 1: after the owner come role="):
        up.api_key(tmp_path / "api_key")
    (tmp_path / "api_key").write_text("# none\n")
    with pytest.raises(Unavailable, match="holds no API key"):
        up.api_key(tmp_path / "api_key")


def test_a_key_without_an_owner_is_told_which_one_has_what_was_made_with_it(tmp_path: Path) -> None:
    file = tmp_path / "api_key"
    file.write_text("# the first\ntml-one\n")
    with pytest.raises(Unavailable, match="line 2: the owner's name is missing") as caught:
        up.api_key(file)
    told = caught.value.message.rpartition("in that line: ")[2]
    # What `printf %s tml-one | sha256sum` begins with.
    assert told == "key-37186f648184 role=admin"
    file.write_text(f"tml-one {told}\n")
    assert up.api_key(file) == "tml-one"


@pytest.mark.parametrize(
    ("holds", "mode"), [([], 0o700), (["cluster_id", "run"], 0o700), (["pictures"], 0o755)]
)
def test_only_a_directory_of_a_cluster_alone_is_closed_to_others(
    holds: list[str], mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    for name in holds:
        (tmp_path / name).mkdir()
    # The second start finds what the first one made.
    for _ in range(2):
        up.make_directory(DataDir(tmp_path))
        assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
        assert ("chmod 700" in capsys.readouterr().err) == (mode != 0o700)


def test_a_directory_that_up_makes_is_closed_to_others(tmp_path: Path) -> None:
    up.make_directory(DataDir(tmp_path / "a" / "b"))
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_file_cannot_be_the_data_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in ("file", "file/below"):
        with pytest.raises(Unavailable, match="choose another with --data-dir"):
            up.make_directory(DataDir(tmp_path / wrong))


def test_a_second_cluster_on_a_directory_is_refused(tmp_path: Path) -> None:
    options = plan.Options((plan.Model("a/b", "org/model"),), tmp_path)
    (tmp_path / "run").mkdir()
    with up._lock(tmp_path), pytest.raises(Unavailable, match="already runs"):
        up.up(options, None, False)
