"""What a corpus and its questions take of disks and processors, from sums alone."""
