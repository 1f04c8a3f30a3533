"""The certificates of a local cluster last, are renewed in time, and are private."""

from __future__ import annotations

import datetime as dt
import stat
from pathlib import Path

from services.common.tls.wires import ROLES, Identity
from services.launcher.certificates import authority

NOW = dt.datetime.now(dt.UTC)
DAY = dt.timedelta(days=1)


def certificates(root: Path) -> dict[str, bytes]:
    return {role: (root / role / "tls.crt").read_bytes() for role in ROLES}


def test_each_role_gets_an_identity_that_can_be_read(tmp_path: Path) -> None:
    authority.prepare(tmp_path / "tls", NOW)
    assert {role for role in ROLES if Identity(tmp_path / "tls" / role)} == set(ROLES)


def test_nothing_is_made_again_before_it_is_due(tmp_path: Path) -> None:
    authority.prepare(tmp_path, NOW)
    before, of = certificates(tmp_path), (tmp_path / "ca.crt").read_bytes()
    authority.prepare(tmp_path, NOW + 15 * DAY)
    assert authority.renew(tmp_path, NOW + 19 * DAY) == []
    assert (certificates(tmp_path), (tmp_path / "ca.crt").read_bytes()) == (before, of)


def test_a_certificate_is_renewed_when_a_third_of_its_time_is_left(tmp_path: Path) -> None:
    authority.prepare(tmp_path, NOW)
    before = certificates(tmp_path)
    assert authority.renew(tmp_path, NOW + 21 * DAY) == list(ROLES)
    assert all(certificates(tmp_path)[role] != before[role] for role in ROLES)


def test_what_a_crash_left_in_halves_is_made_again(tmp_path: Path) -> None:
    authority.prepare(tmp_path, NOW)
    (tmp_path / "trainer" / "tls.key").write_bytes((tmp_path / "sampler" / "tls.key").read_bytes())
    assert authority.renew(tmp_path, NOW) == ["trainer"]
    (tmp_path / "ca.key").write_bytes((tmp_path / "sampler" / "tls.key").read_bytes())
    authority.prepare(tmp_path, NOW)
    assert (tmp_path / "ca.crt").read_bytes() == (tmp_path / "trainer" / "ca.crt").read_bytes()


def test_only_what_was_made_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "tls"
    authority.remove(root)
    authority.prepare(root, NOW)
    (root / "sampler" / ".tls.key-12").touch()
    authority.remove(root)
    assert not root.exists()
    authority.prepare(root, NOW)
    for name in ("tls.crt", "tls.key", "gateway/mine"):
        (root / name).write_text("mine")
    authority.remove(root)
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert left == ["gateway/mine", "tls.crt", "tls.key"]


def test_a_directory_that_only_is_named_like_ours_is_left(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "tls", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (elsewhere / "tls.key").touch()
    (root / "gateway").symlink_to(elsewhere)
    (root / "trainer").touch()
    authority.remove(root)
    assert (elsewhere / "tls.key").exists()
    assert (root / "trainer").exists()


def test_an_authority_near_its_end_is_replaced_with_all_below_it(tmp_path: Path) -> None:
    authority.prepare(tmp_path, NOW)
    before = certificates(tmp_path)
    authority.prepare(tmp_path, NOW + 3400 * DAY)
    assert all(certificates(tmp_path)[role] != before[role] for role in ROLES)
    assert all(
        (tmp_path / role / "ca.crt").read_bytes() == (tmp_path / "ca.crt").read_bytes() for role in ROLES
    )


def test_every_file_is_for_its_user_alone(tmp_path: Path) -> None:
    authority.prepare(tmp_path / "tls", NOW)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").rglob("*")}
    assert len(modes) == 18
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())
