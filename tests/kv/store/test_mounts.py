"""Folders on file systems that several machines mount."""

from pathlib import Path

import pytest

from jaxrag.kv.store.mounts import is_shared

MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /data rw - nfs4 server:/data rw,vers=4.2
31 30 8:2 / /data/fast rw master:2 - xfs /dev/sdb rw
32 22 0:33 / /with\040space rw - fuse.juicefs JuiceFS:x rw
33 22 0:34 / /twice rw - ext4 /dev/sdc rw
34 33 0:35 / /twice rw - lustre mds@tcp:/x rw
"""


@pytest.mark.parametrize(
    ("folder", "shared"),
    [
        ("/kb", False),
        ("/data", True),
        ("/data/kb/not/there/yet", True),
        ("/database", False),
        ("/data/fast/kb", False),
        ("/with space/kb", True),
        ("/twice/kb", True),
    ],
)
def test_the_last_mount_that_holds_a_folder_tells(tmp_path, folder, shared):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert is_shared(Path(folder), mounts) is shared


def test_a_system_that_does_not_tell(tmp_path):
    assert not is_shared(tmp_path, tmp_path / "missing")
