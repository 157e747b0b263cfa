"""Files that are written as a whole: who can write the folder changes no others by them."""

import os
import stat

from ringcomm.atomic_files import replacing


def test_a_link_in_the_place_of_an_unfinished_file_opens_nothing_to_others(tmp_path):
    secret, shared = tmp_path / "secret", tmp_path / "shared"
    secret.write_text("the key")
    secret.chmod(0o600)

    def swap(unfinished):  # as who may write the folder can at any moment
        unfinished.unlink()
        unfinished.symlink_to(secret)

    with replacing(shared / "table.json", swap) as file:
        file.write(b"{}")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert secret.read_text() == "the key"


def test_a_file_has_its_mode_before_it_has_its_name(tmp_path):
    modes = []
    mask = os.umask(0o027)
    try:
        for mode in (0o666, 0o600):
            with replacing(
                tmp_path / "a",
                lambda made: modes.append(stat.S_IMODE(made.stat().st_mode)),
                mode=mode,
            ) as file:
                file.write(b"x")
    finally:
        os.umask(mask)
    assert modes == [0o640, 0o600]
