"""What a corpus and its questions take of disks, processors and money, from sums alone."""
