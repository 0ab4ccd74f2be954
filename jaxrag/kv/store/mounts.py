"""Whether other machines may write to a folder, too."""

import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
# File systems that machines share; what a program serves (fuse) may be one.
_SHARED = re.compile(
    "nfs|cifs|smb|lustre|ceph|gluster|gpfs|beegfs|afs|9p|virtiofs|weka|ocfs2|gfs2|orangefs|pvfs|"
    "panfs|fuse"
)


def is_shared(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether a folder, which need not be there yet, is on a file system that machines share.

    Args:
        folder: any path.
        mounts: what Linux says is mounted where. Without that file the folder counts as local.
    """
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    path, mount = folder.resolve(), ("", "")
    for line in lines:
        fields, _, kind = line.partition(" - ")
        place = fields.split()[4].encode().decode("unicode_escape")  # a space is \040 there
        if path.is_relative_to(place) and len(place) >= len(mount[0]):  # the last one hides others
            mount = place, kind
    return _SHARED.match(mount[1]) is not None
